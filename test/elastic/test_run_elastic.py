"""Elastic jobs under ringrun: real processes on this host and on simulated ones, which really die."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_storm import storm_of_hosts
from harness.clocks import require_within
from harness.hosts import SimulatedHosts
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi, processes_with, ringrun, wait_until
from harness.socket_ranks import free_port

import ringtrain
from ringtrain.job.rendezvous.generations import Waiting
from ringtrain.runner import command
from ringtrain.runner.flags import parse
from ringtrain.runner.hosts import Host, UsageError
from ringtrain.runner.job import ElasticTerms, Job
from ringtrain.runner.launchers import OwnStarter
from ringtrain.runner.start.placement import Discovery, DiscoveryError
from ringtrain.runner.start.starter import waiting_in_words

pytestmark = [needs_mpi, pytest.mark.alike]
TRAIN = ["python", "train.py"]
MARK = "RINGRUN_TEST"
# for a process that joins by itself
OUTSIDE = {"RINGTRAIN_ELASTIC": "1"}

# Counts steps until the file `stop` is there, which rank 0 alone looks for.
LOOP = """
import os, pathlib, signal, sys, time, numpy as np, ringtrain as hvd
from ringtrain.job import elastic_client, session
stop = pathlib.Path("stop")
if os.environ.get("STOPS_BEFORE_INIT") == os.environ.get("RINGRUN_PROCESS", ""):
    os.kill(os.getpid(), signal.SIGSTOP)
hvd.init()
step = 0
while True:
    print(f"generation {elastic_client.seat().generation} rank {hvd.rank()}/{hvd.size()} pid {os.getpid()}", flush=True)
    try:
        elastic_client.ready()
        step = int(hvd.broadcast(np.array([step]), 0, name="step")[0])
        if step:
            print(f"goes on from step {step}", flush=True)
        is_over = False
        while not is_over:
            time.sleep(0.01)
            wants_to_stop = hvd.rank() == 0 and stop.exists()
            news, is_over = hvd.allreduce(np.array([elastic_client.has_news(), wants_to_stop]), op=hvd.Sum)
            step += 1
            elastic_client.set_commits(step)
            if news and not is_over:
                break
        if is_over:
            break
    except hvd.HorovodInternalError as error:
        pass
    session.begin_again()
