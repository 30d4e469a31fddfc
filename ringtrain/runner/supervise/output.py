"""The output of the ranks, line by line: to that of this process, to a file for each rank, and kept for a report."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ringtrain.errors import list_of_ranks
from ringtrain.runner.supervise.frames import Written

# --- the screen of ringrun --------------------------------------------------------------------------------------------


Print = Callable[[bytes, bool], None]
"""Takes bytes, and whether they are for standard error."""


class Surface(NamedTuple):
    """Size in columns and lines, and whether the cursor can go up."""

    columns: int
    lines: int
    has_cursor: bool


FindSurface = Callable[[], Surface | None]
"""Gives None where standard error is nothing that can be painted over, such as a file."""


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, also where a part of it is taken at a time. Raises OSError."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


class StandardStreams:
    """Prints to this process's own. One that takes no more, as on a full disk, is dropped with a sentence.

    That its reader has gone is another matter: BrokenPipeError.
    """

    def __init__(self, speaker: str = "ringrun") -> None:
        self._speaker = speaker
        self._is_dropped = {False: sys.stdout is None, True: sys.stderr is None}

    def print(self, data: bytes, is_error: bool) -> None:
        if self._is_dropped[is_error]:
            return
        try:
            self._write(data, is_error)
        except BrokenPipeError:
            raise
        except (OSError, ValueError) as error:
            self._is_dropped[is_error] = True
            name, reason = "error" if is_error else "output", getattr(error, "strerror", None) or error
            sentence = f"{self._speaker}: standard {name} ends here: {reason}; the job goes on\n"
            self.print(sentence.encode(), not is_error)

    def _write(self, data: bytes, is_error: bool) -> None:
        """Raises OSError, and ValueError of a closed stream."""
        write_all((sys.stderr if is_error else sys.stdout).fileno(), data)


class PythonStreams(StandardStreams):
    """Prints to files of Python, by default sys.stdout and sys.stderr, which may be None, closed or of any encoding.

    The caller is to get results in any case. In a notebook all goes to standard output: it begins a new block with each
    change of the stream, and a block whose progress bar was erased is a blank line.
    """

    def __init__(self, stdout: Any = None, stderr: Any = None, speaker: str = "ringtrain.run") -> None:
        super().__init__(speaker)
        self._given = {False: stdout, True: stderr}
        self._is_dropped = {False: False, True: False}

    def _write(self, data: bytes, is_error: bool) -> None:
        stream: Any = self._given[is_error] or (sys.stderr if is_error and not _is_in_notebook() else sys.stdout)
        if stream is None:
            return
        encoding = getattr(stream, "encoding", None) or "utf-8"
        text = data.decode(errors="replace").encode(encoding, errors="backslashreplace").decode(encoding)
        try:
            stream.write(data if isinstance(stream, (io.RawIOBase, io.BufferedIOBase)) else text)
            stream.flush()
        except BrokenPipeError as error:
            raise ValueError(error.strerror) from None


def terminal() -> Surface | None:
    """Returns the terminal of standard error, or None."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            size = os.get_terminal_size(sys.stderr.fileno())
            return Surface(size.columns or 80, size.lines or 24, has_cursor=True)
    return None


def terminal_or_notebook() -> Surface | None:
    """A notebook knows carriage returns and nothing else."""
    return Surface(100, 1, has_cursor=False) if _is_in_notebook() else terminal()


def _is_in_notebook() -> bool:
    return "ipykernel" in sys.modules


# --- the screen -------------------------------------------------------------------------------------------------------


# Rows that change are painted again after this time.
_FRAME_S = 0.1
_ESCAPE = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z])")
_NO_COLOUR = "\x1b[0m"


