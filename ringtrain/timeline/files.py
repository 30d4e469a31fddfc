"""The parts of a timeline, one file of each rank: where they are, and the events in them, one on each line."""

from __future__ import annotations

import glob
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class TraceError(ValueError):
    """The file tells nothing of steps of several ranks; the message says why, in one sentence."""


def no_timeline(path: Path) -> TraceError:
    """The error for a file that ringtrain has not written."""
    return TraceError(f"{path} is no timeline of ringtrain: those have one event on each line")


def is_empty(path: Path) -> TraceError:
    """The error for a file in which no rank has written."""
    return TraceError(f"{path} is empty: the job has ended, or was killed, before it wrote anything")


def part_of(path: Path, rank: int) -> Path:
    """Where a rank writes while the job runs."""
    return path if rank == 0 else path.with_name(f"{path.name}.rank-{rank}")


# Servers of key-value stores are no ranks; where they are processes of their own, they have numbers from here on.
FIRST_SERVER = 1 << 20


def part_of_server(path: Path, server: int) -> Path:
    """Where a server of key-value stores writes that is a process of its own."""
    return path.with_name(f"{path.name}.server-{server}")


def parts_of_servers(path: Path) -> list[Path]:
    """Returns the files that such servers have written beside the file of rank 0."""
    return _numbered(path, "server")


def is_of_store(event: dict[str, Any]) -> bool:
    """Whether this is what happened to a key of a store, and no operation of ranks or a part of one."""
    return event.get("cat") == "kvstore" or event.get("pid", 0) >= FIRST_SERVER


def other_parts(path: Path) -> list[Path]:
    """Returns the files of the ranks from 1 on beside the file of rank 0; none once all is merged."""
    return _numbered(path, "rank")


def _numbered(path: Path, kind: str) -> list[Path]:
    beginning = f"{path.name}.{kind}-"
    found = path.parent.glob(glob.escape(beginning) + "*")
    parts = {part.name.removeprefix(beginning): part for part in found}
    return [parts[number] for number in sorted(filter(str.isdecimal, parts), key=int)]


def events_in(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The events in the lines of a part, still as text, without the brackets around them and the commas between them.

    A rank that was killed while it wrote may have cut the last one anywhere; then that is left out.
    """
    last = b""
    for line in itertools.islice(lines, 1, None):  # behind the bracket
        event = line.strip().rstrip(b",")
        if event in (b"", b"]"):
            continue
        if last:
            yield last
        last = event
    if last and _is_whole(last):
        yield last


def read_events(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The events of a part or of a whole timeline, each as text and as what that says.

    Raises:
        OSError: there is no such file.
        TraceError: it is no timeline.
    """
    with open(path, "rb") as file:
        if file.readline().strip() not in (b"[", b""):
            raise no_timeline(path)
        file.seek(0)
        for text in events_in(file):
            try:
                event = json.loads(text)
            except ValueError:
                raise no_timeline(path) from None
            if not isinstance(event, dict):
                raise no_timeline(path)
            yield text, event


def _is_whole(event: bytes) -> bool:
    try:
        json.loads(event)
    except ValueError:  # no JSON, or no UTF-8 where a letter was cut
        return False
    return True
