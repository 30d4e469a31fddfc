"""ringrun without an MPI: its own starter, on this host, on others by ssh, and in an allocation of Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.hosts import SimulatedHosts
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi, processes_with, ringrun, wait_until

from ringtrain.runner import launchers as choosing
from ringtrain.runner.hosts import Host, UsageError, is_this_host
from ringtrain.runner.job import Job
from ringtrain.runner.launchers import OpenMpi, OwnStarter, Srun, choose_launcher, choose_network
from ringtrain.runner.start.main import shares_of
from ringtrain.runner.start.meeting import Meeting

pytestmark = [needs_mpi, pytest.mark.alike]
SOCKETS = {"RINGTRAIN_NETWORK": "sockets"}
TRAIN = ["python", "train.py"]


# --- which network, which launcher ------------------------------------------------------------------------------------


@pytest.fixture
def without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def srun(tmp_path: Path) -> str:
    (program := tmp_path / "srun").write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.usefixtures("without_mpi4py")
def test_without_mpi4py_ringrun_starts_the_ranks_itself(srun: str) -> None:
    outside = {"PATH": str(Path(srun).parent)}
    inside = {**outside, "SLURM_JOB_ID": "7"}
    chosen = choose_launcher("auto", outside)
    assert isinstance(chosen.launcher, OwnStarter) and chosen.why == ["network sockets: mpi4py is not installed"]
    for launcher in ("auto", "srun"):
        by_slurm = choose_launcher(launcher, inside).launcher
        assert isinstance(by_slurm, Srun) and (by_slurm.path, by_slurm.process_manager) == (srun, "none")
    assert isinstance(choose_launcher("ssh", inside).launcher, OwnStarter)
    with pytest.raises(UsageError, match="only inside a Slurm allocation"):
        choose_launcher("srun", outside)


@pytest.mark.parametrize(
    ("launcher", "environ", "network", "reason"),
    [
        ("auto", {}, "mpi", "mpi4py is installed"),
        ("auto", {"RINGTRAIN_NETWORK": "mpi"}, "mpi", "network=mpi"),
        ("auto", SOCKETS, "sockets", "network=sockets"),
        ("ssh", {}, "sockets", "--launcher ssh needs no MPI"),
        ("mpirun", SOCKETS, "sockets", "network=sockets"),
    ],
)
def test_the_network_is_chosen_with_a_reason(launcher: str, environ: dict[str, str], network: str, reason: str) -> None:
    assert choose_network(launcher, environ) == (network, reason)


def test_mpirun_may_start_ranks_that_talk_over_sockets() -> None:
    chosen = choose_launcher("mpirun", {**os.environ, **SOCKETS})
    assert not isinstance(chosen.launcher, OwnStarter) and chosen.why[0] == "network sockets: network=sockets"


@pytest.mark.parametrize(
    ("launcher", "network", "message"),
    [("ssh", "mpi", "--launcher ssh starts ranks without an MPI"), ("auto", "pigeon", "must be one of|pigeon")],
)
def test_flags_that_exclude_each_other_are_refused(launcher: str, network: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_network(launcher, {"RINGTRAIN_NETWORK": network})


# --- descriptors ------------------------------------------------------------------------------------------------------


def with_limit(limit: str, ranks: int) -> subprocess.CompletedProcess[str]:
    words = ["sh", "-c", f'ulimit {limit}; exec "$@"', "sh", sys.executable, "-m", "ringtrain.run", "-np", str(ranks)]
    command = [*words, "--network", "sockets", "true"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=ROOT)


def test_the_soft_limit_of_descriptors_is_raised_for_more_ranks() -> None:
    ended = with_limit("-Sn 64", 60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("limit", "sentence"),
    [
        (70, "ringrun: 4 ranks on 1 host need 71 open files, and the hard limit is 70: raise it, see ulimit -Hn"),
        (71, "cannot start ranks: 4 ranks need 72 open files, and the hard limit is 71: raise it, see ulimit -Hn"),
    ],
)
def test_a_hard_limit_of_descriptors_that_is_too_low_is_named_before_a_rank_starts(limit: int, sentence: str) -> None:
    ended = with_limit(f"-n {limit}", 4)
    assert ended.returncode == 1 and sentence in ended.stderr, ended.stderr


# --- command lines ----------------------------------------------------------------------------------------------------


def test_the_arguments_of_the_starter() -> None:
    hosts = [Host("h1", 2), Host("h2", 1)]
    job = Job(TRAIN, 3, hosts, {"A": "1"}, ("A",), ssh_port=2222, ssh_identity_file="/my/key")
    python, folder, kind, text, *command = OwnStarter().arguments(job)
    assert python == sys.executable and kind == "ranks" and (Path(folder) / "__main__.py").exists()
    assert command == TRAIN and Job.from_json(text, command, job.environment) == job
    assert job.ssh_options == ["-p2222", "-i/my/key"]
    assert Job(TRAIN, 2, [], {"SECRET": "1"}).to_json() == '{"num_proc": 2}'  # all users can read a command line
    with pytest.raises(UsageError, match="no launcher to give words to"):
        OwnStarter().arguments(job._replace(launcher_arguments=("--map-by", "slot")))


@pytest.mark.parametrize("launcher", [OwnStarter(), OpenMpi("mpirun"), Srun("srun", "none")])
def test_the_interface_is_an_option_of_the_ranks(launcher: OwnStarter | OpenMpi | Srun) -> None:
    job = Job(TRAIN, 2, [], {}, network_interfaces="ib0,ib1")
    assert launcher.environment(job)["RINGTRAIN_SOCKET_INTERFACES"] == "ib0,ib1"
    own = job._replace(environment={"RINGTRAIN_SOCKET_INTERFACES": "eth7"})
    assert launcher.environment(own)["RINGTRAIN_SOCKET_INTERFACES"] == "eth7"


def test_ranks_fill_the_hosts_in_their_order() -> None:
    shares = shares_of(4, [Host("localhost", 3), Host("h2.invalid", 2), Host("h3.invalid", 1)])
    assert [tuple(share) for share in shares] == [("localhost", 0, 3, False), ("h2.invalid", 3, 1, True)]
    assert [tuple(share) for share in shares_of(2, [])] == [("localhost", 0, 2, False)]


def test_a_job_of_this_host_meets_where_no_other_host_can_come() -> None:
    meeting = Meeting(["localhost"], "eth0")
    assert (meeting.listens_at, meeting.address_for("localhost")) == ("127.0.0.1", "127.0.0.1")


def test_this_host_has_several_names() -> None:
    for name in ("localhost", "127.0.0.1", os.uname().nodename):
        assert is_this_host(name)
    assert not is_this_host("no-such-host.invalid")


# --- on this host -----------------------------------------------------------------------------------------------------


def test_a_variable_tells_which_network_was_chosen_and_why() -> None:
    result = ringrun("-np", "1", "--network", "sockets", "--verbose", "python", "-c", "pass")
    assert result.returncode == 0
    assert result.stderr.splitlines()[0] == "ringrun: network sockets: network=sockets"


@pytest.mark.fast
def test_ranks_meet_and_train_although_a_module_of_the_folder_has_a_name_of_pythons(tmp_path: Path) -> None:
    (tmp_path / "selectors.py").write_text("raise SystemExit('it was imported')")
    (tmp_path / "train.py").write_text(
        "import sys; sys.path.pop(0)\nimport numpy, ringtrain as hvd\nhvd.init()\n"
        "print(hvd.allreduce(numpy.arange(3.0) + hvd.rank(), op=hvd.Sum).tolist(), hvd.mpi_enabled())\n"
    )
    script = "from ringtrain.runner.command import main; raise SystemExit(main())"
    words = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-c", script, "-np", "2", *TRAIN]
    environment = {**os.environ, **SOCKETS, "PYTHONPATH": ROOT}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] [1.0, 3.0, 5.0] False" for rank in (0, 1)], done.stderr


def test_a_rank_knows_its_place_and_a_secret_that_leaves_no_file(tmp_path: Path) -> None:
    script = """
