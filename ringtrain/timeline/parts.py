"""The parts of a timeline, one file of each rank, and the one file that is made of them."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def part_of(path: Path, rank: int) -> Path:
    """Where a rank writes while the job runs."""
    return path if rank == 0 else path.with_name(f"{path.name}.rank-{rank}")


def write_merged(path: Path, parts: Sequence[bytes]) -> None:
    """Write one file of all parts, at once, with a tick for each rank's arrival at each operation."""
    events = [event for part in parts for event in events_of(part)]
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(event) for event in [*events, *_arrivals(events)]) + "\n]\n")
    os.replace(unfinished, path)


def events_of(part: bytes) -> list[dict[str, Any]]:
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


def other_parts(path: Path) -> list[Path]:
    """What the ranks from 1 on have written beside the file of rank 0; nothing once all is brought together."""
    return sorted(path.parent.glob(f"{path.name}.rank-*"), key=lambda part: int(part.name.rpartition("-")[2]))


def merge(path: Path) -> int:
    """Bring together the parts of a job that was killed. Returns how many there are; 1 is rank 0 alone.

    Raises:
        OSError: there is no such file.
    """
    others = other_parts(path)
    write_merged(path, [path.read_bytes(), *(part.read_bytes() for part in others)])
    for part in others:
        part.unlink()
    return 1 + len(others)
