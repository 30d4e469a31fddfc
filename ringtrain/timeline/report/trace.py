"""Read the file of a timeline: the operations, waits and steps of each rank.

Times are whole nanoseconds since the beginning of the timeline, so that shares of a step add up exactly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtrain.timeline.files import TraceError, is_empty, is_of_store, no_timeline, other_parts, read_events

_BEFORE_A_GROUP = re.compile("queued|NEGOTIATE_.*|ready")
_SCRIPT = 0  # the track of waits and marks


@dataclass(slots=True, eq=False)
class Operation:
    """One operation on one rank. A Group carries it out from `begun_ns` to `ended_ns`."""

    rank: int
    kind: str
    name: str
    bytes: int
    process_set: int
    site: str
    submitted_ns: int
    ended_ns: int
    begun_ns: int
    all_submitted_ns: int = 0  # known once the operations of all ranks have met: see matching.py
    last_rank: int = 0


@dataclass
class RankTrace:
    """The part of a file that one rank has written. `steps`: when each step began, by its number."""

    rank: int
    host: str = ""
    operations: list[Operation] = field(default_factory=list)
    waits: list[tuple[int, int]] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)


@dataclass
class Trace:
    """The ranks in order, the steps that all of them have from beginning to end, and what the reader should know."""

    ranks: list[RankTrace]
    steps: list[int]
    notes: list[str]


def read(path: Path) -> Trace:
    """Read a file that `stop_timeline` or the command `merge` has written, or the parts of a job that was killed.

    Raises:
        OSError: there is no such file.
        TraceError: it is no timeline, or one without steps, or of one rank.
    """
    reader = _Reader()
    reader.read(path)
    others = other_parts(path) if len(reader.ranks) == 1 else []
    for part in others:
        reader.read(part)
    ranks = [reader.ranks[rank] for rank in sorted(reader.ranks)]
    if not ranks:
        raise is_empty(path)
    if len(ranks) == 1:
        raise TraceError(f"{path} has one rank only, number {ranks[0].rank}: it communicates with nobody")
    if others:
        reader.note("The job was killed, or is still running: this was read from what each rank had written by then.")
    return Trace(ranks, _steps_of_all(path, ranks), reader.notes)


def _steps_of_all(path: Path, ranks: list[RankTrace]) -> list[int]:
    common = set.intersection(*(set(rank.steps) for rank in ranks))
    steps = sorted(number for number in common if number + 1 in common)
    if not steps:
        raise TraceError(
            f"{path} has no whole step: steps are marked by the optimizers of ringtrain, and two marks make one"
        )
    return steps


class _Reader:
    """Takes the events in the order of the file, in which an operation is followed by what happened within it."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankTrace] = {}
        self.notes: list[str] = []
        self._strings: dict[str, str] = {}
        self._last: Operation | None = None

    def read(self, path: Path) -> None:
        for _, event in read_events(path):
            try:
                self._take(event)
            except (KeyError, TypeError, ValueError):
                raise no_timeline(path) from None
        self._last = None

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def _take(self, event: dict[str, Any]) -> None:
        phase = event["ph"]
        if is_of_store(event):
            self.note("The time in which the script waits for key-value stores counts as compute here.")
        elif phase == "X":
            self._take_span(event)
        elif phase == "i" and event["tid"] == _SCRIPT:
            self._take_mark(event)
        elif phase == "M" and event["name"] == "process_name":
            host = event["args"]["name"].partition(" on ")[2]
            self._rank(event["pid"]).host = host

    def _take_span(self, event: dict[str, Any]) -> None:
        begin, rank = _nanoseconds(event["ts"]), event["pid"]
        end = begin + _nanoseconds(event["dur"])
        arguments = event.get("args")
        if arguments is not None:
            self._take_operation(event, arguments, begin, end)
        elif event["tid"] == _SCRIPT:
            self._rank(rank).waits.append((begin, end))
        elif self._last is not None and not _BEFORE_A_GROUP.fullmatch(event["name"]):
            self._last.begun_ns, self._last.ended_ns = begin, end

    def _take_operation(self, event: dict[str, Any], arguments: dict[str, Any], begin: int, end: int) -> None:
        self._last = None
        if "error" in arguments:
            return
        self._last = Operation(
            rank=event["pid"],
            kind=self._one(event["name"].lower()),
            name=self._one(arguments["name"]),
            bytes=arguments["bytes"],
            process_set=arguments["process_set"],
            site=self._one(arguments.get("site", "")),
            submitted_ns=begin,
            ended_ns=end,
            begun_ns=end,
        )
        self._rank(event["pid"]).operations.append(self._last)

    def _take_mark(self, event: dict[str, Any]) -> None:
        step = re.fullmatch(r"step (\d+)", event["name"])
        if step:
            self._rank(event["pid"]).steps[int(step[1])] = _nanoseconds(event["ts"])
        elif event["name"].startswith("the timeline is full"):
            self.note("The timeline became full, and what came later is not in it: timeline_limit_mb makes it larger.")

    def _rank(self, rank: int) -> RankTrace:
        if rank not in self.ranks:
            self.ranks[rank] = RankTrace(rank)
        return self.ranks[rank]

    def _one(self, text: str) -> str:
        """The same object for equal strings: a name comes once in each step."""
        return self._strings.setdefault(text, text)


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)