print("well", hvd.size(), flush=True)
"""


class Started:
    """A process `number` of the job that has said which rank it is."""

    def __init__(self, match: re.Match[str]):
        self.number, self.generation, self.rank, self.size, self.pid = map(int, match.groups())

    def kill(self, how: int = signal.SIGKILL) -> None:
        os.kill(self.pid, how)

    def variable(self, name: str) -> str | None:
        """Returns the one that it was started with."""
        start = f"{name}=".encode()
        variables = Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0")
        return next((one.removeprefix(start).decode() for one in variables if one.startswith(start)), None)

    def kill_agent(self) -> None:
        os.kill(parent_of(parent_of(self.pid)), signal.SIGKILL)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class ElasticJob:
    """ringrun with such a job, in `folder`."""

    def __init__(self, folder: Path, words: list[str], hosts: SimulatedHosts | None = None, **more: str):
        self._folder = folder
        (folder / "train.py").write_text(LOOP)
        line = [sys.executable, "-m", "ringtrain.run", *words]
        line += [] if "--" in words or "-c" in words else TRAIN
        environment = {**os.environ, "PYTHONPATH": ROOT, MARK: str(folder)}
        if hosts is not None:
            line, environment = hosts.command_on(0, line), {**environment, **hosts.environment}
        with (folder / "output").open("wb") as output, (folder / "errors").open("wb") as errors:
            self.process = subprocess.Popen(
                line, cwd=folder, env={**environment, **more}, stdout=output, stderr=errors, start_new_session=True
            )

    @property
    def output(self) -> str:
        return (self._folder / "output").read_text()

    @property
    def errors(self) -> str:
        return (self._folder / "errors").read_text()

    @property
    def said(self) -> list[str]:
        """Returns the lines of ringrun itself."""
        return [line.removeprefix("ringrun: ") for line in self.errors.splitlines() if line.startswith("ringrun: ")]

    def seats(self) -> list[Started]:
        pattern = r"^\[(\d+)\] generation (\d+) rank (\d+)/(\d+) pid (\d+)$"
        return [Started(match) for match in re.finditer(pattern, self.output, re.MULTILINE)]

    def of(self, generation: int, size: int) -> list[Started]:
        """Wait until all ranks of a generation at work have said that they are of it. By rank."""

        def found() -> list[Started]:
            return [one for one in self.seats() if one.generation == generation and one.size == size]

        self.wait_until(lambda: len(found()) == size)
        return sorted(found(), key=lambda one: one.rank)

    def left_alone(self, after: int, size: int) -> list[Started]:
        """Returns the ranks of the first generation of that size, later than that one, that have said so."""
        seats = [one for one in self.seats() if one.generation > after and one.size == size]
        return [one for one in seats if one.generation == seats[0].generation]

    def grown_to(self, size: int, after: int = 0) -> list[Started]:
        """Wait for a generation of that size, later than that one, that is the last one by now. By rank."""

        def found() -> list[Started]:
            seats = self.seats()
            last = max((one.generation for one in seats), default=0)
            return [one for one in seats if one.generation == last > after and one.size == size]

        self.wait_until(lambda: len(found()) == size)
        return sorted(found(), key=lambda one: one.rank)

    def pids_of(self, number: int) -> set[int]:
        """Returns a process and its wrapper."""
        return set(processes_with(MARK, str(self._folder))) & set(processes_with("RINGRUN_PROCESS", str(number)))

    def has_process(self, number: int) -> bool:
        return bool(self.pids_of(number))

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        try:
            wait_until(lambda: is_true() or self.process.poll() is not None, TIMEOUT_S)
            assert is_true()
        except AssertionError:
            raise AssertionError(f"{self.output}\n---\n{self.errors}") from None

    def stop(self) -> None:
        """Makes the ranks end well."""
        (self._folder / "stop").touch()

    def ends(self, code: int = 0) -> list[str]:
        """Wait for its end, which leaves nothing behind. Returns what ringrun has said."""
        assert self.process.wait(TIMEOUT_S) == code, f"{self.output}\n---\n{self.errors}"
        wait_until(lambda: not processes_with(MARK, str(self._folder)), 10)
        return self.said


@contextlib.contextmanager
def elastic(folder: Path, *words: str, hosts: SimulatedHosts | None = None, **more: str) -> Iterator[ElasticJob]:
    job = ElasticJob(folder, list(words), hosts, **more)
    try:
        yield job
    finally:
        job.process.kill()
        job.process.wait()
        for pid in processes_with(MARK, str(folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def ringrun_line(folder: Path, script: str) -> list[str]:
    """Of words for ringrun: a script of lines for each process, beside the loop."""
    (folder / "other.py").write_text(script)
    return ["--", "python", "other.py"]


# --- processes die ----------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_a_quiet_job_says_nothing_and_its_processes_are_the_ranks(tmp_path: Path) -> None:
    with elastic(tmp_path, "-np", "3", "--min-np", "1") as job:
        assert [one.number for one in job.of(1, 3)] == [0, 1, 2]
        job.stop()
        assert job.ends() == []
        assert sorted(line for line in job.output.splitlines() if "well" in line) == [
            f"[{number}] well 3" for number in range(3)
        ]


@pytest.mark.fast
def test_the_others_go_on_without_a_killed_process_and_then_with_one_in_its_place(tmp_path: Path) -> None:
    with elastic(tmp_path, "-np", "3", "--min-np", "1", "--output-filename", "logs") as job:
        job.of(1, 3)[0].kill()
        assert [one.number for one in job.of(2, 2)] == [1, 2]
        assert [one.number for one in job.of(3, 3)] == [1, 2, 3]
        job.stop()
        said = job.ends()
        gone = "process 0 on localhost was ended by SIGKILL in generation 1"
        # the rendezvous may be faster than the agent
        assert sorted(said[:3]) == ["generation 2: 2 ranks", "generation 3: 3 ranks", gone] and said[3] == gone
        assert re.fullmatch(
            r"there were 3 generations, the last one of 3 ranks; \d+\.\d\d s were lost between them", said[4]
        )
        assert len(said) == 5
    assert "well 3" in (tmp_path / "logs" / "rank.3" / "stdout").read_text()


def kill_all(seats: list[Started]) -> None:
    """Stops them all first: else one may be of the next generation before it dies."""
    for how in (signal.SIGSTOP, signal.SIGKILL):
        for one in seats:
            one.kill(how)


def test_when_all_die_they_are_started_again_and_told_that_training_begins_anew(tmp_path: Path) -> None:
    sentence = "generation 2 has no rank that had the state: training begins at step 0"
    with elastic(tmp_path, "-np", "2", "--min-np", "2") as job:
        seats = job.of(1, 2)
        time.sleep(0.5)  # some commits
        kill_all(seats)
        assert [one.number for one in job.of(2, 2)] == [2, 3]
        job.wait_until(lambda: any(line.startswith(sentence) for line in job.said))
        job.stop()
        said = job.ends()
    assert len([line for line in said if line.startswith(sentence)]) == 2
    assert job.errors.count("no rank had the state: training begins at step 0. Use state.save_to()") == 1


def test_a_job_that_must_keep_its_state_fails_when_it_is_lost(tmp_path: Path) -> None:
    with elastic(tmp_path, "-np", "2", "--min-np", "2", "--on-state-lost", "fail") as job:
        seats = job.of(1, 2)
        time.sleep(0.5)  # some commits
        kill_all(seats)
        assert job.ends(1)[-1].startswith("no process has the state any more, and training must not begin anew")
    # the second one has asked whether somebody has read the state from a file
    assert max(one.generation for one in job.seats()) == 2 and "goes on from step" not in job.output


def test_a_process_that_is_stopped_before_init_is_named(tmp_path: Path) -> None:
    sentence = "generation 2 has waited 5 s for 1 more process (process 2 on localhost: no call of init() yet)"
    with elastic(tmp_path, "-np", "2", "--min-np", "2", STOPS_BEFORE_INIT="2") as job:
        job.of(1, 2)[1].kill()
        job.wait_until(lambda: sentence in job.said)
        for pid in job.pids_of(2):
            os.kill(pid, signal.SIGCONT)
        assert [one.number for one in job.of(2, 2)] == [0, 2]
        job.stop()
        job.ends()


def test_a_process_that_somebody_else_tells_to_end_is_replaced(tmp_path: Path) -> None:
    with elastic(tmp_path, "-np", "2", "--min-np", "1") as job:
        os.killpg(parent_of(job.of(1, 2)[1].pid), signal.SIGTERM)  # with its wrapper, as Slurm would
        assert [one.number for one in job.of(3, 2)] == [0, 2]
        job.stop()
        assert "process 1 on localhost was ended by SIGTERM in generation 1" in job.ends()


def test_a_process_that_waits_takes_the_place_of_a_killed_one_at_once(tmp_path: Path) -> None:
    with elastic(tmp_path, "-np", "2", "--min-np", "2", "--max-np", "2", "--slots", "3") as job:
        first = job.of(1, 2)
        # the third is in its init() when it has imported the library
        job.wait_until(lambda: job.has_process(2))
        time.sleep(2)
        begin = time.monotonic()
        first[1].kill()
        assert [one.number for one in job.of(2, 2)] == [0, 2]
        require_within(2, begin)
        job.stop()
        job.ends()


def test_a_stopped_process_is_killed_and_replaced_when_the_others_have_waited_for_it(tmp_path: Path) -> None:
    with elastic(tmp_path, "-np", "3", "--min-np", "1", "--stall-shutdown-time-s", "2") as job:
        job.of(1, 3)[1].kill(signal.SIGSTOP)
        assert {one.number for one in job.grown_to(3, after=1)} == {0, 2, 3}
        job.stop()
        assert "process 1 on localhost was ended by SIGKILL in generation 1" in job.ends()


@pytest.mark.slow
def test_sixteen_generations_leave_the_starter_and_the_agent_as_they_were(tmp_path: Path) -> None:
    with elastic(tmp_path, "-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "1") as job:
        agent = parent_of(parent_of(job.of(1, 2)[0].pid))
        of_both = [parent_of(agent), agent]
        most = [number for pid in of_both for number in held_by(pid)]  # the threads of the start may be among them
        seats = job.of(1, 2)
        while (last := seats[0].generation) <= 16:
            seats[last // 2 % 2].kill()
            seats = job.grown_to(2, after=last)

        def holds_no_more() -> bool:
            now = [number for pid in of_both for number in held_by(pid)]
            return all(number <= before for number, before in zip(now, most, strict=True))

        wait_until(holds_no_more, 10)
        job.stop()
        job.ends()


def held_by(pid: int) -> tuple[int, int]:
    """Descriptors and threads."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def test_a_script_that_always_fails_ends_the_job_and_shows_why(tmp_path: Path) -> None:
    script = "import sys, time; print('hello'); time.sleep(0.2); raise ValueError('no such data')"
    with elastic(tmp_path, "-np", "2", "--min-np", "2", *ringrun_line(tmp_path, script)) as job:
        said = job.ends(1)
    assert 5 <= job.output.count("hello") <= 8
    assert "ringrun:     ValueError: no such data" not in job.errors
    (given_up,) = [line for line in said if line.startswith("localhost gets no more processes: ")]
    assert re.fullmatch(r"localhost gets no more processes: process \d is not the first that fails there", given_up)
    assert said[-1] == "fewer than 2 ranks (--min-np) are left, and no host can have another one"
    assert "    ValueError: no such data" in job.errors.splitlines()


