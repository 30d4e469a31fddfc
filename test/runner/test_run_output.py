"""ringrun: what the ranks write, line by line and rank by rank, and which of them is said to have failed first."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from harness.ringrun_job import RANK_VARIABLES, ROOT, TIMEOUT_S, needs_mpi, on_each_network, ringrun

from ringtrain.errors import list_of_ranks
from ringtrain.runner.supervise import rank_wrapper
from ringtrain.runner.supervise.first_failure import FailureLog, report, spoken
from ringtrain.runner.supervise.frames import Ended, FrameReader, LauncherSaid, Started, Written
from ringtrain.runner.supervise.output import LastLines, Output, RankFiles, Screen
from ringtrain.runner.supervise.rank_wrapper import Sender
from ringtrain.runner.supervise.slowest import in_words_of_slowest

TRACEBACK = b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: bad\n'


# --- frames -----------------------------------------------------------------------------------------------------------


def frames_of(data: bytes) -> bytes:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, True)
    pid = os.fork()
    if pid == 0:
        Sender(write_end, 3).send_output(rank_wrapper.STDOUT, data)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        sent = stream.read()
    os.waitpid(pid, 0)
    return sent


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    "data", [b"one\n\ntwo\n", b"no end", b"bar 1\rbar 2\r\nnext", b"x" * 5000 + b"\ny", b"\xff\x1e0o\n", b"\n"]
)
def test_bytes_come_through_frames_unchanged(data: bytes, step: int) -> None:
    sent, reader = frames_of(data), FrameReader()
    events = [event for at in range(0, len(sent), step) for event in reader.feed(sent[at : at + step])]
    assert all(isinstance(event, Written) and event.rank == 3 and not event.is_error for event in events)
    assert b"".join(event.data for event in events if isinstance(event, Written)) == data


def test_no_frame_is_longer_than_what_launchers_pass_on_in_one_piece() -> None:
    assert max(map(len, frames_of(b"x" * 10_000).split(b"\n"))) < 1024


@pytest.mark.parametrize("is_of_agent", [False, True])
def test_a_reader_that_has_gone_ends_the_sender_although_the_pipe_is_not_empty(is_of_agent: bool) -> None:
    read_end, write_end = os.pipe()
    sender = Sender(write_end, 0, reader_makes_lines=is_of_agent)
    sender.send(rank_wrapper.STDOUT, b"never read")
    os.close(read_end)
    raised: list[BaseException] = []

    def send() -> None:
        try:
            sender.send(rank_wrapper.STDOUT, b"more")
        except BrokenPipeError as error:
            raised.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(10)
    assert raised
    os.close(write_end)


def test_a_sender_whose_reader_is_stopped_looks_after_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    class LauncherGone(Exception):
        pass

    def require_launcher() -> None:
        raise LauncherGone

    monkeypatch.setattr(rank_wrapper, "_LOOK_S", 0.05)
    read_end, write_end = os.pipe()
    sender = Sender(write_end, 0, require_launcher)
    sender.send(rank_wrapper.STDOUT, b"never read")
    with pytest.raises(LauncherGone):
        sender.send(rank_wrapper.STDOUT, b"more")
    os.close(read_end)
    os.close(write_end)


def test_a_sender_of_an_agent_waits_for_room_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many that ask again and again whether an agent has read their frames would leave it no time to read them."""

    class Full(Exception):
        pass

    def require_launcher() -> None:
        raise Full

    monkeypatch.setattr(rank_wrapper, "_LOOK_S", 0.05)
    read_end, write_end = os.pipe()
    sender, sent = Sender(write_end, 0, require_launcher, reader_makes_lines=True), 0
    with pytest.raises(Full):
        while True:
            sender.send_output(rank_wrapper.STDOUT, b"x" * 799 + b"\n")
            sent += 1
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        assert sent > 10 and len(list(FrameReader().feed(stream.read()))) == sent


def test_lines_of_the_launcher_come_between() -> None:
    reader = FrameReader()
    events = [*reader.feed(b"a warning\n\x1e1sh1 42 -\nPartial \x1e0x-9 0.5 1\n\x1egarbage\nthe end"), *reader.close()]
    assert events == [
        LauncherSaid(b"a warning\n"),
        Started(1, "h1", 42),
        LauncherSaid(b"Partial "),
        Ended(0, -9, 0.5, True),
        LauncherSaid(b"garbage\n"),
        LauncherSaid(b"the end"),
    ]


