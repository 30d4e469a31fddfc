"""The screen of ringrun: lines and, below them on a terminal, the rows of the ranks that still change."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

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
            write_all((sys.stderr if is_error else sys.stdout).fileno(), data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._is_dropped[is_error] = True
            name = "error" if is_error else "output"
            sentence = f"{self._speaker}: standard {name} ends here: {error.strerror}; the job goes on\n"
            self.print(sentence.encode(), not is_error)


def print_to_python(data: bytes, is_error: bool) -> None:
    """For notebooks, whose sys.stdout is no file."""
    stream = sys.stderr if is_error else sys.stdout
    stream.write(data.decode(errors="replace"))
    stream.flush()


def terminal() -> Surface | None:
    """That of standard error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            size = os.get_terminal_size(sys.stderr.fileno())
            return Surface(size.columns or 80, size.lines or 24, has_cursor=True)
    return None


def terminal_or_notebook() -> Surface | None:
    """A notebook knows carriage returns and nothing else."""
    return Surface(100, 1, has_cursor=False) if "ipykernel" in sys.modules else terminal()


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