def test_a_host_that_was_given_up_gets_processes_again_after_its_cooldown(tmp_path: Path) -> None:
    script = """
import pathlib, sys
here = pathlib.Path("count")
with here.open("a") as file:
    file.write("x")
sys.exit(0 if here.stat().st_size > 4 else 7)
"""
    words = ["-np", "1", "--min-np", "1", "--blacklist-cooldown-range", "2", "5"]
    begin = time.monotonic()
    with elastic(tmp_path, *words, *ringrun_line(tmp_path, script)) as job:
        said = job.ends()
    assert 2 < time.monotonic() - begin < 30
    assert "localhost gets no more processes for 2 s: process 3 is not the first that fails there" in said
    assert said.count("process 3 on localhost ended with exit code 7") == 2


@pytest.mark.parametrize(
    ("end", "code"), [("raise SystemExit(5)", 5), ("os.kill(os.getpid(), 9)", 0)], ids=["by its own code", "killed"]
)
def test_after_the_end_of_another_one_its_own_failure_fails_the_job(end: str, code: int, tmp_path: Path) -> None:
    script = f"""
import os, time, ringtrain as hvd
hvd.init()
rank = hvd.rank()
hvd.shutdown()
if rank == 1:
    time.sleep(1)
    {end}
"""
    with elastic(tmp_path, "-np", "2", "--min-np", "1", *ringrun_line(tmp_path, script)) as job:
        said = job.ends(code)
    assert any(line.startswith("process 1 on localhost ") for line in said)


