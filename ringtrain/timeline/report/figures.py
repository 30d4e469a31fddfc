"""All that the report says, as numbers: what the page shows and what --json prints."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ringtrain.timeline.report.bandwidth import Bandwidth, bandwidth_of
from ringtrain.timeline.report.format import percent
from ringtrain.timeline.report.matching import meet
from ringtrain.timeline.report.step_parts import Identity, Part, Piece, RankShares, pieces, plans_of, shares_of
from ringtrain.timeline.report.trace import RankTrace, Trace, read

_MOST_OPERATIONS = 10
# Who keeps the others waiting for less than this share of a step is not called the slowest of it.
_WORTH_A_NAME = 0.01
_LONG_STEP = 3  # times the median
_SHOWN_LANES = 16


@dataclass(frozen=True)
class Parts:
    """Time that is shared out, in nanoseconds; `total_ns` is the sum of all five."""

    compute_ns: int = 0
    hidden_ns: int = 0
    exposed_ns: int = 0
    negotiation_ns: int = 0
    slowest_ns: int = 0

    @property
    def total_ns(self) -> int:
        return sum(self.as_list())

    def as_list(self) -> list[int]:
        """In the order of Part."""
        return [self.compute_ns, self.hidden_ns, self.exposed_ns, self.negotiation_ns, self.slowest_ns]

    def share(self, *parts: Part) -> float:
        """What these parts are of the whole, from 0 to 1."""
        return sum(self.as_list()[part] for part in parts) / max(1, self.total_ns)


@dataclass(frozen=True)
class RankFigures:
    """Of one rank, over all steps. kept_waiting_ns: how long it kept the others waiting, averaged over them."""

    rank: int
    host: str
    parts: Parts
    slowest_in_steps: int
    kept_waiting_ns: int


@dataclass(frozen=True)
class StepFigures:
    """Of one step, summed over the ranks. slowest_rank: for whom the others waited longest, if it is worth a name."""

    number: int
    parts: Parts
    slowest_rank: int | None


@dataclass(frozen=True)
class Lane:
    """What one rank did in the median step; each piece is (begin, end, Part), in nanoseconds of the timeline."""

    rank: int
    pieces: list[tuple[int, int, int]]


@dataclass(frozen=True)
class MedianStep:
    """The step of median length, averaged over the ranks."""

    number: int
    ns: int
    lanes: list[Lane]


@dataclass(frozen=True)
class OperationCost:
    """What one operation cost in exposed time in all steps, averaged over the ranks."""

    kind: str
    name: str
    bytes: int
    site: str
    exposed_ns: int
    negotiation_ns: int
    slowest_ns: int

    @property
    def total_ns(self) -> int:
        return self.exposed_ns + self.negotiation_ns + self.slowest_ns


@dataclass(frozen=True)
class Figures:
    """Everything. `parts` are those of all steps and ranks in sum."""

    file: str
    parts: Parts
    ranks: list[RankFigures]
    steps: list[StepFigures]
    median_step: MedianStep
    operations: list[OperationCost]
    bandwidth: Bandwidth | None
    notes: list[str]

    def mean_step_ns(self) -> float:
        return self.parts.total_ns / len(self.steps) / len(self.ranks)


def figures_of(path: Path, link_gbit_per_s: float | None = None) -> Figures:
    """Read a timeline and work it out.

    Raises:
        OSError: there is no such file.
        TraceError: the file tells nothing of steps of several ranks.
    """
    trace = read(path)
    meetings = meet(trace.ranks)
    shares = [shares_of(rank, trace.steps) for rank in trace.ranks]
    steps = _steps(trace, shares)
    return Figures(
        file=path.name,
        parts=_sum(step.parts.as_list() for step in steps),
        ranks=_ranks(trace.ranks, shares, steps),
        steps=steps,
        median_step=_median_step(trace, steps),
        operations=_costs(shares),
        bandwidth=bandwidth_of(meetings, trace.ranks, link_gbit_per_s),
        notes=[*trace.notes, *_note_long_steps(steps)],
    )


def _sum(times: Iterable[Sequence[int]]) -> Parts:
    return Parts(*map(sum, zip(*times, strict=True)))


def _steps(trace: Trace, shares: Sequence[RankShares]) -> list[StepFigures]:
    steps = []
    for at, number in enumerate(trace.steps):
        parts = _sum(of_rank.by_step[at] for of_rank in shares)
        waited = sum((of_rank.waited_for[at] for of_rank in shares), Counter[int]())
        slowest = max(waited, key=waited.__getitem__, default=None)
        others = len(shares) - 1
        if slowest is not None and waited[slowest] / others < _WORTH_A_NAME * parts.total_ns / len(shares):
            slowest = None
        steps.append(StepFigures(number, parts, slowest))
    return steps


def _ranks(ranks: Sequence[RankTrace], shares: Sequence[RankShares], steps: Sequence[StepFigures]) -> list[RankFigures]:
    slowest = Counter(step.slowest_rank for step in steps)
    waited = sum((of_step for of_rank in shares for of_step in of_rank.waited_for), Counter[int]())
    return [
        RankFigures(
            rank=rank.rank,
            host=rank.host,
            parts=_sum(of_rank.by_step),
            slowest_in_steps=slowest[rank.rank],
            kept_waiting_ns=round(waited[rank.rank] / (len(ranks) - 1)),
        )
        for rank, of_rank in zip(ranks, shares, strict=True)
    ]


def _median_step(trace: Trace, steps: Sequence[StepFigures]) -> MedianStep:
    in_order = sorted(steps, key=lambda step: step.parts.total_ns)
    step = in_order[(len(in_order) - 1) // 2]
    lanes = [_lane(rank, step.number) for rank in trace.ranks[:_SHOWN_LANES]]
    return MedianStep(step.number, round(step.parts.total_ns / len(trace.ranks)), lanes)


def _lane(rank: RankTrace, number: int) -> Lane:
    begin, end = rank.steps[number], rank.steps[number + 1]
    joined: list[tuple[int, int, int]] = []
    for piece in _pieces_between(rank, begin, end):
        if joined and joined[-1][2] == piece.part:
            joined[-1] = (joined[-1][0], piece.end_ns, int(piece.part))
        else:
            joined.append((piece.begin_ns, piece.end_ns, int(piece.part)))
    return Lane(rank.rank, joined)


def _pieces_between(rank: RankTrace, begin: int, end: int) -> list[Piece]:
    near = RankTrace(
        rank.rank,
        operations=[one for one in rank.operations if one.submitted_ns < end and one.ended_ns > begin],
        waits=[wait for wait in rank.waits if wait[0] < end and wait[1] > begin],
    )
    cut = pieces(near, plans_of(near.operations), {begin, end})
    return [piece for piece in cut if begin <= piece.begin_ns and piece.end_ns <= end]


def _costs(shares: Sequence[RankShares]) -> list[OperationCost]:
    """The most expensive ones first."""
    times: dict[Identity, list[int]] = defaultdict(lambda: [0] * len(Part))
    for of_rank in shares:
        for identity, of_operation in of_rank.costs.items():
            for part, ns in enumerate(of_operation):
                times[identity][part] += ns
    costs = [
        OperationCost(*identity, *(round(ns / len(shares)) for ns in of_operation[Part.EXPOSED :]))
        for identity, of_operation in times.items()
    ]
    return sorted(costs, key=lambda cost: -cost.total_ns)[:_MOST_OPERATIONS]


def _note_long_steps(steps: Sequence[StepFigures]) -> list[str]:
    usual = median(step.parts.total_ns for step in steps)
    long = [step for step in steps if step.parts.total_ns > _LONG_STEP * usual]
    if not long:
        return []
    share = sum(step.parts.total_ns for step in long) / sum(step.parts.total_ns for step in steps)
    which = ", ".join(str(step.number) for step in long[:8]) + (", ..." if len(long) > 8 else "")
    steps_take = f"Step {which} takes" if len(long) == 1 else f"{len(long)} steps ({which}) take"
    return [
        f"{steps_take} more than three times the median, and {percent(share)} of all time: what runs there besides "
        "training, such as an evaluation or a checkpoint, counts too."
    ]
