"""ringrun: what becomes of progress bars and of lines without end, on a terminal and in a file, and of a full disk."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
import time
import tracemalloc
from pathlib import Path

import pytest
from fake_launcher import FakeLauncher
from harness.ringrun_job import ROOT, TIMEOUT_S, needs_mpi

from ringtrain.runner.job import Job
from ringtrain.runner.supervise.frames import Written
from ringtrain.runner.supervise.output import MAX_LINE_BYTES, Output, Rows, Screen, Surface, cut
from ringtrain.runner.supervise.supervisor import Settings, Supervisor

# --- rows -------------------------------------------------------------------------------------------------------------

BARS = b"\r  0%|    |\r 50%|##  |\r100%|####|\n"


@pytest.mark.parametrize(
    ("data", "lines", "rest"),
    [
        (b"one\n\ntwo\nthree", [b"one", b"", b"two"], [b"three"]),
        (b"windows\r\nends\r\n.", [b"windows", b"ends"], [b"."]),
        # the bar stays until something follows it
        (BARS, [], [b"100%|####|"]),
        (BARS + b"next\n", [b"100%|####|", b"next"], []),
        # the text comes first, as in print(..., end="\r")
        (b"10% done\r20% done\r", [], [b"20% done"]),
        # cleared for a line, as by tqdm.write, and painted again
        (b"\r 10%|#  |\r          \rtext\n\r 20%|## |", [], [b"text", b" 20%|## |"]),
        # two bars: the lower one is painted below, then the cursor goes up again
        (b"\router 1\n\rinner 1\x1b[A\n\rinner 2\x1b[A\router 2\n\rinner 3\x1b[A", [], [b"outer 2", b"inner 3"]),
        (b"\rbar\r\x1b[Knew\n\x1b[31mred\x1b[0m\n", [b"new", b"\x1b[31mred\x1b[0m"], []),
    ],
)
def test_of_what_is_written_over_the_last_state_counts(data: bytes, lines: list[bytes], rest: list[bytes]) -> None:
    rows = Rows()
    assert (rows.feed(data), rows.rest()) == (lines, rest)


def test_a_bar_that_has_ended_is_a_line_once_nothing_follows_it() -> None:
    rows = Rows()
    rows.feed(BARS)
    assert rows.bars() == [b"100%|####|"]
    assert rows.settle() == [b"100%|####|"]
    assert rows.bars() == rows.settle() == rows.rest() == []


def test_plain_lines_are_the_same_however_they_come() -> None:
    data = b"".join(b"line %d\n" % number * (number % 3) + b"\n" for number in range(200))
    chosen, rows, lines = random.Random(1), Rows(), []
    while data:
        step = chosen.randrange(1, 30)
        lines += rows.feed(data[:step])
        data = data[step:]
    expected = b"".join(b"line %d\n" % number * (number % 3) + b"\n" for number in range(200))
    assert b"".join(line + b"\n" for line in lines) == expected


@pytest.mark.parametrize(
    ("piece", "count"),
    [(b"\r 10%|#    | 1/9", 200_000), (b"no end ", 200_000), (b"\x1b[A", 100_000), (b"\r\n", 100_000)],
    ids=["bar", "line", "up", "down"],
)
def test_a_line_that_never_ends_takes_bounded_memory(piece: bytes, count: int) -> None:
    rows = Rows()
    tracemalloc.start()
    for _ in range(count // 50):
        rows.feed(piece * 50)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * MAX_LINE_BYTES


def test_a_line_that_is_too_long_is_broken() -> None:
    data, rows = os.urandom(300_000).replace(b"\n", b"").replace(b"\r", b"").replace(b"\x1b", b""), Rows()
    lines = [line for at in range(0, len(data), 900) for line in rows.feed(data[at : at + 900])]
    assert {len(line) for line in lines} == {MAX_LINE_BYTES}
    assert b"".join([*lines, *rows.rest()]) == data


# --- the screen -------------------------------------------------------------------------------------------------------


class Terminal:
    """Shows what is written to it, as far as ringrun makes use of one."""

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self._lines = [""]
        self._at = self._column = 0

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[\d*[A-Za-z]|[^\x1b]", text):
            if part == "\n":
                self._move(self._at + 1)
            elif part == "\r":
                self._column = 0
            elif part == "\x1b[J":
                self._lines[self._at :] = [self._lines[self._at][: self._column]]
            elif part.endswith("A"):
                self._at -= int(part[2:-1])
            else:
                self._put(part)

    def _put(self, character: str) -> None:
        if self._column == self.columns:
            self._move(self._at + 1)
        line = self._lines[self._at].ljust(self._column)
        self._lines[self._at] = line[: self._column] + character + line[self._column + 1 :]
        self._column += 1

    def _move(self, line: int) -> None:
        self._lines += [""] * (line + 1 - len(self._lines))
        self._at, self._column = line, 0

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._lines]


def output_on(terminal: Terminal, lines: int = 24, has_cursor: bool = True) -> Output:
    surface = Surface(terminal.columns, lines, has_cursor)
    return Output(Screen(lambda data, is_error: terminal.write(data.decode()), lambda: surface), True, True)


def show(output: Output) -> None:
    """Enough time passes for the screen to be painted again."""
    time.sleep(0.11)
    output.refresh()


def test_each_rank_has_a_bar_in_its_place_below_the_lines() -> None:
    output = output_on(terminal := Terminal())
    for percent in (10, 20, 30):
        for rank in (2, 0, 1):
            output.add(Written(rank, True, b"\r %d%%|%s|" % (percent + rank, b"#" * rank)))
        output.add(Written(1, False, b"line %d\n" % percent))
        show(output)
    lines = ["[1] line 10", "[1] line 20", "[1] line 30"]
    assert terminal.lines() == [*lines, "[0]  30%||", "[1]  31%|#|", "[2]  32%|##|"]
    output.add(Written(0, True, b"\r100%\n"))
    show(output)
    assert terminal.lines() == [*lines, "[0] 100%", "[1]  31%|#|", "[2]  32%|##|"]
    output.close()
    assert terminal.lines() == [*lines, "[0] 100%", "[1]  31%|#|", "[2]  32%|##|", ""]


def test_bars_fit_into_the_terminal() -> None:
    output = output_on(terminal := Terminal(columns=20), lines=3)
    for percent in (10, 20):
        for rank in range(4):
            output.add(Written(rank, True, b"\r" + b"x" * 60 + b"%d%%" % percent))
        show(output)
    assert terminal.lines() == ["[2] " + "x" * 15, "[3] " + "x" * 15]


def test_a_cut_line_keeps_its_colour_and_counts_wide_characters() -> None:
    assert cut("\x1b[31m漢字\x1b[0m and more\x1b[K", 7) == "\x1b[31m漢字\x1b[0m an\x1b[0m"
    assert cut("e\u0301tude", 3) == "e\u0301tu" and cut("\a\bplain", 9) == "plain"


def test_a_notebook_shows_one_bar() -> None:
    output = output_on(terminal := Terminal(columns=100), has_cursor=False)
    for data in (b"\r 10%", b"\r 20%"):
        output.add(Written(0, True, data))
        show(output)
    output.add(Written(0, False, b"a line\n"))
    assert terminal.lines() == ["[0] a line", ""]


def test_a_line_of_the_launcher_that_has_no_end_is_not_painted_over() -> None:
    terminal = Terminal()
    screen = Screen(lambda data, is_error: terminal.write(data.decode()), lambda: Surface(80, 24, True))
    screen.print(b"Password: ", True)
    screen.show([b"bar"])
    assert terminal.lines() == ["Password:"]
    screen.print(b"\n", True)
    screen.show([b"bar"])
    assert terminal.lines() == ["Password:", "bar"]


# --- real jobs --------------------------------------------------------------------------------------------------------

TRAIN = """
import sys, time
for step in range(1, 5):
    print(f"\\r{25 * step:4}%|{'#' * step:4}|", end="", file=sys.stderr)
    time.sleep(0.15)
    if step == 2:
        print("\\r" + " " * 11 + "\\r", end="", file=sys.stderr)
        print("epoch 1")
