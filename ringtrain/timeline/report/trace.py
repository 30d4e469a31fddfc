"""Read the file of a timeline: the operations, waits and steps of each rank, and the parts of its steps.

Times are whole nanoseconds since the beginning of the timeline, so that shares of a step add up exactly.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain.record.timeline_files import TraceError, is_empty, is_of_store, no_timeline, other_parts, read_events

# --- reading a file ---------------------------------------------------------------------------------------------------


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
    all_submitted_ns: int = 0  # known once the operations of all ranks have met: see figures.py
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
        TraceError: it is not a timeline, or one without steps, or of one rank.
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
        raise TraceError(f"{path} has one rank only, number {ranks[0].rank}: it has no other rank to communicate with")
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


# --- the parts of steps: what each rank did at each moment ------------------------------------------------------------

# A moment belongs to exactly one of five parts, so the parts of a step add up to its time. The first that fits counts:
#
#     compute      the script does not wait for a Handle, and no Group is at work
#     hidden       the script does not wait, and a Group is at work: communication behind compute
#     exposed      the script waits, and a Group is at work
#     negotiation  the script waits, and something that all ranks have submitted has not begun; or nothing is pending
#     slowest      the script waits, and all that is pending has still to be submitted by some other rank


class Part(IntEnum):
    """The index of a part in a list of all five."""

    COMPUTE = 0
    HIDDEN = 1
    EXPOSED = 2
    NEGOTIATION = 3
    SLOWEST = 4


class Plan:
    """Operations of one rank that one Group carries out together."""

    __slots__ = ("begun_ns", "ended_ns", "exposed_ns", "operations")

    def __init__(self, first: Operation) -> None:
        self.begun_ns, self.ended_ns = first.begun_ns, first.ended_ns
        self.operations: list[Operation] = []
        self.exposed_ns = 0


class Piece(NamedTuple):
    """A time in which nothing changed, and what the script waited for."""

    begin_ns: int
    end_ns: int
    part: Part
    cause: Plan | Operation | None


class Identity(NamedTuple):
    """The fields of an operation that are the same in every step."""

    kind: str
    name: str
    bytes: int
    site: str

    @classmethod
    def of(cls, operation: Operation) -> Identity:
        return cls(operation.kind, operation.name, operation.bytes, operation.site)


def _no_time() -> list[int]:
    return [0] * len(Part)


@dataclass
class RankShares:
    """Has the shares of one rank, in nanoseconds.

    by_step: for each step the time of each Part. waited_for: for each step how long this rank waited for each other
    one. costs: of each operation the time of each Part, in all steps; only what is exposed.
    """

    by_step: list[list[int]]
    waited_for: list[Counter[int]]
    costs: dict[Identity, list[int]] = field(default_factory=lambda: defaultdict(_no_time))


def plans_of(operations: Sequence[Operation]) -> list[Plan]:
    """Operations that were fused begin and end together."""
    plans: dict[tuple[int, int, str, int], Plan] = {}
    for operation in operations:
        key = (operation.begun_ns, operation.ended_ns, operation.kind, operation.process_set)
        if key not in plans:
            plans[key] = Plan(operation)
        plans[key].operations.append(operation)
    return list(plans.values())


def shares_of(rank: RankTrace, steps: Sequence[int]) -> RankShares:
    """Share out the time of each of the steps. The operations must have met: see figures.py."""
    spans = [(rank.steps[number], rank.steps[number + 1]) for number in steps]
    shares = RankShares([_no_time() for _ in steps], [Counter() for _ in steps])
    plans = plans_of(rank.operations)
    edges = {edge for span in spans for edge in span}
    at = 0
    for piece in pieces(rank, plans, edges):
        while at < len(spans) and spans[at][1] <= piece.begin_ns:
            at += 1
        if at == len(spans):
            break
        if piece.begin_ns >= spans[at][0]:
            _add(piece, at, shares)
    for plan in plans:
        _divide_by_bytes(plan, shares.costs)
    return shares


def _add(piece: Piece, step: int, shares: RankShares) -> None:
    lasted = piece.end_ns - piece.begin_ns
    shares.by_step[step][piece.part] += lasted
    if isinstance(piece.cause, Plan):
        piece.cause.exposed_ns += lasted
    elif piece.cause is not None:
        shares.costs[Identity.of(piece.cause)][piece.part] += lasted
        if piece.part is Part.SLOWEST:
            shares.waited_for[step][piece.cause.last_rank] += lasted


def _divide_by_bytes(plan: Plan, costs: dict[Identity, list[int]]) -> None:
    """Among the operations of a plan, since one Group at work is all that can be seen of them."""
    if not plan.exposed_ns:
        return
    total = sum(operation.bytes for operation in plan.operations)
    for operation in plan.operations:
        share = operation.bytes / total if total else 1 / len(plan.operations)
        costs[Identity.of(operation)][Part.EXPOSED] += round(plan.exposed_ns * share)


# ------------------------------------------------------------------------------------------------- moment after moment


class _Change(IntEnum):
    """The changes at a moment; those at the same moment happen in this order."""

    EDGE = 0
    WAIT_ENDS = 1
    WAIT_BEGINS = 2
    SUBMITTED = 3
    ALL_SUBMITTED = 4
    ENDED = 5
    BEGUN = 6


def pieces(rank: RankTrace, plans: Sequence[Plan], edges: set[int]) -> Iterator[Piece]:
    """Cut the time of a rank into pieces, so that a piece ends at each edge too."""
    state = _State(rank.operations, plans)
    changes = _changes(rank, plans, edges)
    before = changes[0][0] if changes else 0
    for now, change, index in changes:
        if now > before:
            yield Piece(before, now, *state.now_doing())
            before = now
        state.apply(change, index)


def _changes(rank: RankTrace, plans: Sequence[Plan], edges: set[int]) -> list[tuple[int, _Change, int]]:
    changes = [(edge, _Change.EDGE, 0) for edge in edges]
    for begin, end in rank.waits:
        changes.append((begin, _Change.WAIT_BEGINS, 0))
        changes.append((end, _Change.WAIT_ENDS, 0))
    for index, operation in enumerate(rank.operations):
        changes.append((operation.submitted_ns, _Change.SUBMITTED, index))
        changes.append((operation.all_submitted_ns, _Change.ALL_SUBMITTED, index))
    for index, plan in enumerate(plans):
        if plan.begun_ns < plan.ended_ns:
            changes.append((plan.ended_ns, _Change.ENDED, index))
        changes.append((plan.begun_ns, _Change.BEGUN, index))
    changes.sort()
    return changes


class _State:
    """The state of one rank at one moment: what it waits for."""

    def __init__(self, operations: Sequence[Operation], plans: Sequence[Plan]) -> None:
        self._operations, self._plans = operations, plans
        self._waits = 0  # threads that wait
        self._incomplete: list[tuple[int, int]] = []  # heap of (all submitted, index): which rank will end the wait
        self._complete: dict[Operation, None] = {}  # in the order in which they became so
        self._at_work: dict[Plan, None] = {}

    def now_doing(self) -> tuple[Part, Plan | Operation | None]:
        if not self._waits:
            return (Part.HIDDEN if self._at_work else Part.COMPUTE), None
        if self._at_work:
            return Part.EXPOSED, next(iter(self._at_work))
        if self._complete:
            return Part.NEGOTIATION, next(iter(self._complete))
        if self._incomplete:
            return Part.SLOWEST, self._operations[self._incomplete[0][1]]
        return Part.NEGOTIATION, None

    def apply(self, change: _Change, index: int) -> None:
        if change is _Change.WAIT_BEGINS:
            self._waits += 1
        elif change is _Change.WAIT_ENDS:
            self._waits -= 1
        elif change is _Change.SUBMITTED:
            heapq.heappush(self._incomplete, (self._operations[index].all_submitted_ns, index))
        elif change is _Change.ALL_SUBMITTED:
            # all that became complete before have left, so this one is among the first
            heapq.heappop(self._incomplete)
            self._complete[self._operations[index]] = None
        elif change is _Change.BEGUN:
            self._begin(self._plans[index])
        elif change is _Change.ENDED:
            self._at_work.pop(self._plans[index], None)

    def _begin(self, plan: Plan) -> None:
        for operation in plan.operations:
            self._complete.pop(operation, None)
        if plan.begun_ns < plan.ended_ns:
            self._at_work[plan] = None
