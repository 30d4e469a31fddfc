"""ringrun: however a job ends, nothing of it is left, neither processes nor zombies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_launcher import FakeLauncher
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi, on_each_network, processes_with, wait_until, zombies_of

from ringtrain.runner.job import Job
from ringtrain.runner.supervise import supervisor
from ringtrain.runner.supervise.output import Screen
from ringtrain.runner.supervise.supervisor import Outcome, Settings, Supervisor

pytestmark = needs_mpi
MARK = "TEST_RINGRUN_JOB"

SLEEP = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"
STUBBORN = "import signal; [signal.signal(number, signal.SIG_IGN) for number in (2, 15)];" + SLEEP
WITH_CHILD = "import subprocess; subprocess.Popen(['sleep', '600']);" + SLEEP


@pytest.fixture
def mark() -> Iterator[str]:
    """A value of MARK in the environment of a job, nothing of which may be left."""
    value = uuid.uuid4().hex
    yield value
    for pid in (left := processes_with(MARK, value)):
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes of the job were left"


@contextlib.contextmanager
def start(script: str, folder: Path, mark: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    """ringrun with two ranks that have begun; a process group of its own, so that a signal goes to it alone.

    A test that fails kills it, which takes its ranks along.
    """
    words = [sys.executable, "-m", "ringtrain.run", "-np", "2", *more, "python", "-c", script, str(folder)]
    environment = {**os.environ, "PYTHONPATH": ROOT, MARK: mark}
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            wait_until(lambda: len(list(folder.iterdir())) == 2)
            yield process
        finally:
            process.kill()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("sent", "code", "script"),
    [(signal.SIGINT, 130, SLEEP), (signal.SIGTERM, 143, WITH_CHILD)],
    ids=["SIGINT", "SIGTERM with a child"],
)
@on_each_network
def test_a_signal_ends_all_ranks(sent: signal.Signals, code: int, script: str, tmp_path: Path, mark: str) -> None:
    with start(script, tmp_path, mark) as process:
        process.send_signal(sent)
        assert process.wait(TIMEOUT_S) == code
        assert not processes_with(MARK, mark)
        assert process.stderr is not None and "first to fail" not in process.stderr.read()


@pytest.mark.fast
@on_each_network
def test_ranks_that_ignore_signals_are_killed(tmp_path: Path, mark: str) -> None:
    with start(STUBBORN, tmp_path, mark, "--grace-s", "0.5") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
        assert process.stderr is not None
        assert "ringrun: ranks 0-1 did not end within 0.5 s of SIGTERM, see --grace-s" in process.stderr.read()


@on_each_network
def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, mark: str) -> None:
    with start(STUBBORN, tmp_path, mark, "--grace-s", "600") as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # two signals that nobody has seen yet are one
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130


@pytest.mark.fast
@on_each_network
def test_a_killed_ringrun_takes_its_ranks_along(tmp_path: Path, mark: str) -> None:
    with start(SLEEP, tmp_path, mark) as process:
        process.kill()
        process.wait(TIMEOUT_S)
        wait_until(lambda: not processes_with(MARK, mark), 10)


@pytest.mark.fast
@on_each_network
def test_a_killed_launcher_leaves_nothing(tmp_path: Path, mark: str) -> None:
    with start(SLEEP, tmp_path, mark) as process:
        (launcher,) = children_of(process.pid)
        os.kill(launcher, signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == 137
        assert not processes_with(MARK, mark)
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == "ringrun: the launcher was ended by SIGKILL"


@pytest.mark.fast
@on_each_network
def test_a_killed_rank_ends_the_job(tmp_path: Path, mark: str) -> None:
    with start(SLEEP, tmp_path, mark) as process:
        rank = min(int(path.name) for path in tmp_path.iterdir())
        assert not zombies_of(process.pid)
        os.kill(rank, signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == 137
        assert process.stderr is not None
        assert "ended by SIGKILL" in process.stderr.read()


@on_each_network
def test_a_rank_ends_with_its_wrapper(tmp_path: Path, mark: str) -> None:
    with start(SLEEP, tmp_path, mark) as process:
        rank = int(next(tmp_path.iterdir()).name)
        os.kill(parent_of(rank), signal.SIGKILL)
        assert process.wait(TIMEOUT_S) != 0


# --- without MPI ------------------------------------------------------------------------------------------------------


def supervise(script: str, rank: str, said: list[str], grace_s: float = 30.0) -> Outcome:
    """Two ranks that run the Python code `rank`, started by a launcher that goes on with `script`."""

    def say(data: bytes, is_error: bool) -> None:
        if is_error:
            said.append(data.decode())

    job = Job([sys.executable, "-c", rank], 2, [], dict(os.environ))
    settings = Settings(True, 0, None, False, grace_s)
    return Supervisor(FakeLauncher(script), job, settings, Screen(say)).run()


KILL_WRAPPERS = "time.sleep(1); [os.kill(rank.pid, signal.SIGKILL) for rank in ranks]"


@pytest.mark.parametrize(
    ("script", "rank", "explanation"),
    [
        (KILL_WRAPPERS, "import time; time.sleep(60)", "ranks 0-1 got lost: the launcher ended with exit code 0"),
        ("[rank.wait() for rank in ranks]; sys.exit(0)", "pass", ""),
        (
            KILL_WRAPPERS + "; sys.exit(1)",
            "import time; time.sleep(60)",
            "ranks 0-1 got lost: the launcher ended with exit code 1",
        ),
        (
            KILL_WRAPPERS + "; sys.exit(255)",
            "import time; time.sleep(60)",
            "ranks 0-1 got lost: the launcher ended with exit code 255",
        ),
        # as a daemon that loses its connection ends its ranks
        (
            "time.sleep(1); [os.killpg(rank.pid, signal.SIGTERM) for rank in ranks]; [rank.wait() for rank in ranks]",
            "import time; time.sleep(60)",
            "somebody other than ringrun told ranks 0-1 to end",
        ),
    ],
    ids=["killed", "well", "killed by one that fails", "killed with ssh", "told"],
)
def test_a_job_ends_well_only_if_every_rank_is_known_to(script: str, rank: str, explanation: str) -> None:
    outcome = supervise(script, rank, [])
    assert outcome.code == (1 if explanation else 0)
    assert outcome.explanation.startswith(explanation)


def test_ranks_that_outlive_sigkill_do_not_hide_who_failed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "kill_job", lambda job: [4711])
    outcome = supervise("[rank.wait() for rank in ranks]", "raise SystemExit(7)", said := [])
    assert outcome.code == 7 and outcome.explanation.startswith("the first to fail was rank ")
    assert "ringrun: process 4711 outlives SIGKILL, waiting in the kernel, perhaps for a disk or a GPU\n" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_processes_that_cannot_be_killed_are_returned(tmp_path: Path) -> None:
    # nobody in a PID namespace can kill its first process
    importing = "from ringtrain.runner.supervise.supervisor import kill_job"
    killer = f"{importing}; raise SystemExit(kill_job({str(tmp_path)!r}, 0.5) != [1])"
    first = f"import subprocess, sys; raise SystemExit(subprocess.call([sys.executable, '-c', {killer!r}], env={{}}))"
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", first]
    environment = {**os.environ, supervisor.JOB_VARIABLE: str(tmp_path)}
    assert subprocess.run(words, env=environment, cwd=ROOT, check=False, timeout=TIMEOUT_S).returncode == 0


# --- from Python ------------------------------------------------------------------------------------------------------

CALL = """
import os, pathlib, signal, sys, time, ringtrain
if sys.argv[2] == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
def begin(folder, seconds):
    pathlib.Path(folder, str(os.getpid())).touch()
    time.sleep(seconds)
try:
    ringtrain.run(begin, (sys.argv[1], 1 if sys.argv[2] == "ignored" else 600), np=2)
finally:
    print("the caller's own end")
"""


@pytest.mark.parametrize(("choice", "code"), [("default", -signal.SIGTERM), ("ignored", 0)])
@on_each_network
def test_a_signal_to_a_python_that_runs_ranks_leaves_nothing(choice: str, code: int, tmp_path: Path, mark: str) -> None:
    pytest.importorskip("cloudpickle")
    (folder := tmp_path / "ranks").mkdir()
    (temporary := tmp_path / "temporary").mkdir()
    words = [sys.executable, "-c", CALL, str(folder), choice]
    environment = {**os.environ, "PYTHONPATH": ROOT, MARK: mark, "TMPDIR": str(temporary)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_until(lambda: len(list(folder.iterdir())) == 2)
        process.terminate()
        assert process.wait(TIMEOUT_S) == code
        assert process.stdout is not None
        assert process.stdout.read() == ("the caller's own end\n" if code == 0 else "")
    assert not processes_with(MARK, mark)
    assert not list(temporary.glob("ringtrain-run-*"))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
