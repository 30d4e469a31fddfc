"""The parts of a timeline, one file of each rank, and the one file that is made of them."""

from __future__ import annotations

import glob
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
    except ValueError:  # no JSON, or no UTF-8 where a letter was cut
        lines = part.decode(errors="replace").split("\n")[1:]
        return [event for line in lines if (event := _event_in(line)) is not None]


def _event_in(line: str) -> dict[str, Any] | None:
    try:
        event: dict[str, Any] = json.loads(line.rstrip(","))
        return event
    except json.JSONDecodeError:
        return None


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
    beginning = f"{path.name}.rank-"
    found = path.parent.glob(glob.escape(beginning) + "*")
    parts = {part.name.removeprefix(beginning): part for part in found}
    return [parts[rank] for rank in sorted(filter(str.isdecimal, parts), key=int)]