import json, os, pathlib
found = {name.removeprefix("RINGTRAIN_"): value for name, value in os.environ.items()}
file = pathlib.Path(found["SECRET_FILE"])
mode, size, links = file.stat().st_mode & 0o777, len(file.read_bytes()), file.stat().st_nlink
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
print(json.dumps([*(found[name] for name in names), mode, size, links, found["RENDEZVOUS"].split(":")[0]]))
"""
    words = ("-np", "2", "--no-prefix-output", "python", "-c", script)
    lines = ringrun(*words, **SOCKETS, TMPDIR=str(tmp_path)).stdout.splitlines()
    assert sorted(map(json.loads, lines)) == [
        [str(rank), "2", str(rank), "2", 0o600, 32, 0, "127.0.0.1"] for rank in (0, 1)
    ]
    assert list(tmp_path.iterdir()) == []


def test_much_standard_input_reaches_a_slow_rank_0_and_a_deaf_one_stops_nobody() -> None:
    text = "".join(f"line {number}\n" for number in range(100_000))
    words = [sys.executable, "-m", "ringtrain.run", "-np", "2", "--no-prefix-output", "python", "-c"]
    environment = {**os.environ, **SOCKETS, "PYTHONPATH": ROOT}
    slow = "import sys, time; time.sleep(1); data = sys.stdin.read(); print(len(data), data[-6:].strip())"
    deaf = "import os; os.close(0); print('done')"
    for script, printed in ((slow, [f"{len(text)} 99999", "0 "]), (deaf, ["done", "done"])):
        result = subprocess.run(
            [*words, script], input=text, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert sorted(result.stdout.splitlines()) == sorted(printed), result.stderr


# --- on other hosts ---------------------------------------------------------------------------------------------------


def start(hosts: SimulatedHosts, *words: str, **more: str) -> subprocess.Popen[str]:
    names = ",".join(f"{name}:2" for name in hosts.names)
    command = hosts.command_on(0, [sys.executable, "-m", "ringtrain.run", "-H", names, *words])
    environment = {**os.environ, **SOCKETS, "PYTHONPATH": ROOT, **hosts.environment, **more}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.fast
def test_ranks_of_two_hosts_train_and_the_secret_is_in_no_command_line(
    two_hosts: SimulatedHosts, tmp_path: Path
) -> None:
    agent = two_hosts.logging_agent(tmp_path)
    script = """