print(file=sys.stderr)
"""


@needs_mpi
def test_a_terminal_shows_bars_while_the_job_runs_and_their_ends_afterwards() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    words = [sys.executable, "-m", "ringtrain.run", "-np", "2", "python", "-c", TRAIN]
    environment = {**os.environ, "PYTHONPATH": ROOT, "TERM": "xterm"}
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        written = b""
        try:
            while data := os.read(ours, 4096):
                written += data
        except OSError:
            pass  # nobody has the other end any more
        assert process.wait(TIMEOUT_S) == 0
    os.close(ours)
    terminal = Terminal()
    terminal.write(written.decode())
    lines = terminal.lines()
    assert sorted(lines) == ["", "[0]  100%|####|", "[0] epoch 1", "[1]  100%|####|", "[1] epoch 1"]
    assert re.search(rb"\[[01]\]   (25%\|#  |50%\|## |75%\|###) \|", written)


def run(rank: str, *, folder: Path | None = None, printed: list[bytes]) -> int:
    """A job of two ranks that run the Python code `rank`, without MPI. Returns the exit code."""
    job = Job([sys.executable, "-c", rank], 2, [], dict(os.environ))
    screen = Screen(lambda data, is_error: printed.append(data))
    launcher = FakeLauncher("[rank.wait() for rank in ranks]")
    return Supervisor(launcher, job, Settings(True, 0, folder, False), screen).run().code


def test_in_a_file_a_bar_is_one_line(tmp_path: Path) -> None:
    assert run(TRAIN, folder=tmp_path, printed=(printed := [])) == 0
    assert sorted(b"".join(printed).splitlines()) == [
        *(b"[0]  100%|####|", b"[0] epoch 1"),
        *(b"[1]  100%|####|", b"[1] epoch 1"),
    ]
    written = {path.name: path.read_text() for path in (tmp_path / "rank.0").iterdir()}
    assert written == {"stdout": "epoch 1\n", "stderr": " 100%|####|\n"}


# --- full disks -------------------------------------------------------------------------------------------------------

MUCH = "for number in range(400): print('x' * 200)"


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own needs root")
def test_a_full_disk_ends_the_files_and_not_the_job(tmp_path: Path) -> None:
    (code := tmp_path / "code.py").write_text(f"""
