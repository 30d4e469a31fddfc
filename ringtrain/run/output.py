"""What the ranks write, line by line: to this process's own output, to a file for each rank, and kept for a report."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from ringtrain.run.frames import Written

_KEPT_LINES = 60

Print = Callable[[bytes, bool], None]
"""Takes bytes, and whether they are for standard error."""


def print_to_descriptors(data: bytes, is_error: bool) -> None:
    stream = sys.stderr.buffer if is_error else sys.stdout.buffer
    stream.write(data)
    stream.flush()


def print_to_python(data: bytes, is_error: bool) -> None:
    """For notebooks, whose sys.stdout is no file."""
    stream = sys.stderr if is_error else sys.stdout
    stream.write(data.decode(errors="replace"))
    stream.flush()


def _whole_lines(data: bytes) -> list[bytes]:
    """The lines that have an end; progress bars end theirs with a carriage return."""
    lines = data.splitlines(keepends=True)
    return lines if data.endswith((b"\n", b"\r")) else lines[:-1]


class LineSplitter:
    """Puts the lines of each rank and stream together from the parts in which they come."""

    def __init__(self) -> None:
        self._rests: dict[tuple[int, bool], bytes] = {}

    def add(self, written: Written) -> Written:
        """What has become whole lines."""
        key = (written.rank, written.is_error)
        data = self._rests.pop(key, b"") + written.data
        lines = b"".join(_whole_lines(data))
        if len(lines) < len(data):
            self._rests[key] = data[len(lines) :]
        return written._replace(data=lines)

    def close(self) -> list[Written]:
        """The lines that have no end, ended."""
        rests, self._rests = self._rests, {}
        return [Written(*key, rest + b"\n") for key, rest in sorted(rests.items())]


class Output:
    """Everything that the ranks write: printed through `write` and, if there are files, put there as well.

    Lines are printed whole, each with its rank before it if `has_prefix`. A single rank without prefix is printed as it
    comes, so that a prompt is seen before its line ends.
    """

    def __init__(self, write: Print, has_prefix: bool, num_proc: int, files: RankFiles | None = None):
        self._write = write
        self._has_prefix = has_prefix
        self._is_direct = num_proc == 1 and not has_prefix
        self._files = files
        self._splitter = LineSplitter()

    def add(self, written: Written) -> None:
        if self._is_direct:
            self._write(written.data, written.is_error)
        self._add_lines(self._splitter.add(written))

    def flush(self) -> None:
        """Treat what has no end as lines."""
        for rest in self._splitter.close():
            self._add_lines(rest)

    def _add_lines(self, lines: Written) -> None:
        if not lines.data:
            return
        if self._files is not None:
            self._files.add(lines)
        if not self._is_direct:
            prefix = b"[%d] " % lines.rank if self._has_prefix else b""
            self._write(b"".join(prefix + line for line in _whole_lines(lines.data)), lines.is_error)


class RankFiles:
    """A file `rank.N` for each rank in `folder`, with all that it writes."""

    def __init__(self, folder: Path):
        """Raises OSError if the folder cannot be made."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[int, FileIO] = {}

    def add(self, written: Written) -> None:
        if written.rank not in self._files:
            # unbuffered, for whoever follows the file
            self._files[written.rank] = (self._folder / f"rank.{written.rank}").open("wb", buffering=0)
        self._files[written.rank].write(written.data)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class LastLines:
    """The last lines that one rank has written to its standard error."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest = b""

    def add(self, data: bytes) -> list[str]:
        """Returns the lines that `data` has ended."""
        *ended, self._rest = (self._rest + data).split(b"\n")
        lines = [line.rpartition(b"\r")[2].decode(errors="replace") for line in ended]
        self._lines.extend(lines)
        return lines

    def all(self) -> list[str]:
        rest = [self._rest.decode(errors="replace")] if self._rest else []
        return [*self._lines, *rest]
