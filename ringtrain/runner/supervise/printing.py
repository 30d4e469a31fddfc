"""Where ringrun's output goes: descriptors, or a notebook; and whether what is there can be painted over."""

from __future__ import annotations

import contextlib
import os
import select
import sys
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
