"""ringrun: however a job ends, nothing of it is left, neither processes nor zombies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from ringrun_job import ROOT, TIMEOUT_S, needs_mpi, processes_with, wait_until, zombies_of

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


def start(script: str, folder: Path, mark: str, *more: str) -> subprocess.Popen[str]:
    """ringrun with two ranks that have begun; a process group of its own, so that a signal goes to it alone."""
    words = [sys.executable, "-m", "ringtrain.run", "-np", "2", *more, "python", "-c", script, str(folder)]
    environment = {**os.environ, "PYTHONPATH": ROOT, MARK: mark}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: len(list(folder.iterdir())) == 2)
    return process


@pytest.mark.fast
@pytest.mark.parametrize("script", [SLEEP, WITH_CHILD], ids=["sleeping", "with a child"])
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_ranks(sent: signal.Signals, code: int, script: str, tmp_path: Path, mark: str) -> None:
    with start(script, tmp_path, mark) as process:
        process.send_signal(sent)
        assert process.wait(TIMEOUT_S) == code
        assert not processes_with(MARK, mark)
        assert process.stderr is not None and "first to fail" not in process.stderr.read()


@pytest.mark.fast
def test_ranks_that_ignore_signals_are_killed(tmp_path: Path, mark: str) -> None:
    with start(STUBBORN, tmp_path, mark) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, mark: str) -> None:
    with start(STUBBORN, tmp_path, mark) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # two signals that nobody has seen yet are one
        process.send_signal(signal.SIGINT)
        assert process.wait(4) == 130


@pytest.mark.fast
def test_a_killed_ringrun_takes_its_ranks_along(tmp_path: Path, mark: str) -> None:
    with start(SLEEP, tmp_path, mark) as process:
        process.kill()
        process.wait(TIMEOUT_S)
        wait_until(lambda: not processes_with(MARK, mark), 10)


@pytest.mark.fast
def test_a_killed_launcher_leaves_nothing(tmp_path: Path, mark: str) -> None:
    with start(SLEEP, tmp_path, mark) as process:
        (launcher,) = children_of(process.pid)
        os.kill(launcher, signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == 137
        assert not processes_with(MARK, mark)
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == "ringrun: the launcher was ended by SIGKILL"


@pytest.mark.fast
def test_a_killed_rank_ends_the_job(tmp_path: Path, mark: str) -> None:
    with start(SLEEP, tmp_path, mark) as process:
        rank = min(int(path.name) for path in tmp_path.iterdir())
        assert not zombies_of(process.pid)
        os.kill(rank, signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == 137
        assert process.stderr is not None
        assert "ended by SIGKILL" in process.stderr.read()


def test_a_rank_ends_with_its_attendant(tmp_path: Path, mark: str) -> None:
    with start(SLEEP, tmp_path, mark) as process:
        rank = int(next(tmp_path.iterdir()).name)
        os.kill(parent_of(rank), signal.SIGKILL)
        assert process.wait(TIMEOUT_S) != 0


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