# --- lines ------------------------------------------------------------------------------------------------------------


class Printed:
    """To a file, say."""

    def __init__(self) -> None:
        self.streams = {False: io.BytesIO(), True: io.BytesIO()}
        self.screen = Screen(lambda data, is_error: self.streams[is_error].write(data))

    def texts(self) -> tuple[str, str]:
        return self.streams[False].getvalue().decode(), self.streams[True].getvalue().decode()


def test_lines_of_several_ranks_are_whole_and_have_their_rank() -> None:
    printed = Printed()
    output = Output(printed.screen, has_prefix=True, are_several=True)
    for rank, is_error, data in [
        (0, False, b"ha"),
        (1, False, b"one\ntwo\n"),
        (1, True, b"10%\r"),
        (0, False, b"lf\nx"),
    ]:
        output.add(Written(rank, is_error, data))
    assert printed.texts() == ("[1] one\n[1] two\n[0] half\n", "")
    output.close()
    assert printed.texts() == ("[1] one\n[1] two\n[0] half\n[0] x\n", "[1] 10%\n")


def test_one_rank_without_prefix_is_printed_at_once() -> None:
    printed = Printed()
    Output(printed.screen, has_prefix=False, are_several=False).add(Written(0, False, b"your name: "))
    assert printed.texts() == ("your name: ", "")


