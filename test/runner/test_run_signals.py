"""ringrun: which signals reach the ranks, how long these have to end, and what is ignored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_launcher import FakeLauncher
from harness.hosts import SimulatedHosts
from harness.ringrun_job import RANK_VARIABLES, ROOT, TIMEOUT_S, needs_mpi, on_each_network, wait_until

from ringtrain.runner.launchers import Srun
from ringtrain.runner.supervise import rank_wrapper
from ringtrain.runner.supervise.frames import Ended, FrameReader, Started
from ringtrain.runner.supervise.guard import command_of_guard
from ringtrain.runner.supervise.supervisor import SignalSender, command_of_wrappers

# Each rank has a file, in which every signal is a line. SIGTERM ends it: rank 0 after a while, as if it wrote a
# checkpoint, the others at once.
RANK = f"""
import os, pathlib, signal, sys, time
rank = int(next((os.environ[name] for name in {RANK_VARIABLES} if name in os.environ), "0"))
"""
RANK += """\
log = open(os.path.join(sys.argv[1], f"rank.{rank}"), "w", buffering=1)
received = []
def note(number, frame):
    received.append(number)
    print(signal.Signals(number).name, file=log)
for number in [signal.SIGUSR1, signal.SIGUSR2, *([signal.SIGTERM] if rank == 0 else [])]:
    signal.signal(number, note)
print("ready", file=log)
until = time.monotonic() + 60
while signal.SIGTERM not in received and time.monotonic() < until:
    time.sleep(0.02)
time.sleep(2.5)
print("checkpoint", file=log)
"""


def lines_of(folder: Path) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted(folder.glob("rank.*"))]


def wait_for_ranks(folder: Path, count: int) -> None:
    wait_until(lambda: len(lines_of(folder)) == count and all(lines_of(folder)))


def start(folder: Path, ignored: str = "") -> subprocess.Popen[str]:
    """ringrun with two ranks that are ready; `ignored` are signals as the shell's `trap` names them."""
    words = [sys.executable, "-m", "ringtrain.run", "-np", "2", "python", "-c", RANK, str(folder)]
    shell = ["sh", "-c", f'trap "" {ignored}; exec "$@"', "sh"] if ignored else []
    environment = {**os.environ, "PYTHONPATH": ROOT}
    process = subprocess.Popen([*shell, *words], env=environment, text=True, start_new_session=True)
    wait_for_ranks(folder, 2)
    return process


# --- ringrun ----------------------------------------------------------------------------------------------------------