class Screen:
    """For one thread. Nothing else may print to the same terminal."""

    def __init__(self, write: Print, find_surface: FindSurface = lambda: None, speaker: str = "ringrun"):
        self._write = write
        self._find_surface = find_surface
        self.speaker = speaker
        self._painted: list[str] = []
        self._painted_at = 0.0
        self._erasing = b""
        self._is_at_line_start = True

    def print(self, data: bytes, is_error: bool) -> None:
        """Print in the place of the rows; `show` brings them back."""
        if data:
            self._erase()
            self._write(data, is_error)
            self._is_at_line_start = data.endswith(b"\n")

    def say(self, text: str) -> None:
        """Print a sentence of this program's own."""
        self.print(f"{self.speaker}: {text}\n".encode(), True)

    def show(self, rows: list[bytes]) -> None:
        """Prints these rows, and no others, below the lines."""
        if not rows:
            self._erase()
        elif not self._painted or time.monotonic() > self._painted_at + _FRAME_S:
            self._paint(rows)

    def _paint(self, rows: list[bytes]) -> None:
        surface = self._find_surface()
        if surface is None or not self._is_at_line_start:
            return
        # a character in the last column could wrap
        height = max(1, surface.lines - 1) if surface.has_cursor else 1
        texts = [cut(row.decode(errors="replace"), surface.columns - 1) for row in rows[-height:]]
        if texts != self._painted:
            self._erase()
            self._write("\n".join(texts).encode(), True)
            self._painted, self._painted_at = texts, time.monotonic()
            up = f"\x1b[{len(texts) - 1}A" if len(texts) > 1 else ""
            blank = f"\r{up}\x1b[J" if surface.has_cursor else "\r" + " " * surface.columns + "\r"
            self._erasing = blank.encode()

    def _erase(self) -> None:
        if self._painted:
            self._write(self._erasing, True)
            self._painted = []


def cut(text: str, columns: int) -> str:
    """Returns the part of `text` that fits into a row of that many columns. Of escape sequences only colours stay."""
    shown: list[str] = []
    for part in _ESCAPE.split(text):
        if _ESCAPE.fullmatch(part):
            shown += [part] if part.endswith("m") else []
            continue
        for character in part:
            columns -= _columns_of(character)
            if columns >= 0 and character.isprintable():
                shown.append(character)
    return "".join(shown) + (_NO_COLOUR if "\x1b" in text else "")


def _columns_of(character: str) -> int:
    if unicodedata.combining(character) or not character.isprintable():
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


# --- lines of the ranks -----------------------------------------------------------------------------------------------


class Names(Protocol):
    """Names processes, which have numbers from 0."""

    def label(self, number: int) -> str:
        """The beginning of each of its lines."""

    def listed(self, numbers: Iterable[int]) -> str:
        """One or more, within a sentence."""


class Ranks:
    """`1`, and `ranks 0, 2-5`."""

    def label(self, number: int) -> str:
        return str(number)

    def listed(self, numbers: Iterable[int]) -> str:
        return list_of_ranks(numbers)


RANKS = Ranks()


# --- progress bars ----------------------------------------------------------------------------------------------------
# What one rank writes to one stream, as a terminal would show it: lines that are over, and rows that may still
# change. A progress bar writes over its row, after a carriage return or by moving the cursor up: only its last state
# counts. Memory is bounded and work is in proportion to what is written, for a bar of days and for output without
# line ends.


# An open line is broken here.
MAX_LINE_BYTES = 1 << 16
# Bars that stand below each other; the uppermost of more is taken for a line.
_MAX_ROWS = 32
_TOKENS = re.compile(rb"([\r\n]|\x1b\[\d*[AK])")


class _Row:
    def __init__(self) -> None:
        self.text = bytearray()
        self.is_bar = False
        self.is_at_start = True

    def write(self, text: bytes) -> None:
        if self.is_at_start:
            self.text.clear()
            self.is_at_start = False
        self.text += text
        if self.is_bar:
            del self.text[MAX_LINE_BYTES:]

    def line(self) -> bytes:
        # a bar is filled up with spaces to hide what was there before
        return bytes(self.text.rstrip() if self.is_bar else self.text)