import sys
from pathlib import Path
sys.path += {[*sys.path, ROOT]!r}
from test_run_screen import MUCH, run
raise SystemExit(run(MUCH, folder=Path({str(tmp_path / "full")!r}), printed=(printed := [])) or print(
    b"".join(printed).decode()))
""")
    (tmp_path / "full").mkdir()
    mount = f"mount -t tmpfs -o size=64k tmpfs {tmp_path}/full && exec {sys.executable} {code}"
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    said = f"ringrun: the files in {tmp_path}/full end here: No space left on device; the job goes on without them"
    assert [line for line in lines if line.startswith("ringrun")] == [said]
    assert len([line for line in lines if "xxx" in line]) == 800


@needs_mpi
def test_a_full_standard_output_does_not_end_the_job(tmp_path: Path) -> None:
    script = f"{MUCH}\nimport os, pathlib, sys; pathlib.Path(sys.argv[1], str(os.getpid())).touch()"
    words = [sys.executable, "-m", "ringtrain.run", "-np", "2", "python", "-c", script, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=TIMEOUT_S, check=False
        )
    said = "ringrun: standard output ends here: No space left on device; the job goes on\n"
    assert (result.returncode, result.stderr) == (0, said)
    assert len(list(tmp_path.iterdir())) == 2
