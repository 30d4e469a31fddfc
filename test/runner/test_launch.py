"""ringlaunch: MXNet's launch.py, with real processes on this host and on simulated ones."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.hosts import SimulatedHosts
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi, processes_with, wait_until

from ringtrain.runner.hosts import Host, UsageError
from ringtrain.runner.job import Address, Cast, Job, RoleTerms, address_of, host_of, read_addresses
from ringtrain.runner.launch_command import build_job, build_parser, command_of_copy
from ringtrain.runner.launchers import OwnStarter

pytestmark = [needs_mpi, pytest.mark.alike]
MARK = "RINGRUN_TEST"
TRAIN = ["python", "train.py"]
LOCAL = ["--launcher", "local"]

# Says who it is, in one line of JSON.
TELL = """
import json, os
print(json.dumps({name: value for name, value in os.environ.items() if name[:5] == "DMLC_" or name[:2] == "X_"}))
"""
# Each process writes down in a file of its own what happens to it; servers and the scheduler stay until they are told.
PROCESS = """
import os, pathlib, signal, sys, time
role, task, attempt = (os.environ["DMLC_" + name] for name in ("ROLE", "TASK_ID", "NUM_ATTEMPT"))
log = open(pathlib.Path(sys.argv[1], f"{role}{task}"), "a", buffering=1)
def end(number, frame):
    print(f"told at {time.monotonic()}", file=log)
    sys.exit(0)