def files_in(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_files_of_ranks_are_in_order_and_hold_nothing_of_a_former_job(tmp_path: Path) -> None:
    former = RankFiles(tmp_path, 11, pytest.fail)
    former.add(Written(7, True, b"former\n"))
    former.close()
    files = RankFiles(tmp_path, 11, pytest.fail)
    files.add(Written(10, False, b"one\n"))
    files.add(Written(10, False, b"two\n"))
    files.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank.{rank:02}" for rank in range(11)]
    found = files_in(tmp_path)
    assert len(found) == 22 and {name: text for name, text in found.items() if text} == {"rank.10/stdout": "one\ntwo\n"}


def test_the_time_comes_before_the_rank() -> None:
    for has_prefix, rank in ((True, "[3] "), (False, "")):
        printed = Printed()
        Output(printed.screen, has_prefix, are_several=False, has_time=True).add(Written(3, False, b"one\ntwo\n"))
        for line, text in zip(printed.texts()[0].splitlines(), ("one", "two"), strict=True):
            assert abs(time.time() - time.mktime(time.strptime(line[:20], "%Y-%m-%d %H:%M:%S "))) < TIMEOUT_S
            assert line[20:] == rank + text


def test_the_last_lines_are_kept_and_a_progress_bar_is_one_of_them() -> None:
    lines = LastLines()
    lines.add(b"".join(b"%d\n" % number for number in range(1000)))
    lines.add(b"10%\r20%\nopen")
    assert lines.all()[-3:] == ["999", "20%", "open"] and len(lines.all()) < 100


# --- who was first ----------------------------------------------------------------------------------------------------


def test_a_traceback_counts_although_its_rank_ends_later() -> None:
    log = FailureLog()
    log.add(Started(1, "h1", 42))
    log.add(Written(1, True, TRACEBACK))
    time.sleep(0.01)
    log.add(Written(0, True, TRACEBACK.replace(b"bad", b"because of rank 1")))
    log.add(Ended(0, 1, 0.0, False))
    log.add(Ended(1, -15, 0.0, True))
    failures = log.failures()
    assert [(failure.rank, failure.code) for failure in failures] == [(1, 1), (0, 1)]
    lines = spoken(report(failures)).splitlines()
    assert lines[0] == "ringrun: the first to fail was rank 1 on h1, with exit code 1; rank 0 failed after it"
    assert lines[1] == "ringrun: the last lines of rank 1 on standard error were"
    assert lines[2:] == ["    " + line for line in TRACEBACK.decode().splitlines()]


def test_a_consequence_is_not_the_first_even_if_it_is_heard_of_before() -> None:
    log = FailureLog()
    log.add(Written(0, True, TRACEBACK.replace(b"ValueError: bad", b"ringtrain.ShutDownError: rank 1 left the job")))
    log.add(Ended(0, 1, 0.0, False))
    log.add(Ended(1, 7, 0.0, False))
    assert [failure.rank for failure in log.failures()] == [1, 0]


def test_the_age_of_a_message_counts() -> None:
    log = FailureLog()
    log.add(Ended(0, 3, 0.0, False))
    log.add(Ended(1, -11, 5.0, False))
    assert [(failure.rank, failure.code) for failure in log.failures()] == [(1, 139), (0, 3)]
    assert "rank 1, ended by SIGSEGV (exit code 139)" in report(log.failures())


def test_a_rank_that_was_told_to_end_or_ended_well_has_not_failed() -> None:
    log = FailureLog()
    log.add(Ended(0, -15, 0.0, True))
    log.add(Written(1, True, TRACEBACK))
    log.add(Ended(1, 0, 0.0, False))
    assert log.failures() == []


STALLED = TRACEBACK.replace(b"ValueError: bad", b"ringtrain.StalledError: waiting for 5 s")


@pytest.mark.parametrize("woken", [TRACEBACK, TRACEBACK.replace(b"ValueError: bad\n", b""), TRACEBACK[:35]])
def test_a_rank_that_wakes_up_to_be_ended_is_not_the_first(woken: bytes) -> None:
    log = FailureLog()
    log.add(Written(0, True, STALLED + b"ringtrain: MPI_Finalize waits for other ranks\n"))
    log.add(Ended(0, 1, 0.0, False))
    time.sleep(0.01)
    log.add(Written(1, True, woken))
    log.add(Ended(1, -15, 0.0, True))
    failures = log.failures()
    assert [failure.rank for failure in failures] == ([0, 1] if woken == TRACEBACK else [0])
    assert report(failures).splitlines()[-1] == "    ringtrain.StalledError: waiting for 5 s"


@pytest.mark.parametrize("where", ["", ": it is in load_next_batch() at train.py:17"])
def test_a_rank_that_waited_for_a_stuck_one_is_not_called_the_first_to_fail(where: str) -> None:
    stalled = (
        'ringtrain.StalledError: allreduce "grad.3": waited 600 s. ranks 0, 2 submitted it (at train.py:31), rank 1 '
        f"did not{where}. Do all ranks run the same operations, or is a rank stuck in something else?"
    )
    log = FailureLog()
    for rank in (2, 0):
        log.add(Written(rank, True, TRACEBACK.replace(b"ValueError: bad", stalled.encode())))
        log.add(Ended(rank, 1, 0.0, False))
    log.add(Ended(1, -15, 0.0, True))
    first, second, *_ = report(log.failures()).splitlines()
    assert first == f'rank 1 did not submit allreduce "grad.3"{where}'
    assert second == "ranks 0, 2 waited for it"


def test_a_torn_traceback_of_a_rank_that_nobody_told_to_end_counts() -> None:
    log = FailureLog()
    log.add(Written(1, True, TRACEBACK[:35]))
    log.add(Ended(1, -9, 0.0, False))
    assert [(failure.rank, failure.code) for failure in log.failures()] == [(1, 137)]


def test_ranks_are_listed_in_ranges() -> None:
    assert list_of_ranks([3]) == "rank 3" and list_of_ranks([5, 0, 2, 3, 4, 9]) == "ranks 0, 2-5, 9"


# --- real jobs --------------------------------------------------------------------------------------------------------

RANK = f"import os; rank = int(next(os.environ[name] for name in {RANK_VARIABLES} if name in os.environ));"


@needs_mpi
@on_each_network
def test_lines_are_whole_however_fast_they_come() -> None:
    script = "for number in range(3000): print('line', number, '.' * (number % 200))"
    result = ringrun("-np", "3", "python", "-c", script)
    lines = result.stdout.splitlines()
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] line {number} {'.' * (number % 200)}" for number in range(3000)]
    assert len(lines) == 9000


@needs_mpi
@pytest.mark.fast
@on_each_network
def test_both_streams_stay_apart_and_go_to_a_file_for_each_rank(tmp_path: Path) -> None:
    script = RANK + "import sys; print('out'); print(f'err {rank}', file=sys.stderr); print('no end', end='')"
    folder = tmp_path / "logs" / "today"
    result = ringrun("-np", "2", "--output-filename", str(folder), "python", "-c", script)
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == ["[0] no end", "[0] out", "[1] no end", "[1] out"]
    assert sorted(result.stderr.splitlines()) == ["[0] err 0", "[1] err 1"]
    assert files_in(folder) == {
        "rank.0/stdout": "out\nno end\n",
        "rank.0/stderr": "err 0\n",
        "rank.1/stdout": "out\nno end\n",
        "rank.1/stderr": "err 1\n",
    }


