"""The timeline: one file that shows what every rank does and when, for chrome://tracing and Perfetto.

Each rank writes its own part while the job runs, on one clock; `stop_timeline`, also called by shutdown(), brings the
parts together. `python -m ringtrain.timeline merge FILE` does that for a job that was killed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringtrain import _core, ops, world


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
    _core.start_timeline(str(_part(path, world.rank())), start_s, _limit_mb, mark_cycles)
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
    own = _part(path, world.rank())
    parts = _send_to_rank_0(own.read_bytes())
    if world.rank() == 0:
        _write_merged(path, parts)
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
        print(f"ringtrain: the parts of the timeline were not brought together: {error}", file=sys.stderr)


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


def _part(path: Path, rank: int) -> Path:
    """Where a rank writes while the job runs."""
    return path if rank == 0 else path.with_name(f"{path.name}.rank-{rank}")


def _send_to_rank_0(content: bytes) -> list[bytes]:
    """The contents of all ranks, on rank 0; nothing elsewhere."""
    splits = [len(content), *(0 for _ in range(world.size() - 1))]
    received, lengths = ops.alltoall(np.frombuffer(content, np.uint8), splits)
    if world.rank() != 0:
        return []
    ends = np.cumsum(lengths)
    return [received[end - length : end].tobytes() for length, end in zip(lengths, ends, strict=True)]


def _write_merged(path: Path, parts: Sequence[bytes]) -> None:
    """Write one file of all parts, at once, with a tick for each rank's arrival at each operation."""
    events = [event for part in parts for event in _events(part)]
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(event) for event in [*events, *_arrivals(events)]) + "\n]\n")
    os.replace(unfinished, path)


def _events(part: bytes) -> list[dict[str, Any]]:
    """The events of a part; without the last one if the rank was killed while it wrote that."""
    try:
        events: list[dict[str, Any]] = json.loads(part)
        return events
    except json.JSONDecodeError:
        lines = part.decode(errors="replace").splitlines()[1:]
        whole = (line.rstrip(",") for line in lines)
        return [json.loads(line) for line in whole if line.startswith("{") and line.endswith("}")]


def _arrivals(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A tick on rank 0 for the moment at which each rank had submitted each operation."""
    submitted: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and "name" in event.get("args", {}):
            submitted[event["pid"], event["args"]["name"]].append(event)
    ticks = []
    for (rank, name), of_rank in submitted.items():
        for own, first in zip(of_rank, submitted.get((0, name), []), strict=False):
            tick = {"name": f"rank {rank}", "ph": "i", "s": "t", "pid": 0, "tid": first["tid"], "ts": own["ts"]}
            ticks.append(tick)
    return ticks


def merge(path: Path) -> int:
    """Bring together the parts of a job that was killed. Returns how many there are; 1 is rank 0 alone.

    Raises:
        OSError: there is no such file.
    """
    others = sorted(path.parent.glob(f"{path.name}.rank-*"), key=lambda part: int(part.name.rpartition("-")[2]))
    _write_merged(path, [path.read_bytes(), *(part.read_bytes() for part in others)])
    for part in others:
        part.unlink()
    return 1 + len(others)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 0, or 2 if there is no such file."""
    parser = argparse.ArgumentParser(prog="python -m ringtrain.timeline", description="Work on timelines.")
    commands = parser.add_subparsers(dest="command", required=True)
    merging = commands.add_parser("merge", help="bring together the parts of a job that was killed")
    merging.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    try:
        print(f"{options.file} has {merge(options.file)} ranks")
    except OSError as error:
        print(f"python -m ringtrain.timeline: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