class Rows:
    """Keeps bars back after their line end, for a cursor that comes back to them, until plain text or `settle`."""

    def __init__(self) -> None:
        self._rows = [_Row()]
        self._at = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that are over now, without their ends."""
        if not self.have_bars and b"\r" not in data and b"\x1b[" not in data:
            return self._feed_lines(data)
        over: list[bytes] = []
        for token in _TOKENS.split(data):
            if token:
                self._take(token, over)
        return over

    def settle(self) -> list[bytes]:
        """The cursor stays: what stands above it is over."""
        over: list[bytes] = []
        self._finish(self._at, over)
        return over

    def rest(self) -> list[bytes]:
        """Returns what is not over, as lines."""
        lines = [row.line() for row in self._rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def bars(self) -> list[bytes]:
        """The rows that are progress bars, the uppermost first, without empty ones."""
        return [line for line in (row.line() for row in self._rows if row.is_bar) if line]

    @property
    def have_bars(self) -> bool:
        """Also without anything to see: `settle` may bring lines."""
        return len(self._rows) > 1 or self._rows[0].is_bar

    def _feed_lines(self, data: bytes) -> list[bytes]:
        """The same for plain text, which is most of what there is, and faster."""
        *over, rest = data.split(b"\n")
        if over and not self._rows[0].is_at_start:
            over[0] = self._rows[0].line() + over[0]
            self._rows[0] = _Row()
        self._write(rest, over)
        return over

    def _take(self, token: bytes, over: list[bytes]) -> None:
        row = self._rows[self._at]
        if token == b"\n":
            self._end_line(over)
        elif token == b"\r":
            row.is_bar = row.is_at_start = True
        elif token[:2] != b"\x1b[" or token[-1:] not in b"AK":
            self._write(token, over)
        elif token[-1:] == b"A":
            self._at = max(0, self._at - int(token[2:-1] or 1))
        elif row.is_at_start or token == b"\x1b[2K":
            row.text.clear()

    def _write(self, text: bytes, over: list[bytes]) -> None:
        if not text:
            return
        if not self._rows[self._at].is_bar:
            self._finish(self._at, over)
        row = self._rows[self._at]
        row.write(text)
        while len(row.text) > MAX_LINE_BYTES:
            over.append(bytes(row.text[:MAX_LINE_BYTES]))
            del row.text[:MAX_LINE_BYTES]

    def _end_line(self, over: list[bytes]) -> None:
        row = self._rows[self._at]
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(_Row())
        # an empty row below a bar may be on the way to another bar
        if not row.is_bar and (self._at == 1 or not row.is_at_start):
            self._finish(self._at, over)
        if self._at > _MAX_ROWS:
            self._finish(1, over)

    def _finish(self, count: int, over: list[bytes]) -> None:
        """The uppermost `count` rows are over."""
        over += [row.line() for row in self._rows[:count]]
        del self._rows[:count]
        self._at -= count


# --- output of all ranks ----------------------------------------------------------------------------------------------


_KEPT_LINES = 60
# A cursor that has left a progress bar comes back within this time, or not at all.
_SETTLED_S = 0.1
# by whether it is standard error
_FILE_NAMES = {False: "stdout", True: "stderr"}


class _Stream:
    """The text that one rank has written to one of its streams."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.written_at = 0.0