@needs_mpi
def test_a_single_rank_has_no_prefix_unless_it_is_asked_for() -> None:
    assert ringrun("-np", "1", "python", "-c", "print('alone')").stdout == "alone\n"
    assert ringrun("-np", "1", "--prefix-output", "python", "-c", "print('alone')").stdout == "[0] alone\n"
    assert ringrun("-np", "2", "--no-prefix-output", "python", "-c", "print('both')").stdout == "both\n" * 2


@needs_mpi
@on_each_network
def test_standard_input_reaches_rank_0() -> None:
    words = [sys.executable, "-m", "ringtrain.run", "-np", "1", "python", "-c", "print(input()[::-1])"]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    result = subprocess.run(words, input="olleh\n", capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert result.stdout == "hello\n", result.stderr


@needs_mpi
@on_each_network
def test_a_reader_that_goes_away_ends_the_job() -> None:
    words = [sys.executable, "-m", "ringtrain.run", "-np", "2", "python", "-c", "while True: print('endless')"]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 141
        assert b"Traceback" not in process.stderr.read()


@needs_mpi
@pytest.mark.parametrize(
    ("failing", "code", "said", "last"),
    [
        pytest.param("raise SystemExit(7)", 7, "with exit code 7", None, marks=pytest.mark.fast),
        ("import signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, "ended by SIGSEGV (exit code 139)", None),
        pytest.param(
            *("os.kill(os.getpid(), 9)", 137, "ended by SIGKILL (exit code 137)"),
            "ringrun: was that the system, for want of memory? `dmesg | tail` says so on its host",
            marks=pytest.mark.fast,
        ),
        ("raise ValueError('no such data')", 1, "with exit code 1", "    ValueError: no such data"),
    ],
)
@on_each_network
def test_the_first_failure_is_told_last_and_its_code_returned(
    failing: str, code: int, said: str, last: str | None
) -> None:
    script = f"{RANK}\nimport time\nif rank == 1:\n    {failing}\ntime.sleep(1 if rank == 0 else 0)"
    result = ringrun("-np", "3", "python", "-c", script)
    assert result.returncode == code, result.stderr
    lines = result.stderr.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("ringrun: the first to fail was rank 1 ")]
    assert said in lines[at]
    assert all(line.startswith(("    ", "ringrun: ")) for line in lines[at:])
    assert last is None or lines[-1] == last


@needs_mpi
@pytest.mark.fast
@on_each_network
def test_a_rank_that_fails_because_of_another_is_not_the_first() -> None:
    script = """
import numpy, ringtrain as hvd
hvd.init()
hvd.barrier()
if hvd.rank() == 2:
    raise KeyError("the cause")
hvd.allreduce(numpy.ones(3))
"""
    result = ringrun("-np", "3", "python", "-c", script)
    assert result.returncode == 1
    assert "the first to fail was rank 2" in result.stderr and result.stderr.endswith("    KeyError: 'the cause'\n")


@needs_mpi
@on_each_network
def test_a_stopped_rank_is_not_the_first_to_fail() -> None:
    script = """
import os, signal, numpy, ringtrain as hvd
hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
hvd.allreduce(numpy.ones(3))
"""
    limits = ("--stall-warning-time-s", "1", "--stall-shutdown-time-s", "2", "--grace-s", "2")
    result = ringrun("-np", "3", *limits, "python", "-c", script)
    assert result.returncode == 1
    assert "the first to fail was rank 1" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("    ringtrain.StalledError: "), result.stderr


@needs_mpi
def test_a_rank_that_leaves_early_is_told_last() -> None:
    script = """
import os, time, ringtrain as hvd
hvd.init()
hvd.barrier()
if hvd.rank() == 1:
    os._exit(0)
time.sleep(20)
"""
    result = ringrun("-np", "3", "python", "-c", script)
    assert result.returncode != 0
    last = result.stderr.splitlines()[-1]
    assert last == f"ringrun: rank 1 on {socket.gethostname()} ended early with exit code 0, while the others still ran"


@needs_mpi
@on_each_network
def test_a_command_that_is_not_there_is_told() -> None:
    result = ringrun("-np", "2", "no-such-program")
    assert result.returncode == 127 and "no-such-program cannot be started: No such file" in result.stderr


RAISES = """
import numpy as np
import ringtrain as hvd
hvd.init()
if hvd.rank() == 1:
    hvd.allreduce(np.ones(3), op=hvd.Sum, name="x", process_set=7)
hvd.allreduce(np.ones(3), name="x")
"""


@needs_mpi
@on_each_network
@pytest.mark.parametrize("shows_all", [False, True])
def test_one_exception_is_shown_without_frames_of_ringtrain_and_the_other_ranks_say_a_line(
    shows_all: bool, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(RAISES)
    more = {"RINGTRAIN_FULL_TRACEBACK": "1"} if shows_all else {}
    done = ringrun("-np", "3", "python", str(script), **more)
    assert done.returncode == 1
    printed, report = done.stderr.split("ringrun: the first to fail was rank 1")
    lines = [line for line in printed.splitlines() if " the last operations of rank " not in line]
    if shows_all:
        assert "/ringtrain/ops/" in printed and len(lines) > 20
        return
    assert "/ringtrain/" not in printed + report
    of_ranks = [[line[4:] for line in lines if line.startswith(f"[{rank}] ")] for rank in range(3)]
    assert len(lines) == sum(map(len, of_ranks))
    assert of_ranks[1][0] == "Traceback (most recent call last):" and "process_set" in of_ranks[1][-1]
    assert [line for line in of_ranks[1] if line.startswith("  File")] == [f'  File "{script}", line 6, in <module>']
    for rank in (0, 2):
        (line,) = of_ranks[rank]
        assert re.fullmatch(
            rf"ringtrain.RemoteError: rank 1 \(host .+, pid \d+\) raised (TypeError|ValueError): .+ "
            rf"\(this rank was at {script}:7\)",
            line,
        ), line
    assert "; ranks 0, 2 failed after it" in report and "process_set" in report


def test_the_line_of_a_rank_that_failed_after_another_is_all_that_is_shown_of_it() -> None:
    log = FailureLog()
    words = b"a note\nringtrain.ShutDownError: rank 1 exited early (this rank was at train.py:7)\nringtrain: a note\n"
    log.add(Started(0, "h1", 42))
    log.add(Written(0, True, words))
    log.add(Ended(0, 1, 0.0, True))  # was told to end, but after these words
    (failure,) = log.failures()
    assert failure.is_consequence
    assert failure.last_lines == ["ringtrain.ShutDownError: rank 1 exited early (this rank was at train.py:7)"]


# --- the slowest rank -------------------------------------------------------------------------------------------------

SLOW = """
import time
import numpy as np
import ringtrain as hvd
hvd.init()
for _ in range(20):
    time.sleep(0.03 * (hvd.rank() == 1))
    hvd.allreduce(np.ones(3), name="gradient")
"""
RUNS_AT_ONCE = """
import sys
from ringtrain.runner import command
from ringtrain.runner.supervise import slowest
slowest._LEAST_S = 0.1
sys.exit(command.main(sys.argv[1:]))
"""


@needs_mpi
@on_each_network
def test_a_rank_that_the_others_wait_for_is_named_at_the_end() -> None:
    words = ["-np", "3", sys.executable, "-c", SLOW]
    done = subprocess.run(
        [sys.executable, "-c", RUNS_AT_ONCE, *words],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ringrun: the others waited for rank 1 in \d+ of \d+ operations, ", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("changed", "is_said"),
    [
        ({}, True),
        ({1: [40, 100, 1.0, 20.0]}, False),  # other ranks were last, too
        ({1: [90, 100, 8.5, 20.0]}, False),  # and did not cost much
        ({1: [9, 10, 0.1, 2.0], 0: [0, 10, 1.0, 2.0], 2: [0, 10, 1.0, 2.0]}, False),  # in a short job
        ({2: None}, False),  # a rank has told nothing
    ],
    ids=["slow", "in turns", "cheap", "short", "untold"],
)
def test_a_slow_rank_is_named_where_it_costs_a_tenth(changed: dict[int, list[float] | None], is_said: bool) -> None:
    counts = {0: [1, 100, 10.0, 20.0], 1: [90, 100, 1.0, 20.0], 2: [2, 100, 9.0, 20.0], **changed}
    told = {rank: those for rank, those in counts.items() if those is not None}
    said = in_words_of_slowest(told, num_proc=3)
    assert (
        said.startswith("the others waited for rank 1 in 90 of 100 operations, 8 s of 20 s: ") if is_said else not said
    )
