"""The parts of a timeline, one file of each rank, with an event on each line; and the one file made of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

# --- the parts --------------------------------------------------------------------------------------------------------


class TraceError(ValueError):
    """The file tells nothing of steps of several ranks; the message says why, in one sentence."""


def no_timeline(path: Path) -> TraceError:
    """The error for a file that ringtrain has not written."""
    return TraceError(f"{path} is not a timeline of ringtrain: those have one event on each line")


def is_empty(path: Path) -> TraceError:
    """The error for a file in which no rank has written."""
    return TraceError(f"{path} is empty: the job has ended, or was killed, before it wrote anything")


def part_of(path: Path, rank: int) -> Path:
    """Names the file of a rank while the job runs."""
    return path if rank == 0 else path.with_name(f"{path.name}.rank-{rank}")


# Servers of key-value stores are not ranks; where they are processes of their own, they have numbers from here on.
FIRST_SERVER = 1 << 20


def part_of_server(path: Path, server: int) -> Path:
    """Names the file of a server of key-value stores that is a process of its own."""
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
    import glob  # slow, and a rank without a timeline does not need it

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
        TraceError: it is not a timeline.
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


# --- merging: one file of the parts of all ranks ----------------------------------------------------------------------

# One event after the other is read and written: the parts may be larger than the memory.


# No rank has more tracks (csrc/record/timeline.cc). Names that come later share one, where ticks would tell nothing.
_MOST_TRACKS = 4096
# When a part begins, on the clock on the wall.
_START = "start_time_since_epoch_in_micros"


def merge(path: Path) -> int:
    """Bring together the parts of a job that was killed, and add those of servers of key-value stores.

    A file that has several ranks already gets no more of them.

    Returns:
        How many ranks the file has then.

    Raises:
        OSError: there is no such file, or no place for the one that would be made.
        TraceError: it is empty or no timeline, or one of its parts is none; all of them stay as they are.
    """
    others, servers = other_parts(path), parts_of_servers(path)
    if not others and not servers and not _is_cut(path):
        return len(ranks_of(path))
    own: set[int] = set()
    of_others: set[int] = set()

    def parts() -> Iterator[Iterator[bytes]]:
        yield _checked(path, own)
        if len(own) == 1:
            yield from (_checked(part, of_others) for part in others)
        yield from (_on_clock_of(path, part) for part in servers)

    with unfinished(path) as whole:
        write_merged(whole, parts())
        if not own:
            raise is_empty(path)
        if len(own) > 1:
            others = []
        if len(own) > 1 and not servers:
            return len(own)
        os.replace(whole, path)
    for part in [*others, *servers]:
        part.unlink()
    return len(own | of_others)


def ranks_of(path: Path) -> set[int]:
    """The ranks that have written to this file.

    Raises:
        OSError: there is no such file.
        TraceError: it is empty or no timeline.
    """
    ranks: set[int] = set()
    for _ in _checked(path, ranks):
        pass
    if not ranks:
        raise is_empty(path)
    return ranks


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yields a file beside `path`, to be renamed to it at once; removes it if it still exists at the end."""
    beside = path.with_name(path.name + ".unfinished")
    try:
        yield beside
    finally:
        beside.unlink(missing_ok=True)


def write_merged(path: Path, parts: Iterable[Iterable[bytes]]) -> None:
    """Write the events of all parts, that of rank 0 first, and a tick before each operation for when it was submitted.

    Args:
        parts: the events of each part as text, as `events_in` gives them. They are taken one by one.

    Raises OSError.
    """
    arrivals = _Arrivals()
    between = b"\n"
    with open(path, "wb") as file:
        file.write(b"[")
        for event in itertools.chain.from_iterable(parts):
            if b'"args":' in event:  # most have none, and need not be parsed
                file.write(between + arrivals.tick_for(event) + event)
            else:
                file.write(between + event)
            between = b",\n"
        file.write(b"\n]\n")


class _Arrivals:
    """Makes the ticks, which stand on the tracks of rank 0. Knows how often each name was submitted, and no more."""

    def __init__(self) -> None:
        self._tracks: dict[tuple[int, str], int] = {}  # of rank 0, by process set and name
        self._of_rank_0: Counter[tuple[int, str]] = Counter()
        self._rank = 0
        self._of_rank: Counter[tuple[int, str]] = self._of_rank_0  # the one whose part is being read

    def tick_for(self, text: bytes) -> bytes:
        """The line of a tick for this event, or nothing if it is not an operation, or none that rank 0 has, too."""
        event = json.loads(text)
        if event["ph"] != "X":
            return b""
        operation = _operation_of(event)
        if event["pid"] != self._rank:
            self._rank, self._of_rank = event["pid"], Counter()
        if self._rank == 0 and len(self._tracks) < _MOST_TRACKS:
            self._tracks.setdefault(operation, event["tid"])
        if operation not in self._tracks:
            return b""
        self._of_rank[operation] += 1
        if self._of_rank[operation] > self._of_rank_0[operation]:
            return b""
        place = f'"pid":0,"tid":{self._tracks[operation]},"ts":{event["ts"]}'
        return f'{{"name":"rank {self._rank}","ph":"i","s":"t",{place}}},\n'.encode()


def _operation_of(event: dict[str, Any]) -> tuple[int, str]:
    """Process set and name of the operation, by which the ranks know it."""
    return event["args"]["process_set"], event["args"]["name"]


def _checked(part: Path, ranks: set[int]) -> Iterator[bytes]:
    """The events of a part as text. Adds to `ranks` who has written them."""
    for text, event in read_events(part):
        try:
            if event["pid"] < FIRST_SERVER:
                ranks.add(event["pid"])
            if event["ph"] == "X" and "args" in event:
                _operation_of(event)
        except (KeyError, TypeError):
            raise no_timeline(part) from None
        yield text


def _on_clock_of(path: Path, part: Path) -> Iterator[bytes]:
    """The events of a server's part with times as in the file of rank 0, as far as the hosts' clocks agree."""
    later_us = 0
    for _, event in read_events(part):
        try:
            if event["name"] == "process_name":
                later_us = _start_us(event) - _start_of(path)
                event["args"][_START] -= later_us
            elif "ts" in event:
                event["ts"] = round(event["ts"] + later_us, 3)
        except (KeyError, TypeError):
            raise no_timeline(part) from None
        yield json.dumps(event, separators=(",", ":")).encode()


def _start_of(path: Path) -> int:
    for _, event in read_events(path):
        if event.get("name") == "process_name":
            return _start_us(event)
    raise is_empty(path)


def _start_us(event: dict[str, Any]) -> int:
    return int(event["args"][_START])


def _is_cut(path: Path) -> bool:
    """Whether the rank was killed while it wrote, so that viewers could not read the end."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 16))
        return not file.read().rstrip().endswith(b"]")