def wait_for(name, attempt):
    path, until = pathlib.Path(sys.argv[1], name), time.monotonic() + 30
    while not (path.exists() and f"attempt {attempt}" in path.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
signal.signal(signal.SIGTERM, end)
print(f"attempt {attempt}", file=log)
"""


def command_of(*words: str) -> list[str]:
    return [sys.executable, "-m", "ringtrain.launch", *words]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ROOT, **more}


def ringlaunch(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command_of(*words), check=False, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(**more)
    )


def job_of(*words: str) -> Job:
    return build_job(build_parser().parse_args(words), os.environ)


def terms_of(*words: str) -> RoleTerms:
    roles = job_of(*words).roles
    assert roles is not None
    return roles


def printed_by(output: str) -> dict[str, dict[str, str]]:
    """Returns the line of each process, by the name that it begins with."""
    lines = [line.removeprefix("[").partition("] ") for line in output.splitlines()]
    return {name: json.loads(told) for name, _, told in lines}


# --- the command line -------------------------------------------------------------------------------------------------


def test_servers_and_then_workers_go_round_the_hosts_as_mxnet_documents_it() -> None:
    def places(cast: Cast, count: int) -> dict[str, str]:
        hosts = [Address(f"h{number}") for number in range(1, count + 1)]
        return {str(process): host_of(process, hosts, Address("here")).host for process in cast.processes()}

    of_five = places(Cast(servers=3, workers=3), 5)
    servers, workers = {f"server {n}": f"h{n + 1}" for n in range(3)}, {"worker 0": "h4", "worker 1": "h5"}
    assert of_five == {"the scheduler": "here", **servers, **workers, "worker 2": "h1"}
    of_three = places(Cast(servers=3, workers=3), 3)
    assert of_three == {"the scheduler": "here", **servers, **{f"worker {n}": f"h{n + 1}" for n in range(3)}}


def test_there_are_as_many_servers_as_workers_unless_it_is_said() -> None:
    assert terms_of("-n", "3", *LOCAL, *TRAIN).cast == Cast(servers=3, workers=3)
    assert terms_of("--num-workers", "3", "--num-servers", "0", *LOCAL, *TRAIN).cast == Cast(servers=0, workers=3)


def test_a_hostfile_has_an_address_in_each_line_and_maybe_a_port_of_ssh(tmp_path: Path) -> None:
    (hosts := tmp_path / "hosts").write_text("172.30.0.172\n\n# a comment\nh2:2222 # another\nfe80::1\n")
    expected = [Address("172.30.0.172"), Address("h2", 2222), Address("fe80::1")]
    assert read_addresses(str(hosts)) == expected
    assert terms_of("-n", "1", "-H", str(hosts), *TRAIN).hosts == expected
    hosts.write_text("\ufeffh1 slots=2\nme@h2\n[fe80::1]:2222\nh3 slots=0\n", encoding="utf-8")
    expected = [Address("h1"), Address("h1"), Address("me@h2"), Address("fe80::1", 2222)]
    assert read_addresses(str(hosts)) == expected
    assert [address_of(str(one), "") for one in expected] == expected  # as the starter is told them
    for wrong in ("h2 slots=", "h2 rank=1", "h1:0", "1:2:3", "me@", "h 1"):
        hosts.write_text(f"h1\n{wrong}\n")
        with pytest.raises(UsageError, match=f"hosts, line 2: {re.escape(json.dumps(wrong))} is not a host"):
            read_addresses(str(hosts))


def test_words_after_the_command_belong_to_the_command() -> None:
    job = job_of("-n", "1", *LOCAL, "--p3", "python", "train.py", "-n", "5", "--kvstore", "dist_sync")
    assert job.command == ["python", "train.py", "-n", "5", "--kvstore", "dist_sync"]
    assert (job.environment["DMLC_PS_VAN_TYPE"], job.environment["DMLC_PS_WATER_MARK"]) == ("p3", "10")
    assert job_of("-n", "1", *LOCAL, "cd /; python train.py").command == ["sh", "-c", "cd /; python train.py"]
    assert job_of("-n", "1", *LOCAL, "A=b c", *TRAIN).command == ["env", "A=b c", *TRAIN]


def test_the_starter_reads_the_job_that_was_asked_for(tmp_path: Path) -> None:
    (hosts := tmp_path / "hosts").write_text("h1:2222\nme@h2\n")
    of_roles = ["--env-worker", "A:1", "--restarts", "2", "--keep-servers"]
    job = job_of("-n", "2", "-s", "1", "-H", str(hosts), *of_roles, *TRAIN)
    _, _, kind, text, *command = OwnStarter().arguments(job)
    assert kind == "roles" and Job.from_json(text, command, job.environment) == job


def test_workers_wait_for_one_that_is_started_again_unless_an_option_says_how_long() -> None:
    def rejoin_s(*words: str) -> str | None:
        job = job_of("-n", "2", *LOCAL, *words, *TRAIN)
        value = job.environment.get("RINGTRAIN_KV_REJOIN_S")
        assert ("RINGTRAIN_KV_REJOIN_S" in job.exported) == (value is not None)
        return value

    assert rejoin_s("--restarts", "1") == "120"
    assert rejoin_s("--restarts", "1", "--env", "RINGTRAIN_KV_REJOIN_S=5") == "5"
    assert rejoin_s("--restarts", "1", "-s", "0") is None  # no worker can come back
    assert rejoin_s() is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*LOCAL, *TRAIN], "required: -n"),
        (["-n", "2", *LOCAL], "there is no command to run"),
        (["-n", "2", *TRAIN], "--launcher ssh, which is the default, needs -H FILE; for this host alone, --launcher"),
        (["-n", "2", "-H", "/no/such/file", *TRAIN], "-H /no/such/file cannot be read: No such file"),
        (["-n", "2", "-H", "hosts", *LOCAL, *TRAIN], "--launcher local is for this host alone"),
        (["-n", "2", "--launcher", "yarn", "-H", "hosts", *TRAIN], "--launcher yarn leaves the hosts to YARN"),
        (["-n", "2", "--launcher", "sge", "-H", "hosts", *TRAIN], "--launcher sge leaves the hosts to SGE"),
        (["-n", "2", "--dry-run", *LOCAL, *TRAIN], "--dry-run is for --launcher sge"),
        (["-n", "2", "--mpi-args=-q ml", *LOCAL, *TRAIN], "--mpi-args is for --launcher sge and yarn"),
        (["-n", "2", "--min-workers", "3", *LOCAL, *TRAIN], "--min-workers 3 is more than the 2 workers"),
        (["-n", "0", *LOCAL, *TRAIN], "-n 0 is for servers whose workers come from elsewhere"),
        (["-n", "2", "--env-worker", "A", *LOCAL, *TRAIN], "--env-worker A: write NAME:VALUE"),
        (["-n", "2", "--env", "NO_SUCH_VARIABLE", *LOCAL, *TRAIN], "the NAME of a variable that is set here"),
        (["-n", "2", "--sync-dst-dir", "/tmp/x", *LOCAL, *TRAIN], "--sync-dst-dir is for --launcher ssh"),
        (["-n", "2", "--launcher", "mpi", "--restarts", "1", *TRAIN], "--launcher mpi has no --restarts"),
        (["-n", "2", "--byteps-launch", *LOCAL, *TRAIN], "--byteps-launch"),
    ],
)
def test_a_command_line_that_cannot_be_is_a_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        job_of(*words)
    assert sentence in str(raised.value)


def test_in_an_allocation_its_hosts_are_taken_as_often_as_they_have_slots() -> None:
    arguments = build_parser().parse_args(["-n", "2", *TRAIN])
    roles = build_job(arguments, {**os.environ, "LSB_MCPU_HOSTS": "n1 2 n2 1"}).roles
    assert roles is not None and roles.hosts == [Address("n1"), Address("n1"), Address("n2")]


def test_under_mpi_all_processes_are_ranks_and_the_option_says_how_many_serve(tmp_path: Path) -> None:
    (hosts := tmp_path / "hosts").write_text("h1\nh2\n")
    job = job_of("-n", "3", "-s", "2", "-H", str(hosts), "--launcher", "mpi", *TRAIN)
    assert (job.num_proc, job.hosts, job.roles) == (5, [Host("h1", 3), Host("h2", 2)], None)
    assert job.environment["RINGTRAIN_KV_SERVERS"] == "2" and "RINGTRAIN_KV_SERVERS" in job.exported


# --- on this host -----------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_every_process_is_told_its_role_and_where_the_scheduler_is() -> None:
    of_roles = ("--env-worker", "X_W:a:b,X_BOTH:w", "--env-server", "X_BOTH:s")
    done = ringlaunch("-n", "2", "-s", "1", *LOCAL, *of_roles, "--env", "X_ALL=c", "X_OWN=d e", "python", "-c", TELL)
    assert done.returncode == 0, done.stderr
    told = printed_by(done.stdout)
    assert sorted(told) == ["scheduler", "server 0", "worker 0", "worker 1"]
    (port,) = {one["DMLC_PS_ROOT_PORT"] for one in told.values()}
    assert int(port) >= 9091
    for name, one in told.items():
        role, _, task = name.partition(" ")
        of_role = {"worker": {"X_W": "a:b", "X_BOTH": "w"}, "server": {"X_BOTH": "s"}}.get(role, {})
        assert one == {
            "DMLC_ROLE": role,
            "DMLC_TASK_ID": task or "0",
            "DMLC_NUM_ATTEMPT": "0",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": port,
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_NUM_WORKER": "2",
            "DMLC_NUM_SERVER": "1",
            "DMLC_JOB_CLUSTER": "local",
            "X_ALL": "c",
            "X_OWN": "d e",
            **of_role,
        }


def test_two_jobs_at_a_time_have_a_port_each_and_a_scheduler_may_listen_at_it(tmp_path: Path) -> None:
    script = """
import os, pathlib, socket, sys, time
if os.environ["DMLC_ROLE"] == "scheduler":
    place = (os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"]))
    with socket.create_server(place) as listener:
        pathlib.Path(sys.argv[1], str(place[1])).touch()
        until = time.monotonic() + 30
        while len(os.listdir(sys.argv[1])) < 2 and time.monotonic() < until:
            time.sleep(0.02)
    print(len(os.listdir(sys.argv[1])))
"""
    words = command_of("-n", "1", "-s", "0", *LOCAL, "python", "-c", script, str(tmp_path))
    jobs = [subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [job.communicate(timeout=TIMEOUT_S)[0] for job in jobs] == ["[scheduler] 2\n"] * 2
    assert [job.returncode for job in jobs] == [0, 0]


def read(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text().splitlines() if (folder / name).exists() else []


def start(folder: Path, script: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command_of(*LOCAL, *words, "python", "-c", PROCESS + script, str(folder)),
        env=environment(**{MARK: str(folder)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def require_nothing_left(folder: Path) -> None:
    wait_until(lambda: not processes_with(MARK, str(folder)), 10)


def test_a_command_that_is_not_there_is_told_by_the_name_of_the_command_that_was_typed() -> None:
    result = ringlaunch("-n", "1", "-s", "0", *LOCAL, "no-such-program")
    assert "ringlaunch: no-such-program cannot be started: No such file" in result.stderr
    assert "ringrun: " not in result.stderr


def test_a_worker_that_fails_ends_the_job_and_is_named_with_its_last_lines(tmp_path: Path) -> None:
    script = "\nif (role, task) == ('worker', '1'): raise KeyError('weight')\ntime.sleep(60)"
    with start(tmp_path, script, "-n", "2", "-s", "1") as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    lines = [line for line in errors.splitlines() if line.startswith("ringlaunch: ")]
    assert lines[0].startswith("ringlaunch: the first to fail was worker 1 on ") and "exit code 1" in lines[0]
    assert lines[1:] == ["ringlaunch: the last lines of worker 1 on standard error were"]
    assert errors.splitlines()[-1] == "    KeyError: 'weight'"
    require_nothing_left(tmp_path)


@pytest.mark.fast
def test_a_worker_is_started_again_and_knows_it(tmp_path: Path) -> None:
    script = """
if role == "worker":
    if (task, attempt) in (("0", "0"), ("0", "1")):
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for("worker0", 2)
"""
    with start(tmp_path, script, "-n", "2", "-s", "1", "--restarts", "2") as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    how = "ringlaunch: worker 0 on localhost was ended by SIGKILL; it is started again"
    assert errors.splitlines() == [f"{how}, 1 of 2 times", f"{how}, 2 of 2 times"]
    assert read(tmp_path, "worker0") == ["attempt 0", "attempt 1", "attempt 2"]
    assert read(tmp_path, "worker1") == ["attempt 0"]


def test_a_server_is_started_again_only_where_it_has_snapshots(tmp_path: Path) -> None:
    script = """
if role == "server" and attempt == "0":
    sys.exit(7)
if role == "worker":
    wait_for("server0", 1)
"""
    words = ("-n", "1", "--restarts", "1")
    (without := tmp_path / "without").mkdir()
    with start(without, script, *words) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 7 and "the first to fail was server 0" in errors
    require_nothing_left(without)
    (saving := tmp_path / "saving").mkdir()
    with start(saving, script, *words, "--env", f"RINGTRAIN_KV_SNAPSHOT_DIR={tmp_path}") as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0 and read(saving, "server0") == ["attempt 0", "attempt 1"], errors


def test_a_job_goes_on_with_the_least_number_of_workers_and_not_with_fewer(tmp_path: Path) -> None:
    script = """
if role == "worker" and int(task) < int(os.environ["X_FAIL"]):
    sys.exit(3)
time.sleep(0.5 if role == "worker" else 0)
"""
    for failing, code in (("1", 0), ("2", 3)):
        words = ("-n", "3", "-s", "0", "--min-workers", "2", "--env", f"X_FAIL={failing}")
        with start(tmp_path, script, *words) as process:
            _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == code, errors
        assert "on localhost ended with exit code 3; the job goes on without it" in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_workers_and_then_the_servers_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    with start(tmp_path, "\ntime.sleep(60)", "-n", "2", "-s", "2") as process:
        names = ["scheduler0", "server0", "server1", "worker0", "worker1"]
        wait_until(lambda: all(read(tmp_path, name) for name in names))
        process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + number and errors == ""
    told = {name: float(read(tmp_path, name)[1].removeprefix("told at ")) for name in names}
    assert max(told["worker0"], told["worker1"]) < min(told["server0"], told["server1"], told["scheduler0"])
    require_nothing_left(tmp_path)


def test_killing_ringlaunch_leaves_nothing_of_the_job(tmp_path: Path) -> None:
    with start(tmp_path, "\ntime.sleep(60)", "-n", "1") as process:
        wait_until(lambda: bool(read(tmp_path, "worker0") and read(tmp_path, "server0")))
        process.kill()
    require_nothing_left(tmp_path)


def test_servers_that_do_not_end_with_the_workers_are_ended(tmp_path: Path) -> None:
    with start(tmp_path, "\nif role == 'server': time.sleep(60)", "-n", "2") as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert errors == "ringlaunch: servers 0-1 did not end by themselves 5 s after the last worker\n"
    assert len(read(tmp_path, "server0")) == len(read(tmp_path, "server1")) == 2


def test_servers_that_are_to_be_kept_stay_until_the_interrupt(tmp_path: Path) -> None:
    with start(tmp_path, "\nif role != 'worker': time.sleep(60)", "-n", "1", "--keep-servers") as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said == "ringlaunch: the workers are done; the scheduler and server 0 stay until this is interrupted\n"
        time.sleep(6)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130 and len(read(tmp_path, "server0")) == 2
    require_nothing_left(tmp_path)


# --- on other hosts ---------------------------------------------------------------------------------------------------


def start_on(hosts: SimulatedHosts, folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    (file := folder / "hosts").write_text("".join(f"{name}:2222\n" for name in hosts.names))
    return subprocess.Popen(
        hosts.command_on(0, command_of("-H", str(file), *words)),
        env=environment(**{**hosts.environment, MARK: str(folder), **more}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )


def test_processes_of_two_hosts_know_their_addresses_and_the_secret_is_in_no_command_line(
    two_hosts: SimulatedHosts, tmp_path: Path
) -> None:
    agent = two_hosts.logging_agent(tmp_path)
    script = (
        TELL[:-3]
        + " | {'host': os.uname().nodename, 'secret': open(os.environ['RINGTRAIN_SECRET_FILE'], 'rb').read().hex()}))"
    )
    words = ("-n", "2", "-s", "2", "python", "-c", script)
    with start_on(two_hosts, tmp_path, *words, RINGTRAIN_SSH_AGENT=str(agent)) as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    told = printed_by(printed)
    places = {name: (one["host"], one["DMLC_NODE_HOST"]) for name, one in told.items()}
    first, second = ((name, f"10.99.0.{number}") for number, name in enumerate(two_hosts.names, start=1))
    assert places == {"scheduler": first, "server 0": first, "server 1": second, "worker 0": first, "worker 1": second}
    assert {one["DMLC_PS_ROOT_URI"] for one in told.values()} == {"10.99.0.1"}
    (secret,) = {one["secret"] for one in told.values()}
    asked = (tmp_path / "log").read_text()
    assert "-p2222" in asked and secret not in asked


def test_the_current_folder_is_copied_to_every_host_before(two_hosts: SimulatedHosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print(os.environ['DMLC_ROLE'], os.getcwd())\n")
    # the simulated hosts share all files: this notes what is wanted, and copies, for both hosts at the same time
    (programs := tmp_path / "bin").mkdir()
    (rsync := programs / "rsync").write_text(
        '#!/bin/sh\necho "$@" >> rsync.log\nfor to in "$@"; do :; done\nto=${to#*:}\n'
        'mkdir -p "$to" && cp train.py "$to/$$" && mv "$to/$$" "$to/train.py"\n'
    )
    rsync.chmod(0o755)
    to = tmp_path / "copy"
    path = f"{programs}:{os.environ['PATH']}"
    with start_on(two_hosts, tmp_path, "-n", "1", "--sync-dst-dir", str(to), *TRAIN, PATH=path) as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    expected = {f"[scheduler] scheduler {tmp_path}", f"[server 0] server {to}", f"[worker 0] worker {to}"}
    assert set(printed.splitlines()) == expected, errors
    agent = two_hosts.environment["HYDRA_LAUNCHER_EXEC"]
    of_second = f"-az --exclude .git -e {agent} -p2222 ./ {two_hosts.names[1]}:{to}/"
    assert sorted((tmp_path / "rsync.log").read_text().splitlines()) == sorted(
        [f"-az --exclude .git ./ {to}/", of_second]
    )


def test_a_copy_that_fails_ends_ringlaunch_before_anything_is_started(
    two_hosts: SimulatedHosts, tmp_path: Path
) -> None:
    (rsync := tmp_path / "rsync").write_text("#!/bin/sh\necho 'rsync: No space left' >&2; exit 11\n")
    rsync.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    with start_on(two_hosts, tmp_path, "-n", "1", "--sync-dst-dir", "/no", *TRAIN, PATH=path) as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    reason = "the current folder cannot be copied to /no on"
    assert (process.returncode, printed) == (1, "")
    assert errors.splitlines()[-1] == f"ringlaunch: {reason} {two_hosts.names[0]}: rsync ended with exit code 11"
    assert "rsync: No space left" in errors


def test_a_copy_goes_through_ssh_with_the_port_of_the_host() -> None:
    ssh = "ssh -oBatchMode=yes -oConnectTimeout=10 -p2222"
    command = command_of_copy("/tmp/job", Address("192.0.2.7", 2222), {})
    assert command == ["rsync", "-az", "--exclude", ".git", "-e", ssh, "./", "192.0.2.7:/tmp/job/"]


@pytest.mark.fast
def test_a_host_that_gets_lost_ends_the_job_on_the_others(two_hosts: SimulatedHosts, tmp_path: Path) -> None:
    script = """
import os, pathlib, signal, time
def parent_of(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
if os.environ["DMLC_ROLE"] == "worker" and os.environ["DMLC_TASK_ID"] == "1":
    os.kill(parent_of(parent_of(os.getpid())), signal.SIGKILL)
time.sleep(60)
"""
    begin = time.monotonic()
    with start_on(two_hosts, tmp_path, "-n", "2", "-s", "2", "python", "-c", script) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1 and time.monotonic() - begin < 30
    host = two_hosts.names[1]
    assert errors.splitlines()[-1].startswith(
        f"ringlaunch: server 1 on {host} got lost: the connection to {host} has ended ("
    )
    require_nothing_left(tmp_path)
