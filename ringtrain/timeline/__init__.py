"""The timeline: one file that shows what every rank does and when, for chrome://tracing and Perfetto.

Each rank writes its own part while the job runs, on one clock; `stop_timeline`, also called by shutdown(), brings the
parts together. `python -m ringtrain.timeline merge FILE` does that for a job that was killed, and
`python -m ringtrain.timeline report FILE` says where the time of a step goes (docs/timeline.md).
"""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ringtrain import _core, ops, world
from ringtrain.log import say
from ringtrain.timeline.parts import part_of, write_merged


class _Window(NamedTuple):
    """The steps that are shown; both belong to it."""

    first: int
    last: float

    @classmethod
    def of(cls, text: str) -> _Window | None:
        """From "100-110" or "100"; None for nothing. Raises ValueError for anything else."""
        if not text:
            return None
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"timeline_steps must be steps such as 100-110, not {text}")
        return cls(int(match[1]), int(match[2] or match[1]))


_path: Path | None = None  # of the timeline under way
_waiting_for: tuple[_Window, str, bool] | None = None  # window, path and whether rounds are marked
_limit_mb = 256.0
_steps = 0


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write what this rank does from now on; all ranks call it together. Mirrors `horovod.start_timeline`.

    Args:
        file_path: the file of all ranks, written on rank 0. Until `stop_timeline` it has rank 0 only, and the others
            are beside it.
        mark_cycles: mark the rounds of the negotiation.

    Raises:
        NotInitializedError: before init().
        ValueError: there is a timeline already.
        RingtrainError: the file cannot be written; on some ranks only, but the next operation of all works.
    """
    global _path
    if _path is not None:
        raise ValueError(f"there is a timeline already, {_path}; call stop_timeline() first")
    start_s = _common_start()
    path = Path(file_path)
    _core.start_timeline(str(part_of(path, world.rank())), start_s, _limit_mb, mark_cycles)
    _path = path


def stop_timeline() -> None:
    """End the timeline and bring the parts of all ranks together; all ranks call it together. As in Horovod.

    Does nothing where there is no timeline.

    Raises:
        RingtrainError: another rank is gone; the parts stay as they are.
    """
    global _path, _waiting_for
    _waiting_for = None
    if _path is None:
        return
    path, _path = _path, None
    _core.stop_timeline()
    own = part_of(path, world.rank())
    parts = _send_to_rank_0(own.read_bytes())
    if world.rank() == 0:
        write_merged(path, parts)
    else:
        own.unlink()


def _begin(settings: dict[str, str]) -> None:
    """At init(). Raises ValueError for steps that are none."""
    global _waiting_for, _limit_mb, _steps
    window = _Window.of(settings["timeline_steps"])
    _limit_mb, _steps = float(settings["timeline_limit_mb"]), 0
    file_path, mark_cycles = settings["timeline_filename"], settings["timeline_mark_cycles"] == "on"
    if file_path and window is not None:
        _waiting_for = window, file_path, mark_cycles
    elif file_path:
        start_timeline(file_path, mark_cycles)


def _end() -> None:
    """At shutdown(): with the other ranks, if they are still there."""
    try:
        stop_timeline()
    except RuntimeError as error:
        say(f"the parts of the timeline were not brought together: {error}")


def next_step() -> None:
    """Called by the optimizers at the beginning of each step, on all ranks alike."""
    global _steps, _waiting_for
    _steps += 1
    if _waiting_for is not None:
        window, file_path, mark_cycles = _waiting_for
        if _steps == window.first:
            start_timeline(file_path, mark_cycles)
        elif _steps > window.last:
            stop_timeline()
    if _path is not None:
        _core.mark(f"step {_steps}")


world.at_init(_begin)
world.at_shutdown(_end)

# --------------------------------------------------------------------------------------------------------- one clock


def _common_start(rounds: int = 8) -> float:
    """A moment of the near past, the same on all ranks, on this rank's time.monotonic().

    All ranks leave a barrier at nearly the same time; of several barriers the fastest tells best. Ranks of rank 0's
    host have its clock.
    """
    times = []
    for _ in range(rounds):
        before = time.monotonic()
        ops.barrier()
        times.append((before, time.monotonic()))
    of_all = ops.allgather(np.array([times])).reshape(world.size(), rounds, 2)
    hosts = ops.allgather(np.frombuffer(socket.gethostname().encode().ljust(256)[:256], np.uint8).reshape(1, 256))
    own, first = of_all[world.rank()], of_all[0]
    start = float(first[-1, 1])
    if (hosts[world.rank()] == hosts[0]).all():
        return start
    fastest = np.argmin((own[:, 1] - own[:, 0]) + (first[:, 1] - first[:, 0]))
    return start + float(own[fastest, 1] - first[fastest, 1])


# ----------------------------------------------------------------------------------------------------------- one file


def _send_to_rank_0(content: bytes) -> list[bytes]:
    """The contents of all ranks, on rank 0; nothing elsewhere."""
    splits = [len(content), *(0 for _ in range(world.size() - 1))]
    received, lengths = ops.alltoall(np.frombuffer(content, np.uint8), splits)
    if world.rank() != 0:
        return []
    ends = np.cumsum(lengths)
    return [received[end - length : end].tobytes() for length, end in zip(lengths, ends, strict=True)]