class Output:
    """Everything that the ranks write: printed on `screen` and, if there are files, put there as well.

    Lines are printed whole, each with its rank before it if `has_prefix` and the time if `has_time`. A progress bar is
    one line: its last state; before that, `screen` shows it where it can. A single rank without either is printed as it
    comes, so that a prompt is seen before its line ends.
    """

    def __init__(
        self,
        screen: Screen,
        has_prefix: bool,
        are_several: bool,
        files: RankFiles | None = None,
        has_time: bool = False,
        names: Names = RANKS,
    ):
        self._screen = screen
        self._has_prefix = has_prefix
        self._has_time = has_time
        self._names = names
        self._is_direct = not are_several and not has_prefix and not has_time
        self._files = files
        self._streams: dict[tuple[int, bool], _Stream] = {}
        self._with_bars: set[tuple[int, bool]] = set()

    def add(self, written: Written) -> None:
        if self._is_direct:
            self._screen.print(written.data, written.is_error)
        key = (written.rank, written.is_error)
        stream = self._streams.setdefault(key, _Stream())
        self._add_lines(key, stream.rows.feed(written.data))
        if stream.rows.have_bars:
            stream.written_at = time.monotonic()
            self._with_bars.add(key)

    def refresh(self) -> None:
        """To be called after `add`, and several times in a second: shows the bars as they are now."""
        now, bars = time.monotonic(), []
        for key in sorted(self._with_bars):
            stream = self._streams[key]
            if now > stream.written_at + _SETTLED_S:
                self._add_lines(key, stream.rows.settle())
            if not stream.rows.have_bars:
                self._with_bars.discard(key)
            bars += [self._prefix(key[0]) + bar for bar in stream.rows.bars()]
        if not self._is_direct:
            self._screen.show(bars)

    def close(self) -> None:
        """Nothing more comes; what has no end becomes lines."""
        self._screen.show([])
        for key, stream in sorted(self._streams.items()):
            self._add_lines(key, stream.rows.rest())

    def _add_lines(self, key: tuple[int, bool], lines: list[bytes]) -> None:
        rank, is_error = key
        if lines and self._files is not None:
            self._files.add(Written(rank, is_error, b"".join(line + b"\n" for line in lines)))
        if lines and not self._is_direct:
            prefix = self._prefix(rank)
            self._screen.print(b"".join(prefix + line + b"\n" for line in lines), is_error)

    def _prefix(self, rank: int) -> bytes:
        now = time.strftime("%Y-%m-%d %H:%M:%S ").encode() if self._has_time else b""
        return now + (f"[{self._names.label(rank)}] ".encode() if self._has_prefix else b"")


class RankFiles:
    """Files `rank.N/stdout` and `rank.N/stderr` in `folder` for all that rank N writes, N with zeros before it.

    They are there from the start, empty, whatever a former job has left. They end when one cannot be written.
    """

    def __init__(self, folder: Path, num_proc: int, say: Callable[[str], None]):
        """`say` is told if the files end. Raises OSError if they cannot be made."""
        self._width = len(str(num_proc - 1))
        self._folder = folder
        self._say = say
        self._files: dict[tuple[int, bool], FileIO] = {}
        self._has_ended = False
        for rank in range(num_proc):
            self._make(rank)

    def add(self, written: Written) -> None:
        if self._has_ended:
            return
        key = (written.rank, written.is_error)
        try:
            if key not in self._files:
                own = self._folder_of(written.rank)
                if not own.exists():  # of an elastic job more processes may come
                    self._make(written.rank)
                # unbuffered, for readers that follow the file
                self._files[key] = (own / _FILE_NAMES[written.is_error]).open("wb", buffering=0)
            write_all(self._files[key].fileno(), written.data)
        except OSError as error:
            self._has_ended = True
            self._say(f"the files in {self._folder} end here: {error.strerror}; the job goes on without them")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _folder_of(self, rank: int) -> Path:
        return self._folder / f"rank.{rank:0{self._width}}"

    def _make(self, rank: int) -> None:
        own = self._folder_of(rank)
        own.mkdir(parents=True, exist_ok=True)
        for name in _FILE_NAMES.values():
            (own / name).write_bytes(b"")


class LastLines:
    """The last lines that one rank has written to its standard error."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rows = Rows()

    def add(self, data: bytes) -> list[str]:
        """Returns the lines that `data` has ended."""
        lines = [line.decode(errors="replace") for line in self._rows.feed(data)]
        self._lines.extend(lines)
        return lines

    def all(self) -> list[str]:
        return [*self._lines, *(line.decode(errors="replace") for line in self._rows.rest())]