@needs_mpi
@pytest.mark.fast
@on_each_network
def test_ranks_get_what_ringrun_gets_once_and_time_to_write_a_checkpoint(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        for number, name in ((signal.SIGUSR1, "SIGUSR1"), (signal.SIGUSR2, "SIGUSR2")):
            process.send_signal(number)
            wait_until(lambda name=name: all(name in lines for lines in lines_of(tmp_path)))  # type: ignore[misc]
        process.terminate()
        assert process.wait(TIMEOUT_S) == 143
    usual = ["ready", "SIGUSR1", "SIGUSR2"]
    assert lines_of(tmp_path) == [[*usual, "SIGTERM", "checkpoint"], usual]


@needs_mpi
@on_each_network
def test_a_signal_that_is_ignored_when_ringrun_starts_stays_ignored(tmp_path: Path) -> None:
    with start(tmp_path, ignored="HUP INT USR1") as process:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
            process.send_signal(number)
        time.sleep(1)
        assert process.poll() is None
        process.terminate()
        assert process.wait(TIMEOUT_S) == 143
    assert lines_of(tmp_path) == [["ready", "SIGTERM", "checkpoint"], ["ready"]]


@needs_mpi
@pytest.mark.fast
@on_each_network
def test_ranks_on_other_hosts_get_signals_and_time_too(two_hosts: SimulatedHosts, tmp_path: Path) -> None:
    # rank 0, which needs the time, runs on the host where ringrun does not
    names = f"{two_hosts.names[1]},{two_hosts.names[0]}"
    words = [sys.executable, "-m", "ringtrain.run", "-H", names, "python", "-c", RANK, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": ROOT, **two_hosts.environment}
    with subprocess.Popen(two_hosts.command_on(0, words), env=environment, start_new_session=True) as process:
        wait_for_ranks(tmp_path, 2)
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: all("SIGUSR1" in lines for lines in lines_of(tmp_path)))
        process.terminate()
        assert process.wait(TIMEOUT_S) == 143
    assert lines_of(tmp_path) == [["ready", "SIGUSR1", "SIGTERM", "checkpoint"], ["ready", "SIGUSR1"]]


def state_of(pid: int) -> str:
    """The letter of the kernel: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@needs_mpi
def test_ringrun_stops_alone_and_says_so(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ringtrain.run", "-np", "2", "--network", "sockets", "python", "-c", RANK]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    with subprocess.Popen(
        [*words, str(tmp_path)], env=environment, text=True, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        wait_for_ranks(tmp_path, 2)
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: state_of(process.pid) == "T")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: state_of(process.pid) != "T")
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: all("SIGUSR1" in lines for lines in lines_of(tmp_path)))
        process.terminate()
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 143
    assert "ringrun: stopped; the ranks go on, and wait" in said and f"kill -CONT {process.pid}" in said


# --- the sender ------------------------------------------------------------------------------------------------------


def test_the_tasks_of_srun_are_signalled_by_their_job_step(tmp_path: Path) -> None:
    scancel = tmp_path / "scancel"
    scancel.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    scancel.chmod(0o755)
    with subprocess.Popen(["sleep", "60"]) as srun:
        sender = SignalSender(Srun(str(tmp_path / "srun"), "pmix"), srun)
        sender.note(Started(0, "c1", 1, "17.2"))
        sender.note(Started(1, "c2", 1, "17.2"))
        assert sender.send(signal.SIGTERM) == []
        assert (tmp_path / "asked").read_text() == "--signal=23 17.2\n"  # SIGURG, for the wrappers
        scancel.unlink()
        assert sender.send(signal.SIGTERM) == [0, 1]
        assert srun.poll() is None
        sender.send(signal.SIGUSR1)
        assert srun.wait(TIMEOUT_S) == -signal.SIGUSR1


def test_signals_that_no_launcher_passes_on_reach_the_ranks_of_this_host_and_the_others_are_named() -> None:
    with (
        subprocess.Popen(["sleep", "60"], start_new_session=True) as rank,
        subprocess.Popen(["sleep", "60"]) as launcher,
    ):
        sender = SignalSender(FakeLauncher(""), launcher)
        sender.note(Started(0, os.uname().nodename, rank.pid))
        sender.note(Started(1, "another", rank.pid))
        sender.note(Started(2, "another", rank.pid))
        sender.note(Ended(2, 0, 0.0, False))
        assert sender.send(signal.SIGUSR2) == [1]
        assert rank.wait(TIMEOUT_S) == -signal.SIGUSR2
        assert launcher.poll() is None
        launcher.kill()


# --- the wrapper ----------------------------------------------------------------------------------------------------


def start_wrapper(script: str, *words: str, **more: str) -> subprocess.Popen[bytes]:
    """As a launcher would: the leader of a process group, which the launcher signals as a whole."""
    command = command_of_wrappers([sys.executable, "-c", script, *words])
    return subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, **more}, start_new_session=True)


def test_a_wrapper_outlives_what_is_meant_for_its_rank(tmp_path: Path) -> None:
    numbers = ("SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGQUIT", "SIGALRM", "SIGXCPU")
    script = RANK.replace("[signal.SIGUSR1, signal.SIGUSR2,", f"[{', '.join(f'signal.{name}' for name in numbers)},")
    with start_wrapper(script.replace("time.sleep(2.5)", ""), str(tmp_path)) as process:
        wait_for_ranks(tmp_path, 1)
        for name in numbers:
            os.killpg(process.pid, signal.Signals[name])
            wait_until(lambda name=name: name in lines_of(tmp_path)[0])  # type: ignore[misc]
        os.killpg(process.pid, rank_wrapper.END_RANK)  # as Open MPI hands it on
        assert process.stderr is not None
        events = list(FrameReader().feed(process.stderr.read()))
        assert process.wait(TIMEOUT_S) == 0
    assert lines_of(tmp_path) == [["ready", *numbers, "SIGTERM", "checkpoint"]]
    (ended,) = [event for event in events if isinstance(event, Ended)]
    assert (ended.code, ended.was_told) == (0, True)


def test_a_rank_ignores_what_its_wrapper_was_started_to_ignore() -> None:
    script = "from signal import *; raise SystemExit([getsignal(SIGHUP), getsignal(SIGUSR1)] != [SIG_IGN, SIG_DFL])"
    command = command_of_wrappers([sys.executable, "-c", script])
    shell = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]
    subprocess.run([*shell, *command], capture_output=True, timeout=TIMEOUT_S, check=True)


def test_a_wrapper_that_was_told_to_end_waits_until_it_is_told_again(tmp_path: Path) -> None:
    script = "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'rank.0').write_text('ready\\n'); time.sleep(60)"
    with start_wrapper(script, str(tmp_path), **{rank_wrapper.GRACE_VARIABLE: "60"}) as process:
        wait_for_ranks(tmp_path, 1)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.stderr is not None
        reader = FrameReader()
        while not any(isinstance(event, Ended) for event in reader.feed(process.stderr.readline())):
            pass
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0


# --- what ends with its parent ----------------------------------------------------------------------------------------


def test_a_command_ends_with_its_parent_and_does_not_begin_after_its_end(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    shell = ["/bin/sh", "-c", f"trap 'touch {ended}; exit' TERM; touch {tmp_path}/begun; while :; do sleep 0.05; done"]
    parent = (
        "import os, subprocess; from ringtrain.runner.supervise.guard import command_of_guard; "
        f"subprocess.Popen(command_of_guard(os.getpid(), 15, {shell!r})).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], env={**os.environ, "PYTHONPATH": ROOT}) as process:
        wait_until((tmp_path / "begun").exists)
        process.kill()
        wait_until(ended.exists)
    orphan = command_of_guard(1, signal.SIGTERM, ["/bin/echo", "begun"])
    assert subprocess.run(orphan, capture_output=True, timeout=TIMEOUT_S, check=False).stdout == b""


def test_a_signal_that_comes_after_the_job_leaves_its_code() -> None:
    script = """
import os, signal, sys
from ringtrain.runner.supervise.supervisor import signals_handled
with signals_handled(None, is_last=True):
    pass
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    os.kill(os.getpid(), number)
sys.exit(7)
"""
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": ROOT}, check=False).returncode == 7
