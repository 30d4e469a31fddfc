"""ringrun: signals that its parent ignored or blocked, SIGTERM for all its processes, and SIGKILL for itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi, on_each_network, processes_with, ringrun, wait_until

pytestmark = needs_mpi
MARK = "TEST_INHERITED"

# As window managers, daemons and threads of servers start programs.
INHERITED = {
    "SIGCHLD ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "all blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "SIGTERM ignored": "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
}
COMMANDS = {
    "ringrun": ["ringtrain.run", "-np", "2", "--network", "sockets"],
    "ringrun over MPI": ["ringtrain.run", "-np", "2", "--network", "mpi"],
    "elastic": ["ringtrain.run", "-np", "2", "--min-np", "2"],
    "ringlaunch": ["ringtrain.launch", "-n", "2", "-s", "0", "--launcher", "local"],
}


def with_inherited(inherited: str, words: list[str]) -> list[str]:
    program = (
        f"import os, signal, sys; {INHERITED[inherited]}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    return [sys.executable, "-c", program, *words]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": ROOT, **more}


# --- signals that the parent ignored or blocked -----------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("inherited", ["SIGCHLD ignored", "all blocked"])
def test_the_exit_code_of_a_rank_is_known_whatever_is_inherited(command: str, inherited: str) -> None:
    rank = [sys.executable, "-c", "import sys; sys.exit(3)"]
    words = with_inherited(inherited, ["-m", *COMMANDS[command], *rank])
    ended = subprocess.run(words, env=environment(), capture_output=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == (1 if command == "elastic" else 3), ended.stderr


@pytest.mark.parametrize("inherited", ["SIGCHLD ignored", "all blocked"])
def test_a_discovery_script_that_fails_is_known_to(inherited: str) -> None:
    words = ["-m", "ringtrain.run", "--min-np", "1", "--host-discovery-script", "exit 7", sys.executable, "-c", "pass"]
    ended = subprocess.run(
        with_inherited(inherited, words),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 1 and "has failed with exit code 7" in ended.stderr


def test_python_that_ignores_sigchld_learns_how_its_ranks_end() -> None:
    program = (
        "import signal, os, ringtrain\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "try: ringtrain.run(os._exit, (5,), num_proc=2)\n"
        "except RuntimeError as error: print(error)"
    )
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert "the first to fail was rank" in ended.stdout and "with exit code 5" in ended.stdout


def test_a_rank_has_its_signals_back_but_for_ignored_ones_that_may_end_it() -> None:
    rank = (
        "from signal import *; raise SystemExit(getsignal(SIGCHLD) != SIG_DFL or getsignal(SIGPIPE) != SIG_IGN "
        "or pthread_sigmask(SIG_BLOCK, []) != set() or getsignal(SIGHUP) != SIG_IGN)"  # Python ignores SIGPIPE itself
    )
    inherit = (
        "import os, sys; from signal import *; pthread_sigmask(SIG_BLOCK, [SIGTERM, SIGCHLD, SIGUSR1]); "
        "signal(SIGCHLD, SIG_IGN); signal(SIGHUP, SIG_IGN); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    words = [sys.executable, "-c", inherit, "-m", *COMMANDS["ringrun"], sys.executable, "-c", rank]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("command", ["ringrun", "elastic", "ringlaunch"])
def test_a_rank_and_its_wrapper_have_no_descriptor_of_another_rank(command: str) -> None:
    """An open end of a pipe of another rank would keep that rank from its end of file."""
    rank = (
        "import os; open_in = lambda process: {one for one in map(str, range(256)) "
        "if os.path.lexists(f'/proc/{process}/fd/{one}')}; "
        "usual = {'0', '1', '2', os.environ['_RINGTRAIN_SECRET_DESCRIPTOR'].split()[1]}; "
        "counts = {os.environ['RINGRUN_COUNTS'].split()[0]}; "
        # the wrapper reads three pipes, and has both ends of one that signals wake it up by
        "raise SystemExit(open_in('self') != usual | counts or len(open_in(os.getppid()) - usual) != 5)"
    )
    words = [sys.executable, "-m", *COMMANDS[command], sys.executable, "-c", rank]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 0, ended.stderr


@on_each_network
def test_ctrl_c_ends_a_ringrun_that_was_started_with_it_blocked(tmp_path: Path) -> None:
    rank = "import pathlib, sys, os, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"
    words = with_inherited(
        "all blocked", ["-m", "ringtrain.run", "-np", "2", sys.executable, "-c", rank, str(tmp_path)]
    )
    with subprocess.Popen(words, env=environment(), start_new_session=True) as process:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130


# --- SIGTERM for all processes ----------------------------------------------------------------------------------------

# Each SIGTERM is a line. Another one in the middle of a checkpoint would be a second line.
SAVER = """
import os, pathlib, signal, sys, time
file = open(pathlib.Path(sys.argv[1], str(os.getpid())), "w", buffering=1)
told = []
signal.signal(signal.SIGTERM, lambda *_: (told.append(1), print("told", file=file)))
print("ready", file=file)
while not told:
    time.sleep(0.02)