def test_a_job_may_meet_anew_as_often_as_its_reset_limit_says(tmp_path: Path) -> None:
    with elastic(tmp_path, "-np", "2", "--min-np", "1", "--reset-limit", "0") as job:
        job.of(1, 2)[1].kill()
        assert "reset limit" in job.ends(1)[-1]


def test_fewer_than_the_least_number_of_ranks_wait_for_the_elastic_timeout(tmp_path: Path) -> None:
    (script := tmp_path / "hosts.sh").write_text("#!/bin/sh\necho localhost:1\n")
    script.chmod(0o755)
    words = ["--min-np", "2", "--host-discovery-script", "./hosts.sh"]
    with elastic(tmp_path, *words, HOROVOD_ELASTIC_TIMEOUT="3") as job:
        assert job.ends(1)[-1] == "1 process of at least 2 have come in 3 s (--elastic-timeout)"


# --- signals ----------------------------------------------------------------------------------------------------------


def test_sigterm_gives_the_processes_time_and_starts_no_others(tmp_path: Path) -> None:
    script = """
import os, signal, time
def end(*_):
    time.sleep(1)
    print("saved", flush=True)
    raise SystemExit(3)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(60)
"""
    with elastic(tmp_path, "-np", "2", "--min-np", "1", *ringrun_line(tmp_path, script)) as job:
        job.wait_until(lambda: job.output.count("ready") == 2)
        job.process.send_signal(signal.SIGTERM)
        job.ends(143)
        assert sorted(job.output.splitlines()) == sorted([f"[{n}] {w}" for n in (0, 1) for w in ("ready", "saved")])


def test_a_second_ctrl_c_ends_an_elastic_job_at_once(tmp_path: Path) -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    with elastic(tmp_path, "-np", "2", "--min-np", "1", *ringrun_line(tmp_path, script)) as job:
        job.wait_until(lambda: job.output.count("ready") == 2)
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        job.process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        job.ends(130)
        assert time.monotonic() - begin < 10


def test_a_killed_ringrun_takes_its_elastic_job_along(tmp_path: Path) -> None:
    with elastic(tmp_path, "-np", "2", "--min-np", "1") as job:
        job.of(1, 2)
        job.process.kill()
        wait_until(lambda: not processes_with(MARK, str(tmp_path)), 10)


