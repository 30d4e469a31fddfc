"""Begins and ends the timeline.

Each rank writes its own part while the job runs, on one clock; `stop_timeline`, also called by shutdown(), brings the
parts together. `python -m ringtrain.timeline merge FILE` does that for a job that was killed, and
`python -m ringtrain.timeline report FILE` says where the time of a step goes (docs/timeline.md).
"""

from __future__ import annotations

import itertools
import os
import stat
import time
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import ringtrain._core as _core
from ringtrain import ops
from ringtrain.errors import RingtrainError
from ringtrain.job import elastic_client, session
from ringtrain.ops import objects
from ringtrain.record import steps
from ringtrain.record.logger import logger
from ringtrain.record.timeline_files import events_in, other_parts, part_of, unfinished, write_merged

if TYPE_CHECKING:
    from pathlib import Path

# --- whether the file can be written ----------------------------------------------------------------------------------


def check(path: Path, given_as: str) -> None:
    """Whether this rank can have a file there; `given_as` is the option or argument that the message names.

    Raises:
        RingtrainError: there is something that is not a file, or the folder is not there or may not be written to.
    """
    folder = path.absolute().parent
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise RingtrainError(f"{given_as} must be a file, but {path} is {what}")
    if not os.path.isdir(folder):
        raise RingtrainError(f"{given_as} is {path}, but there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RingtrainError(f"{given_as} is {path}, but the folder {folder} may not be written to")


def _mode(path: Path) -> int | None:
    """One look, since another rank may remove an earlier timeline meanwhile; None where nothing is to be seen."""
    try:
        return os.stat(path).st_mode
    except OSError:
        return None


def clear(path: Path, given_as: str) -> None:
    """Remove the file and all parts of an earlier timeline, which may have had more ranks.

    Ranks may have one disk, so this comes before any rank writes.

    Raises:
        RingtrainError: one of them cannot be removed.
    """
    for file in [path, *other_parts(path)]:
        try:
            file.unlink(missing_ok=True)  # another rank may be faster
        except OSError as error:
            raise RingtrainError(
                f"{given_as} is {path}, but {file} of an earlier timeline cannot be removed: {error.strerror}"
            ) from error


# --- the files of all ranks -------------------------------------------------------------------------------------------


_PIECE_BYTES = 4 << 20


def bring_together(path: Path) -> None:
    """Make one file of the parts of all ranks, at `path` on rank 0, and remove the others. All ranks call it together.

    Raises:
        RingtrainError: rank 0 cannot write it, which all ranks are told, or another rank is gone; the parts stay as
            they are.
    """
    own = part_of(path, session.rank())
    own_bytes = own.stat().st_size if session.rank() > 0 and own.exists() else 0
    pieces = _pieces_of_others(own, ops.allgather(np.array([own_bytes])))
    problem = None
    if session.rank() == 0:
        try:
            _write(path, pieces)
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or str(error)
    for _ in pieces:  # also where rank 0 has given up: the others send all that they have
        pass
    problem = objects.broadcast_object(problem)
    if problem is not None:
        raise RingtrainError(f"rank 0 cannot make one file of the parts of {path}, which stay as they are: {problem}")
    if session.rank() != 0:
        own.unlink(missing_ok=True)  # rank 0 may have begun the next timeline


def _write(path: Path, pieces: Iterator[tuple[int, bytes]]) -> None:
    with unfinished(path) as whole, open(path, "rb") as own:
        others = (events_in(_lines(piece for _, piece in part)) for _, part in itertools.groupby(pieces, itemgetter(0)))
        write_merged(whole, itertools.chain([events_in(own)], others))
        os.replace(whole, path)


def _pieces_of_others(own: Path, lengths: Any) -> Iterator[tuple[int, bytes]]:
    """The parts of all ranks, laid end to end: on rank 0 pieces of them and whose they are, in order.

    Nothing comes on the other ranks, which send in the meantime. So all of them have to ask until the end.

    Args:
        lengths: how many bytes each rank sends; rank 0 none, since its part is there.
    """
    rank, size = session.rank(), session.size()
    first, end = int(lengths[:rank].sum()), int(lengths[: rank + 1].sum())
    with open(own if first < end else os.devnull, "rb") as file:
        for begin in range(0, int(lengths.sum()), _PIECE_BYTES):
            of_own = range(max(begin, first), min(begin + _PIECE_BYTES, end))
            sent = np.frombuffer(file.read(len(of_own)), np.uint8)
            received, counts = ops.alltoall(sent, [sent.size] + [0] * (size - 1))
            place = 0
            for sender in np.flatnonzero(counts):
                yield int(sender), received[place : place + counts[sender]].tobytes()
                place += counts[sender]


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    yield rest


# --- start and stop ---------------------------------------------------------------------------------------------------


class _Window(NamedTuple):
    """The steps that are shown, both ends included, and how. Steps count from 1."""

    text: str  # as timeline_steps has it
    first: int
    last: int
    file_path: str
    mark_cycles: bool


_path: Path | None = None  # of the timeline under way
_window: _Window | None = None  # until its last step has ended
_is_in_window = False  # from its first step on
_limit_mb = 256.0


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write what this rank does from now on; all ranks call it together. Mirrors `horovod.start_timeline`.

    Args:
        file_path: the file of all ranks, written on rank 0. Until `stop_timeline` it has rank 0 only, and the others
            are beside it. Files of an earlier timeline are removed there.
        mark_cycles: mark the rounds of the negotiation.

    Raises:
        NotInitializedError: before init().
        ValueError: there is a timeline already.
        RingtrainError: the file cannot be written; on some ranks only, but the next operation of all works.
    """
    _start(file_path, mark_cycles, "file_path")


def _start(file_path: str, mark_cycles: bool, given_as: str) -> None:
    global _path
    if _path is not None:
        raise ValueError(f"there is a timeline already, {_path}; call stop_timeline() first")
    session.rank()  # before init() no file is removed
    path = _as_path(file_path)
    problem = None
    try:
        check(path, given_as)
        clear(path, given_as)
    except RingtrainError as error:
        problem = error  # after the common start, for which the other ranks wait
    start_s = _common_start()
    if problem is not None:
        raise problem
    _core.start_timeline(str(part_of(path, session.rank())), start_s, _limit_mb, mark_cycles)
    _path = path
    seat = elastic_client.seat()
    if seat is not None:
        _core.mark(f"generation {seat.generation}: {seat.size} ranks")


def stop_timeline() -> None:
    """End the timeline and bring the parts of all ranks together; all ranks call it together. As in Horovod.

    Does nothing where there is no timeline.

    Raises:
        RingtrainError: rank 0 cannot write the file, which all ranks are told, or another rank is gone; the parts stay
            as they are.
    """
    global _path, _window, _is_in_window
    _window, _is_in_window = None, False
    if _path is None:
        return
    path, _path = _path, None
    _core.stop_timeline()
    bring_together(path)


def _begin(settings: dict[str, str]) -> None:
    """At init(). Raises RingtrainError where the file cannot be written."""
    global _window, _limit_mb
    _limit_mb, _window = float(settings["timeline_limit_mb"]), None
    steps.set_count(0)
    file_path, mark_cycles = _path_of_generation(settings), settings["timeline_mark_cycles"] == "on"
    shown = settings["timeline_steps"]
    if file_path and shown:
        check(_as_path(file_path), "timeline_filename")
        first, _, last = shown.partition("-")
        _window = _Window(shown, max(int(first), 1), int(last or first), file_path, mark_cycles)
    elif file_path:
        _start(file_path, mark_cycles, "timeline_filename")
    elif shown and session.rank() == 0:
        logger.warning("timeline_steps has no effect without timeline_filename, the file to write")


def _path_of_generation(settings: dict[str, str]) -> str:
    """An elastic job has a file for each generation, which says so: t.json, t.generation-2.json, ..."""
    file_path, seat = settings["timeline_filename"], elastic_client.seat()
    if not file_path or seat is None or seat.generation == 1:
        return file_path
    path, suffix = os.path.splitext(file_path)
    return f"{path}.generation-{seat.generation}{suffix}"


def _as_path(file_path: str) -> Path:
    from pathlib import Path  # slow, and a job without a timeline does not need it

    return Path(file_path)


def _end() -> None:
    """At shutdown(): with the other ranks, if they are still there."""
    if _window is not None and not _is_in_window and session.rank() == 0:
        made = "1 step" if steps.count() == 1 else f"{steps.count()} steps"
        joined = (
            "; ranks had joined in those of the window" if _window.first <= min(steps.count(), _window.last) else ""
        )
        sentence = f"timeline_steps is {_window.text}, and the optimizers made {made}{joined}"
        logger.warning("%s was not written: %s", _window.file_path, sentence)
    try:
        stop_timeline()
    except RuntimeError as error:
        logger.error("the parts of the timeline were not brought together: %s", error)


def _note_step(is_of_all: bool) -> None:
    """A window begins and ends in steps that all ranks take, and in which none has joined."""
    if is_of_all:
        _enter_window()
    if _path is not None:
        _core.mark(f"step {steps.count()}")
    if is_of_all:
        _leave_window()  # behind the mark that ends the last step


def count_on_from(step: int) -> None:
    """Called by all ranks together after some of them have taken fewer steps than others."""
    steps.set_count(step)
    _leave_window()


def _enter_window() -> None:
    global _is_in_window
    if _window is not None and not _is_in_window and _window.first <= steps.count() <= _window.last:
        _is_in_window = True
        _start(_window.file_path, _window.mark_cycles, "timeline_filename")


def _leave_window() -> None:
    if _window is not None and _is_in_window and steps.count() > _window.last:
        stop_timeline()


session.at_init(_begin)
steps.at_begin(_note_step)
session.at_shutdown(_end)

# --------------------------------------------------------------------------------------------------------- one clock


def _common_start(rounds: int = 8) -> float:
    """A moment of the near past, the same on all ranks, on this rank's time.monotonic().

    All ranks leave a barrier at nearly the same time; of several barriers the fastest tells best. Ranks of rank 0's
    node have its clock.
    """
    times = []
    for _ in range(rounds):
        before = time.monotonic()
        ops.barrier()
        times.append((before, time.monotonic()))
    of_all = ops.allgather(np.array([times])).reshape(session.size(), rounds, 2)
    own, first = of_all[session.rank()], of_all[0]
    start = float(first[-1, 1])
    if session.is_on_node_of(0):
        return start
    fastest = np.argmin((own[:, 1] - own[:, 0]) + (first[:, 1] - first[:, 0]))
    return start + float(own[fastest, 1] - first[fastest, 1])
