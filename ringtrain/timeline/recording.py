"""The timeline: one file that shows what every rank does and when, for chrome://tracing and Perfetto.

Each rank writes its own part while the job runs, on one clock; `stop_timeline`, also called by shutdown(), brings the
parts together. `python -m ringtrain.timeline merge FILE` does that for a job that was killed, and
`python -m ringtrain.timeline report FILE` says where the time of a step goes (docs/timeline.md).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import ringtrain._core as _core
from ringtrain import ops
from ringtrain.errors import RingtrainError
from ringtrain.job import elastic, session
from ringtrain.record.logger import logger
from ringtrain.timeline import file_checks
from ringtrain.timeline.files import part_of
from ringtrain.timeline.gather import bring_together


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
_steps = 0


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write what this rank does from now on; all ranks call it together. Mirrors `horovod.start_timeline`.

    Args:
        file_path: the file of all ranks, written on rank 0. Until `stop_timeline` it has rank 0 only, and the others
            are beside it. What an earlier timeline has left there is removed.
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
    path = Path(file_path)
    problem = None
    try:
        file_checks.check(path, given_as)
        file_checks.clear(path, given_as)
    except RingtrainError as error:
        problem = error  # after the common start, for which the other ranks wait
    start_s = _common_start()
    if problem is not None:
        raise problem
    _core.start_timeline(str(part_of(path, session.rank())), start_s, _limit_mb, mark_cycles)
    _path = path
    seat = elastic.seat()
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
    global _window, _limit_mb, _steps
    _limit_mb, _steps, _window = float(settings["timeline_limit_mb"]), 0, None
    file_path, mark_cycles = _path_of_generation(settings), settings["timeline_mark_cycles"] == "on"
    steps = settings["timeline_steps"]
    if file_path and steps:
        file_checks.check(Path(file_path), "timeline_filename")
        first, _, last = steps.partition("-")
        _window = _Window(steps, max(int(first), 1), int(last or first), file_path, mark_cycles)
    elif file_path:
        _start(file_path, mark_cycles, "timeline_filename")
    elif steps and session.rank() == 0:
        logger.warning("timeline_steps has no effect without timeline_filename, the file to write")


def _path_of_generation(settings: dict[str, str]) -> str:
    """An elastic job has a file for each generation, which says so: t.json, t.generation-2.json, ..."""
    file_path, seat = settings["timeline_filename"], elastic.seat()
    if not file_path or seat is None or seat.generation == 1:
        return file_path
    path = Path(file_path)
    return str(path.with_name(f"{path.stem}.generation-{seat.generation}{path.suffix}"))


def _end() -> None:
    """At shutdown(): with the other ranks, if they are still there."""
    if _window is not None and not _is_in_window and session.rank() == 0:
        made = "1 step" if _steps == 1 else f"{_steps} steps"
        joined = "; ranks had joined in those of the window" if _window.first <= min(_steps, _window.last) else ""
        sentence = f"timeline_steps is {_window.text}, and the optimizers made {made}{joined}"
        logger.warning("%s was not written: %s", _window.file_path, sentence)
    try:
        stop_timeline()
    except RuntimeError as error:
        logger.error("the parts of the timeline were not brought together: %s", error)


def steps() -> int:
    """How many steps the optimizers have begun."""
    return _steps


def next_step(is_of_all: bool = True) -> None:
    """Called by the optimizers at the beginning of each step, on all ranks alike.

    Args:
        is_of_all: whether all ranks take this step, and none has joined. A window begins and ends in such steps.
    """
    global _steps
    _steps += 1
    if is_of_all:
        _enter_window()
    if _path is not None:
        _core.mark(f"step {_steps}")
    if is_of_all:
        _leave_window()  # behind the mark that ends the last step


def count_on_from(steps: int) -> None:
    """Called by all ranks together after some of them have taken fewer steps than others."""
    global _steps
    _steps = steps
    _leave_window()


def _enter_window() -> None:
    global _is_in_window
    if _window is not None and not _is_in_window and _window.first <= _steps <= _window.last:
        _is_in_window = True
        _start(_window.file_path, _window.mark_cycles, "timeline_filename")


def _leave_window() -> None:
    if _window is not None and _is_in_window and _steps > _window.last:
        stop_timeline()


session.at_init(_begin)
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