time.sleep(3)
print("saved", file=file)
"""


@pytest.mark.parametrize("command", ["ringrun", "ringrun over MPI", "elastic"])
def test_sigterm_for_all_processes_comes_once_and_leaves_the_ranks_their_time(command: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", *COMMANDS[command], sys.executable, "-c", SAVER, str(tmp_path)]
    mark = uuid.uuid4().hex
    with subprocess.Popen(words, env=environment(**{MARK: mark}), start_new_session=True) as process:
        wait_until(lambda: [path.read_text() for path in tmp_path.iterdir()] == ["ready\n"] * 2)
        for pid in processes_with(MARK, mark):  # as systemd stops a service, and batch systems end a job
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 143
    assert [path.read_text() for path in tmp_path.iterdir()] == ["ready\ntold\nsaved\n"] * 2
    assert not processes_with(MARK, mark)


# --- SIGKILL ----------------------------------------------------------------------------------------------------------

# Of each kind one: a child, one in a session of its own, a daemon, and one that nothing in its environment tells of.
WITH_CHILDREN = """
import os, pathlib, subprocess, sys, time
subprocess.Popen(["sleep", sys.argv[2]])
subprocess.Popen(["sleep", sys.argv[2]], start_new_session=True)
subprocess.Popen(["env", "-i", "/bin/sleep", sys.argv[2]], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", sys.argv[2]])
    os._exit(0)
time.sleep(0.2)
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
time.sleep(600)
"""


def sleeping(seconds: str) -> list[int]:
    """Process ids of `sleep` for so long."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (folder / "cmdline").read_bytes().endswith(f"sleep\0{seconds}\0".encode()):
                found.append(int(folder.name))
    return found


@pytest.fixture
def seconds() -> Iterator[str]:
    """How long children sleep: a number that no other process has."""
    number = f"600.{uuid.uuid4().int % 10**9}"
    yield number
    for pid in sleeping(number):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("inherited", ["", "SIGTERM ignored", "all blocked"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@on_each_network
def test_nothing_of_a_job_outlives_ringrun(
    number: signal.Signals, inherited: str, seconds: str, tmp_path: Path
) -> None:
    rank = [sys.executable, "-c", WITH_CHILDREN, str(tmp_path), seconds]
    words = ["-m", "ringtrain.run", "-np", "2", "--grace-s", "1", *rank]
    words = with_inherited(inherited, words) if inherited else [sys.executable, *words]
    with subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL, start_new_session=True) as process:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        ranks = [int(path.name) for path in tmp_path.iterdir()]
        assert len(sleeping(seconds)) == 8
        process.send_signal(number)
        process.wait(TIMEOUT_S)
        wait_until(lambda: not sleeping(seconds), 10 if number == signal.SIGKILL else 0.1)
        wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 10)


def test_children_of_a_process_that_is_replaced_go_with_it(seconds: str, tmp_path: Path) -> None:
    script = WITH_CHILDREN.replace("time.sleep(600)", "os._exit(len(list(pathlib.Path(sys.argv[1]).iterdir())) == 1)")
    ended = ringrun("-np", "1", "--min-np", "1", sys.executable, "-c", script, str(tmp_path), seconds)
    assert ended.returncode == 0, ended.stderr
    assert len(list(tmp_path.iterdir())) == 2 and not sleeping(seconds)