import os, pathlib, numpy, ringtrain as hvd
hvd.init()
total = hvd.allreduce(numpy.arange(1 << 18) + hvd.rank(), op=hvd.Sum)
assert (total == 4 * numpy.arange(1 << 18) + 6).all()
secret = pathlib.Path(os.environ["RINGTRAIN_SECRET_FILE"]).read_bytes().hex()
print(hvd.rank(), hvd.local_rank(), hvd.cross_rank(), secret)
"""
    before = two_hosts.bytes_sent(1)
    with start(two_hosts, "--ssh-port", "2222", "python", "-c", script, RINGTRAIN_SSH_AGENT=str(agent)) as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    lines = [line.split()[1:] for line in sorted(printed.splitlines())]
    assert [line[:3] for line in lines] == [["0", "0", "0"], ["1", "1", "0"], ["2", "0", "1"], ["3", "1", "1"]], errors
    (secret,) = {line[3] for line in lines}
    asked = (tmp_path / "log").read_text()
    assert two_hosts.names[1] in asked and "-p2222" in asked and secret not in asked
    assert two_hosts.bytes_sent(1) - before > 1 << 20


def test_standard_input_reaches_rank_0_on_another_host(two_hosts: SimulatedHosts) -> None:
    names = ",".join(reversed(two_hosts.names))
    command = two_hosts.command_on(0, [sys.executable, "-m", "ringtrain.run", "-H", names, "python", "-c"])
    environment = {**os.environ, **SOCKETS, "PYTHONPATH": ROOT, **two_hosts.environment}
    script = "import os, sys; print(os.uname().nodename, sys.stdin.read()[::-1])"
    done = subprocess.run(
        [*command, script], input="olleh", env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    expected = [f"[0] {two_hosts.names[1]} hello", f"[1] {two_hosts.names[0]} "]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


END_OF_AGENT = """
import os, pathlib, signal, sys, time, ringtrain as hvd
hvd.init()
print("Connection refused", file=sys.stderr, flush=True)
hvd.barrier()
def parent_of(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
if hvd.rank() == 3:
    time.sleep(0.5)  # its agent passes on what both have printed
    os.kill(parent_of(parent_of(os.getpid())), signal.SIGKILL)
    time.sleep(60)
try:
    hvd.barrier()
except hvd.PeerLostError:
    time.sleep(3)
    print("saved", flush=True)
    os._exit(0)
"""


@pytest.mark.fast
def test_a_host_whose_connection_ends_takes_the_job_down(two_hosts: SimulatedHosts, tmp_path: Path) -> None:
    """The ranks of the other host have their time, and what a rank prints is not taken for what ssh says."""
    begin = time.monotonic()
    with start(two_hosts, "python", "-c", END_OF_AGENT, RINGRUN_TEST=str(tmp_path)) as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1 and time.monotonic() - begin < 30
    assert (
        f"ringrun: the connection to {two_hosts.names[1]} has ended (" in errors and "and with it ranks 2-3\n" in errors
    )
    assert {"[0] saved", "[1] saved"} <= set(printed.splitlines()), errors
    assert "refuses" not in errors and errors.count("] Connection refused") == 4
    assert errors.splitlines()[-1].startswith("ringrun: ranks 2-3 got lost: the launcher ended with exit code 1")
    wait_until(lambda: not processes_with("RINGRUN_TEST", str(tmp_path)), 10)


def test_a_host_that_cannot_be_reached_is_named(two_hosts: SimulatedHosts, tmp_path: Path) -> None:
    (agent := tmp_path / "ssh").write_text("#!/bin/sh\necho 'Permission denied (publickey).' >&2; exit 255\n")
    agent.chmod(0o755)
    begin = time.monotonic()
    with start(
        two_hosts, "python", "-c", "import ringtrain; ringtrain.init()", RINGTRAIN_SSH_AGENT=str(agent)
    ) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    lines = errors.splitlines()
    assert process.returncode == 1 and lines[0] == "Permission denied (publickey).", errors
    host = two_hosts.names[1]
    assert f"ringrun: the connection to {host} has ended ({agent}: exit code 255), and with it ranks 2-3" in lines
    # the others wait in init(): they do not get the 10 s of ranks that may have something to save
    assert time.monotonic() - begin < 10
    # those of this host may not have had the time
    assert "-3 did not start; try ringrun -H " in lines[-1] and lines[-1].endswith("--check")


@pytest.mark.parametrize(
    "words", [("run", "-np", "4"), ("run", "-np", "4", "--min-np", "4"), ("launch", "-n", "2", "-s", "1")]
)
def test_a_host_that_refuses_at_first_is_asked_again(
    two_hosts: SimulatedHosts, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (agent := tmp_path / "ssh").write_text(f"""#!/bin/sh
echo >> {tmp_path}/asked
[ $(wc -l < {tmp_path}/asked) -gt 2 ] && exec {two_hosts.environment["HYDRA_LAUNCHER_EXEC"]} "$@"
echo "ssh: connect to host h port 22: Connection refused" >&2
exit 255
""")
    agent.chmod(0o755)
    (file := tmp_path / "hosts").write_text("\n".join(two_hosts.names))
    hosts = str(file) if words[0] == "launch" else ",".join(f"{name}:2" for name in two_hosts.names)
    command = [sys.executable, "-m", f"ringtrain.{words[0]}", *words[1:], "-H", hosts, "echo", "here"]
    environment = {
        **os.environ,
        **SOCKETS,
        "PYTHONPATH": ROOT,
        **two_hosts.environment,
        "RINGTRAIN_SSH_AGENT": str(agent),
    }
    done = subprocess.run(
        two_hosts.command_on(0, command), env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0 and done.stdout.count("here") == 4, done.stderr
    assert done.stderr.count("refuse") == 1 and f"{two_hosts.names[1]} refuses the connection" in done.stderr


@pytest.mark.fast
def test_the_check_joins_the_hosts_without_an_mpi(two_hosts: SimulatedHosts) -> None:
    with start(two_hosts, "--check") as process:
        printed, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, printed + errors
    assert [line.split()[0] for line in printed.splitlines()[1:3]] == two_hosts.names
    assert printed.splitlines()[-1] == f"sockets join jobs on {', '.join(two_hosts.names)}"
