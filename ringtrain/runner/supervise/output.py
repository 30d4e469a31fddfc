"""What the ranks write, line by line: to this process's own output, to a file for each rank, and kept for a report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from ringtrain.runner.supervise.frames import Written
from ringtrain.runner.supervise.names import RANKS, Names
from ringtrain.runner.supervise.printing import write_all
from ringtrain.runner.supervise.progress_bars import Rows
from ringtrain.runner.supervise.screen import Screen

_KEPT_LINES = 60
# A cursor that has left a progress bar comes back within this time, or not at all.
_SETTLED_S = 0.1
# by whether it is standard error
_FILE_NAMES = {False: "stdout", True: "stderr"}


class _Stream:
    """What one rank has written to one of its streams."""

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
                # unbuffered, for whoever follows the file
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