@pytest.mark.fast
def test_a_process_that_somebody_else_starts_joins_and_is_awaited(tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_bytes(os.urandom(32))
    secret.chmod(0o600)
    port = free_port()
    more = {"RINGTRAIN_SECRET_FILE": str(secret), "RINGTRAIN_RENDEZVOUS": f"127.0.0.1:{port}"}
    words = ["-np", "1", "--min-np", "1", "--max-np", "2", "--slots", "1"]
    with elastic(tmp_path, *words, **more) as job:
        job.of(1, 1)
        environment = {**os.environ, "PYTHONPATH": ROOT, MARK: str(tmp_path), **OUTSIDE, **more}
        line = [sys.executable, "train.py"]
        with subprocess.Popen(line, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as outsider:
            job.wait_until(lambda: "generation 2: 2 ranks" in job.errors)
            job.stop()
            assert outsider.communicate(timeout=TIMEOUT_S)[0].splitlines()[-1] == "well 2"
        assert len(job.ends()) == 2


# --- several hosts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(three_hosts: SimulatedHosts, tmp_path: Path) -> dict[str, str]:
    """The variable that has each connection to a host written down in `calls`, by its name."""
    (agent := tmp_path / "ssh").write_text(
        "#!/bin/sh\nfor word; do case $word in -*);; *) break;; esac; done\n"
        f'echo $word >> {tmp_path}/calls\nexec {three_hosts.environment["HYDRA_LAUNCHER_EXEC"]} "$@"\n'
    )
    agent.chmod(0o755)
    return {"RINGTRAIN_SSH_AGENT": str(agent)}


def on_two(hosts: SimulatedHosts) -> list[str]:
    return ["-H", ",".join(f"{name}:2" for name in hosts.names[:2]), "--min-np", "1"]


@pytest.mark.fast
def test_a_process_on_another_host_is_replaced_without_another_ssh(
    three_hosts: SimulatedHosts, counted: dict[str, str], tmp_path: Path
) -> None:
    with elastic(tmp_path, *on_two(three_hosts), hosts=three_hosts, **counted) as job:
        job.of(1, 4)[3].kill()
        job.of(2, 3)
        assert [one.number for one in job.of(3, 4)] == [0, 1, 2, 4]
        assert (tmp_path / "calls").read_text().split() == [three_hosts.names[1]]
        job.stop()
        assert f"process 3 on {three_hosts.names[1]} was ended by SIGKILL in generation 1" in job.ends()


def test_a_lost_host_costs_only_its_processes_and_is_reached_again(
    three_hosts: SimulatedHosts, counted: dict[str, str], tmp_path: Path
) -> None:
    host = three_hosts.names[1]
    with elastic(tmp_path, *on_two(three_hosts), hosts=three_hosts, **counted) as job:
        seats = job.of(1, 4)
        begin = time.monotonic()
        seats[2].kill_agent()
        assert [one.number for one in job.of(2, 2)] == [0, 1]
        require_within(2, begin)
        assert {one.number for one in job.grown_to(4)} == {0, 1, 4, 5}
        assert (tmp_path / "calls").read_text().split() == [host, host]
        job.stop()
        said = job.ends()
    (lost, _) = [
        line for line in said if line.startswith(f"processes 2-3 got lost: the connection to {host} has ended (")
    ]
    assert lost.endswith("exit code 137) in generation 1")


def test_a_host_that_cannot_be_reached_does_not_keep_the_others_from_training(
    three_hosts: SimulatedHosts, tmp_path: Path
) -> None:
    (agent := tmp_path / "ssh").write_text("#!/bin/sh\necho 'Permission denied (publickey).' >&2; exit 255\n")
    agent.chmod(0o755)
    words = ["-np", "2", *on_two(three_hosts)]
    with elastic(tmp_path, *words, hosts=three_hosts, RINGTRAIN_SSH_AGENT=str(agent)) as job:
        job.of(1, 2)
        job.wait_until(lambda: job.errors.count("Permission denied") == 2)
        job.stop()
        said = job.ends()
    host = three_hosts.names[1]
    lost = f"processes 2-3 got lost: the connection to {host} has ended ({agent}: exit code 255)"
    assert lost in said


@pytest.mark.slow
def test_the_agents_of_an_allocation_are_started_by_srun(three_hosts: SimulatedHosts, tmp_path: Path) -> None:
    (srun := tmp_path / "srun").write_text(f"""\
#!/bin/sh
echo "$@" >> {tmp_path}/calls
for word; do
    case $word in --nodelist=*) host=${{word#*=}};; esac
    case $word in -*) shift;; *) break;; esac
done
exec ip netns exec $host unshare --uts sh -c 'hostname "$0" && exec "$@"' $host "$@"
""")
    srun.chmod(0o755)
    first, second = three_hosts.names[:2]
    nodes = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"{first},{second}", "SLURM_NTASKS": "4"}
    slurm = {**nodes, "SLURM_TASKS_PER_NODE": "2(x2)", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with elastic(tmp_path, "--min-np", "1", hosts=three_hosts, **slurm) as job:
        job.of(1, 4)[3].kill()
        assert [one.number for one in job.of(3, 4)] == [0, 1, 2, 4]
        job.stop()
        job.ends()
    (call,) = (tmp_path / "calls").read_text().splitlines()
    where = f"--nodes=1 --nodelist={second} --ntasks-per-node=1 --overlap"
    assert call.startswith(f"--ntasks=1 --mpi=none --cpu-bind=none --export=ALL {where} {sys.executable} -I -S ")


def test_mpirun_starts_the_agents_of_other_hosts(three_hosts: SimulatedHosts, tmp_path: Path) -> None:
    second = three_hosts.names[1]
    # An agent's first order is longer than a launcher takes at once for the standard input of another host.
    large = " ".join(map(str, range(20_000)))
    with elastic(tmp_path, "--launcher", "mpirun", *on_two(three_hosts), hosts=three_hosts, LARGE=large) as job:
        seats = job.of(1, 4)
        assert all(one.variable("LARGE") == large for one in seats)
        seats[3].kill()
        assert [one.number for one in job.of(3, 4)] == [0, 1, 2, 4]
        seats[2].kill_agent()
        # Ranks that hear of the loss before ringrun does give up a generation of four first.
        job.wait_until(lambda: len(job.left_alone(3, 2)) == 2)
        assert sorted(one.number for one in job.left_alone(3, 2)) == [0, 1]
        job.stop()
        said = job.ends()
    assert f"process 3 on {second} was ended by SIGKILL in generation 1" in said
    assert any(f"got lost: the connection to {second} has ended (" in line for line in said)


def test_a_missing_ssh_is_named_with_the_host(tmp_path: Path) -> None:
    more = {"RINGTRAIN_SSH_AGENT": "/no/such/ssh"}
    with elastic(tmp_path, "-np", "2", "--min-np", "2", "-H", "localhost:1,192.0.2.7:1", **more) as job:
        job.wait_until(lambda: "192.0.2.7 cannot be reached: /no/such/ssh: No such file or directory" in job.said)
        job.process.terminate()
        job.ends(143)


# --- hosts that are discovered ----------------------------------------------------------------------------------------


class Hosts:
    """Sets the output of the discovery script, which may change."""

    def __init__(self, folder: Path, *lines: str):
        self._folder = folder
        self.script = folder / "discover.sh"
        self.script.write_text(f"#!/bin/sh\n. {folder}/answer\n")
        self.script.chmod(0o755)
        self.are(*lines)

    def are(self, *lines: str) -> None:
        self.say("\n".join(f"echo {line}" for line in lines))

    def say(self, shell: str) -> None:
        (draft := self._folder / "draft").write_text(shell)
        draft.rename(self._folder / "answer")

    @property
    def words(self) -> list[str]:
        return ["--host-discovery-script", str(self.script)]


@pytest.mark.fast
def test_slots_that_come_and_go_are_ranks_that_come_and_go(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost")
    with elastic(tmp_path, "-np", "1", "--min-np", "1", "--slots", "2", *hosts.words) as job:
        job.of(1, 1)
        assert [one.number for one in job.of(2, 2)] == [0, 1]
        hosts.are("localhost:3")
        assert [one.number for one in job.of(3, 3)] == [0, 1, 2]
        hosts.are("localhost:1")
        assert [one.number for one in job.of(4, 1)] == [0]
        job.wait_until(lambda: not job.has_process(1) and not job.has_process(2))
        job.stop()
        said = job.ends()
    assert [line for line in said if "was ended" in line] == []
    assert said[-1].startswith("there were 4 generations, the last one of 1 rank; ")


def test_a_script_that_fails_or_names_no_host_for_a_while_changes_nothing(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    failed = f"--host-discovery-script {hosts.script} has failed with exit code 3"
    words = "have not been named for 5 s; the ranks go on until others replace them"
    not_named = f"the hosts of processes 0-1 on localhost {words}"
    with elastic(tmp_path, "--min-np", "1", "--max-np", "4", "-np", "2", *hosts.words) as job:
        job.of(1, 2)
        hosts.say("exit 3")
        job.wait_until(lambda: failed in job.errors)
        time.sleep(2.2)
        hosts.are()
        job.wait_until(lambda: not_named in job.said)
        hosts.are("localhost:2")
        time.sleep(2)
        assert {(one.generation, one.number) for one in job.seats()} == {(1, 0), (1, 1)}
        assert job.said == [f"{failed}; the hosts stay as they are until it works", not_named]
        hosts.are("localhost:1")
        assert [one.number for one in job.of(2, 1)] == [0]
        job.stop()
        said = job.ends()
    assert len([line for line in said if "discover" in line]) == 1


def test_the_state_is_handed_over_when_all_hosts_are_exchanged(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "localhost:2")
    with elastic(tmp_path, "--min-np", "2", "--max-np", "4", *hosts.words) as job:
        job.of(1, 2)
        time.sleep(0.5)
        hosts.are("127.0.0.1:2")
        job.wait_until(lambda: {2, 3} == {one.number for one in job.seats() if one.size == 2 and one.generation > 2})
        job.wait_until(lambda: not job.has_process(0) and not job.has_process(1))
        job.stop()
        said = job.ends()
    assert not any("has no rank that had the state" in line for line in said)
    steps = [int(step) for step in re.findall(r"^\[[23]\] goes on from step (\d+)$", job.output, re.MULTILINE)]
    assert len(steps) >= 4 and min(steps) > 10


def test_a_storm_of_hosts_that_come_and_go_loses_no_step_and_hangs_nowhere(tmp_path: Path) -> None:
    assert sum(storm_of_hosts(tmp_path, seed=1, longest_s=6.0).values()) > 1


def test_hosts_that_come_are_used_and_those_that_go_are_left(
    three_hosts: SimulatedHosts, counted: dict[str, str], tmp_path: Path
) -> None:
    first, second, third = three_hosts.names
    hosts = Hosts(tmp_path, f"{first}:1")
    words = ["-np", "1", "--min-np", "1", *hosts.words]
    with elastic(tmp_path, *words, hosts=three_hosts, **counted) as job:
        job.of(1, 1)
        hosts.are(f"{first}:1", f"{second}:1", f"{third}:1")
        assert {one.number for one in job.grown_to(3)} == {0, 1, 2}
        hosts.are(f"{second}:1", f"{third}:1")
        assert {one.number for one in job.grown_to(2)} == {1, 2}
        job.stop()
        job.ends()
    assert sorted((tmp_path / "calls").read_text().split()) == [second, third]


def test_a_script_that_fails_at_first_is_a_mistake(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    hosts.say("echo 'who knows' >&2; exit 4")
    with elastic(tmp_path, "-np", "1", *hosts.words) as job:
        assert job.ends(1)[0] == f"--host-discovery-script {hosts.script} has failed with exit code 4"


def test_a_script_that_prints_something_else_has_failed() -> None:
    mistake = "is not a host; write host:2 or, in a hostfile, host slots=2"
    with pytest.raises(DiscoveryError, match=f"^--host-discovery-script echo 'h1 h2': \"h1 h2\" {mistake}$"):
        Discovery("echo 'h1 h2'", slots=1).ask()


def test_a_script_may_print_comments_and_hosts_without_numbers() -> None:
    discovery = Discovery("printf 'h1:2\\n\\n# spot\\nh2 # new\\n'", slots=4)
    assert discovery.ask() == [Host("h1", 2), Host("h2", 4)]
    discovery = Discovery("sleep 300 & echo h1:2; echo h2:0", slots=4)  # which keeps the standard output open
    assert discovery.ask() == [Host("h1", 2)]


def test_the_words_for_each_wait_name_who_is_waited_for() -> None:
    def words(what: str, silent: tuple[str, ...] = (), absent: str = "", needed: int = 0) -> str:
        return waiting_in_words(Waiting(2, 7.0, what, ("a", "b"), silent, (), needed), absent, " and ".join)

    assert words("processes", needed=2) == (
        "generation 3 has waited 7 s for 2 more processes (no other process is starting)"
    )
    assert words("processes", absent="x", needed=1).endswith(" for 1 more process (x: no call of init() yet)")
    assert words("replacements").startswith("the hosts of a and b have not been named for 7 s; ")
    assert words("init") == "generation 2 has waited 7 s for a and b in init()"
    assert words("train", silent=("a",)) == (
        "generation 2 has waited 7 s for a and b, between init() and the training; no answer from a: stopped?"
    )
    assert words("next") == "generation 3 has waited 7 s for a and b to leave the one before"


def test_a_script_that_hangs_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringtrain.runner.start.placement._LONGEST_S", 0.2)
    with pytest.raises(DiscoveryError, match=r"--host-discovery-script sleep 60 has not ended within 0.2 s"):
        Discovery("sleep 60", slots=1).ask()


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--network", "mpi", "-np", "2", "--min-np", "1"], "an elastic job never uses an MPI.*; leave out"),
        (["--launcher", "srun", "-np", "2", "--min-np", "1"], "--launcher srun works only inside a Slurm allocation"),
        (["-np", "2", "--min-np", "3"], "--min-np 3 is more than the 2 of -np"),
        (["-np", "2", "--min-np", "1", "--max-np", "1"], "-np 2 is more than the 1 of --max-np"),
        (["-np", "3", "--min-np", "1", "-H", "h1:2"], "-np 3 is more than the 2 slots of h1:2"),
        (["-np", "2", "--max-np", "4"], "--max-np is for elastic jobs; give --min-np, too"),
        (["-np", "2", "--blacklist-cooldown-range", "1", "2"], "--blacklist-cooldown-range is for elastic jobs"),
        (["-np", "2", "-H", "h1:2", "--host-discovery-script", "./h"], "either from --host-discovery-script or from"),
        (["--host-discovery-script", "./h"], "how many ranks. give -np or --min-np"),
        (["-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "9", "3"], "write the shorter time first"),
        (["-np", "2", "--min-np", "1", "--reset-limit", "-1"], "--reset-limit"),
        (["-np", "2", "--min-np", "1", "--mpi-args=--tag x"], "there is no launcher to give words to"),
    ],
)
def test_contradicting_flags_are_refused_with_a_sentence(words: list[str], message: str) -> None:
    done = ringrun(*words, *TRAIN)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert re.search(message, line), line


def job_of(*words: str, **environ: str) -> Any:
    return command.build_job(parse([*words, *TRAIN]), environ)


def test_the_first_and_the_largest_size_of_an_elastic_job() -> None:
    job = job_of("--min-np", "2", "--max-np", "8", "-H", "h1:4,h2:6")
    assert (job.num_proc, job.elastic) == (8, ElasticTerms(2, 8))
    assert job.environment["RINGTRAIN_NETWORK"] == "sockets"
    job = job_of("-np", "2", "--min-num-proc", "1", "--max-num-proc", "3")
    assert (job.num_proc, job.hosts) == (2, [Host("localhost", 3)])
    job = job_of("--min-np", "2", "--slots-per-host", "4", "--host-discovery-script", "./h", SLURM_JOB_ID="7")
    assert (job.num_proc, job.hosts, job.elastic) == (2, [], ElasticTerms(2, slots=4, discovery_script="./h"))
    assert job_of("-np", "2").elastic is None and "RINGTRAIN_NETWORK" not in job_of("-np", "2").environment


def test_the_timeout_is_that_of_the_flag_or_horovods_variable() -> None:
    words = ["-np", "1", "--min-np", "1"]
    assert job_of(*words).elastic.timeout_s == 600
    assert job_of(*words, HOROVOD_ELASTIC_TIMEOUT="7").elastic.timeout_s == 7
    assert job_of(*words, "--elastic-timeout", "5", HOROVOD_ELASTIC_TIMEOUT="7").elastic.timeout_s == 5
    with pytest.raises(UsageError, match="HOROVOD_ELASTIC_TIMEOUT=soon is not a number of seconds"):
        job_of(*words, HOROVOD_ELASTIC_TIMEOUT="soon")


def test_a_file_says_the_same_as_the_flags(tmp_path: Path) -> None:
    (config := tmp_path / "config.yaml").write_text(
        "np: 2\nmin-np: 1\nmax-num-proc: 4\nslots: 4\nreset_limit: 3\nelastic-timeout: 5\n"
        "blacklist-cooldown-range: [10, 20]\n"
    )
    job = job_of("--config-file", str(config))
    assert (job.num_proc, job.elastic) == (2, ElasticTerms(1, 4, 4, None, 5.0, 3, (10.0, 20.0)))
    assert job.hosts == [Host("localhost", 4)]


def test_the_terms_stand_on_the_command_line_of_the_starter() -> None:
    more = ["--reset-limit", "0", "--blacklist-cooldown-range", "1", "2"]
    job = job_of("-np", "2", "--min-np", "1", "--max-np", "3", *more)
    python, folder, kind, text, *command = OwnStarter().arguments(job)
    assert python == sys.executable and folder.endswith("/runner/start") and (kind, command) == ("elastic", TRAIN)
    assert Job.from_json(text, command, job.environment) == job
    assert job.elastic == ElasticTerms(1, 3, 1, None, 600.0, 0, (1.0, 2.0))


# --- from Python ------------------------------------------------------------------------------------------------------

CALL = """
import os, signal, sys, numpy as np, ringtrain, ringtrain as hvd

def work(base):
    hvd.init()
    if hvd.size() == 2:
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                hvd.allreduce(np.ones(1))
        except hvd.HorovodInternalError:
            from ringtrain.job import session
            session.begin_again()
    return base + hvd.rank(), int(os.environ["RINGRUN_PROCESS"])

def fail():
    raise LookupError("nothing here")

if __name__ == "__main__":
    import calls
    function, words = getattr(calls, sys.argv[1]), eval(sys.argv[2])
    try:
        print(ringtrain.run(function, *words.pop("args", ()), **words))
    except Exception as error:
        print(type(error).__name__, error)
"""


def call(folder: Path, function: str, **words: Any) -> tuple[str, str]:
    (folder / "calls.py").write_text(CALL)
    done = subprocess.run(
        [sys.executable, "calls.py", function, repr(words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return done.stdout, done.stderr


def test_run_returns_the_results_of_the_last_ranks(tmp_path: Path) -> None:
    printed, said = call(tmp_path, "work", args=((100,),), num_proc=2, min_num_proc=1, max_num_proc=2)
    # the killed one may be replaced before the other one has ended, which is the job's end
    assert printed.splitlines()[-1] == "[(100, 0)]", said
    assert "ringrun: process 1 on localhost was ended by SIGKILL in generation 1" in said


def test_run_raises_what_made_an_elastic_job_fail(tmp_path: Path) -> None:
    printed, _ = call(tmp_path, "fail", min_np=1)
    assert printed.splitlines()[-1] == "LookupError nothing here"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_num_proc": 3}, UsageError, "max_num_proc is for elastic jobs; give min_num_proc, too"),
        ({"min_num_proc": 0}, ValueError, "min_num_proc must be at least 1, not 0"),
        ({"min_num_proc": 1, "cooldown_range": 5}, TypeError, "cooldown_range must be two numbers"),
        ({"min_num_proc": 1, "num_proc": 3, "max_np": 2}, UsageError, "num_proc 3 is more than the 2 of max_num_proc"),
        ({"min_num_proc": 1, "reset_limit": "often"}, TypeError, "reset_limit must be a whole number"),
        ({"host_discovery_script": ["./h"]}, TypeError, "host_discovery_script must be a command"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ringtrain.run(print, **arguments)
