"""All that the report says, as numbers: what the page shows and what --json prints."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ringtrain.timeline.report.trace import (
    Identity,
    Operation,
    Part,
    Piece,
    RankShares,
    RankTrace,
    Trace,
    pieces,
    plans_of,
    read,
    shares_of,
)

# --- numbers in words -------------------------------------------------------------------------------------------------


PART_NAMES = {
    Part.COMPUTE: "compute",
    Part.HIDDEN: "hidden communication",
    Part.EXPOSED: "exposed communication",
    Part.NEGOTIATION: "negotiation",
    Part.SLOWEST: "waiting for the slowest rank",
}


def percent(share: float) -> str:
    """Formats a share from 0 to 1; as 0 % or 100 % only if it is exactly that."""
    if 0 < share < 0.005:
        return "< 1 %"
    if 0.995 <= share < 1:
        return "> 99 %"
    return f"{share:.0%}".replace("%", " %")


def duration(ns: float) -> str:
    """Formats a duration with three digits, in the unit that suits it."""
    if ns == 0:
        return "0"
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if ns >= size:
            return f"{_three_digits(ns / size)} {unit}"
    return f"{_three_digits(ns / 1e3)} us"


def size(count: int) -> str:
    """Formats a number of bytes, in units of 1024."""
    for unit, unit_size in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if count >= unit_size:
            whole = count % unit_size == 0
            return f"{count // unit_size if whole else _three_digits(count / unit_size)} {unit}"
    return f"{count} B"


def gb_per_s(value: float) -> str:
    """And in Gbit/s, in which links are sold."""
    return f"{_three_digits(value)} GB/s = {_three_digits(8 * value)} Gbit/s"


def _three_digits(value: float) -> str:
    for limit, digits in ((9.995, 2), (99.95, 1)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


# --- which operations belong together ---------------------------------------------------------------------------------


Meeting = list[Operation]  # one operation of each rank that took part, by rank

# Clocks of different hosts are brought together by barriers, which all ranks leave at nearly the same time only.
_CLOCKS_DIFFER_NS = 2_000_000


def meet(ranks: Sequence[RankTrace]) -> list[Meeting]:
    """Find the operations that belong together, and note in each when all had submitted it and who did so last."""
    clocks_differ = _CLOCKS_DIFFER_NS if len({rank.host for rank in ranks}) > 1 else 0
    of_name: dict[tuple[int, str], dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for operation in rank.operations:
            of_name[operation.process_set, operation.name][rank.rank].append(operation)
    meetings = []
    for by_rank in of_name.values():
        for meeting in _meetings_of_one_name(list(by_rank.values()), clocks_differ):
            _note_who_came_last(meeting)
            meetings.append(meeting)
    return meetings


def _meetings_of_one_name(queues: list[list[Operation]], clocks_differ: int) -> Iterator[Meeting]:
    """A name is in flight once at a time on a rank, and nobody's operation ends before all have submitted theirs.

    So the ranks that had submitted by the time that the earliest ended took part; the others submit later. That
    holds too where a rank took no part, as after join(), or began its timeline later.
    """
    heads = [0] * len(queues)
    while True:
        waiting = [at for at, queue in enumerate(queues) if heads[at] < len(queue)]
        if not waiting:
            return
        first_end = min(queues[at][heads[at]].ended_ns for at in waiting) + clocks_differ
        meeting = []
        for at in waiting:
            operation = queues[at][heads[at]]
            if operation.submitted_ns <= first_end:
                meeting.append(operation)
                heads[at] += 1
        yield meeting


def _note_who_came_last(meeting: Meeting) -> None:
    last = max(meeting, key=lambda operation: operation.submitted_ns)
    for operation in meeting:
        # A rank that has begun knows that all have submitted, whatever the clock of another host says.
        operation.all_submitted_ns = max(operation.submitted_ns, min(last.submitted_ns, operation.begun_ns))
        operation.last_rank = last.rank


# --- bandwidth --------------------------------------------------------------------------------------------------------
# Bus bandwidth of allreduces, as in nccl-tests: bytes / time * 2(n-1)/n for n ranks. The time of an allreduce runs
# from when the first rank began it until the last one had ended it.


_SIZE_LIMITS = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_LARGE_BYTES = 64 << 10  # what is shorter says more about latency than about bandwidth


class _Allreduce(NamedTuple):
    """Fused operations are one. Bus bytes: what the hardware has to move, between ranks, and between hosts."""

    bytes: int
    bus_bytes: float
    link_bytes: float
    ns: int

    def gb_per_s(self) -> float:
        return self.bus_bytes / self.ns


@dataclass(frozen=True)
class SizeClass:
    """The allreduces of up to so many bytes that do not belong to the class before; None: of any size."""

    up_to_bytes: int | None
    count: int
    busy_ns: int
    median_gb_per_s: float
    best_gb_per_s: float


@dataclass(frozen=True)
class Bandwidth:
    """Has the bandwidth of all allreduces of the timeline; GB/s are 10^9 bytes a second.

    achieved: all bus bytes / all the time. best: of the best single one that is not small; `best_bytes` is its size.
    link_used: between hosts, achieved / the speed of the link; None where that is not known or nothing goes over it.
    """

    allreduces: int
    bytes: int
    achieved_gb_per_s: float
    best_gb_per_s: float
    best_bytes: int
    sizes: list[SizeClass]
    hosts: int
    link_gbit_per_s: float | None
    link_used: float | None


def bandwidth_of(
    meetings: Sequence[Meeting], ranks: Sequence[RankTrace], link_gbit_per_s: float | None
) -> Bandwidth | None:
    """None if nothing was reduced. The link is the one of each host, as measured by somebody else."""
    hosts = {rank.rank: rank.host for rank in ranks}
    allreduces = _allreduces_of(meetings, hosts)
    if not allreduces:
        return None
    busy_ns = sum(one.ns for one in allreduces)
    achieved = sum(one.bus_bytes for one in allreduces) / busy_ns
    over_link = [one for one in allreduces if one.link_bytes]
    link_used = None
    if link_gbit_per_s and over_link:
        gbit_per_s = 8 * sum(one.link_bytes for one in over_link) / sum(one.ns for one in over_link)
        link_used = gbit_per_s / link_gbit_per_s
    large = [one for one in allreduces if one.bytes >= _LARGE_BYTES] or allreduces
    best = max(large, key=_Allreduce.gb_per_s)
    return Bandwidth(
        allreduces=len(allreduces),
        bytes=sum(one.bytes for one in allreduces),
        achieved_gb_per_s=achieved,
        best_gb_per_s=best.gb_per_s(),
        best_bytes=best.bytes,
        sizes=_by_size(allreduces),
        hosts=len(set(hosts.values())),
        link_gbit_per_s=link_gbit_per_s,
        link_used=link_used,
    )


def _allreduces_of(meetings: Sequence[Meeting], hosts: dict[int, str]) -> list[_Allreduce]:
    fused: dict[tuple[int, int, int, int], list[Meeting]] = {}
    for meeting in meetings:
        first = meeting[0]
        if first.kind == "allreduce" and len(meeting) > 1:
            key = (first.rank, first.process_set, first.begun_ns, first.ended_ns)
            fused.setdefault(key, []).append(meeting)
    found = []
    for together in fused.values():
        size = sum(meeting[0].bytes for meeting in together)
        begin = min(operation.begun_ns for operation in together[0])
        end = max(operation.ended_ns for operation in together[0])
        ranks = len(together[0])
        nodes = len({hosts[operation.rank] for operation in together[0]})
        if size and end > begin:
            found.append(_Allreduce(size, size * _bus_factor(ranks), size * _bus_factor(nodes), end - begin))
    return found


def _bus_factor(count: int) -> float:
    return 2 * (count - 1) / count


def _by_size(allreduces: Sequence[_Allreduce]) -> list[SizeClass]:
    classes = []
    lower = -1
    for limit in (*_SIZE_LIMITS, None):
        of_class = [one for one in allreduces if lower < one.bytes and (limit is None or one.bytes <= limit)]
        if of_class:
            speeds = [one.gb_per_s() for one in of_class]
            busy_ns = sum(one.ns for one in of_class)
            classes.append(SizeClass(limit, len(of_class), busy_ns, median(speeds), max(speeds)))
        lower = limit or lower
    return classes


# --- figures ----------------------------------------------------------------------------------------------------------


_MOST_OPERATIONS = 10
# A rank is called the slowest of a step if the others wait for it for at least this share of the step.
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
        """Returns the share of these parts, from 0 to 1."""
        return sum(self.as_list()[part] for part in parts) / max(1, self.total_ns)


@dataclass(frozen=True)
class RankFigures:
    """Has the figures of one rank. kept_waiting_ns: how long it kept the others waiting, averaged over them."""

    rank: int
    host: str
    parts: Parts
    slowest_in_steps: int
    kept_waiting_ns: int


@dataclass(frozen=True)
class StepFigures:
    """Has the sums of one step. slowest_rank: the others waited longest for it, if it is worth a name."""

    number: int
    parts: Parts
    slowest_rank: int | None


@dataclass(frozen=True)
class Lane:
    """The median step on one rank; each piece is (begin, end, Part), in nanoseconds of the timeline."""

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
    """The exposed time of one operation in all steps, averaged over the ranks."""

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


# --- the verdict: the limit of a job in one sentence, and what to do about it -----------------------------------------


_WORTH_MENDING = 0.10  # of a step; a job that loses less is bound by what it computes
_IS_THE_LIMIT = 0.30
# A rank is the straggler if it is the slowest in most steps and most of the waiting is for it.
_MOST_STEPS, _MOST_WAITING = 0.5, 0.6
_FULL_LINK = 0.7
_FAR_FROM_BEST = 0.5


@dataclass(frozen=True)
class Verdict:
    """limit: straggler, turns, communication, negotiation or compute. rank: the straggler, if there is one."""

    limit: str
    sentence: str
    advice: list[str]
    rank: int | None = None


def judge(figures: Figures) -> Verdict:
    """The largest of what keeps the script waiting, if it is worth mending; else compute."""
    lost = {part: figures.parts.share(part) for part in (Part.EXPOSED, Part.NEGOTIATION, Part.SLOWEST)}
    if sum(lost.values()) < _WORTH_MENDING:
        return _compute(figures)
    largest = max(lost, key=lost.__getitem__)
    if largest is Part.EXPOSED:
        return _communication(figures, lost[largest])
    if largest is Part.NEGOTIATION:
        return _negotiation(lost[largest])
    worst = max(figures.ranks, key=lambda rank: rank.kept_waiting_ns)
    waiting = sum(rank.kept_waiting_ns for rank in figures.ranks)
    is_often = worst.slowest_in_steps >= _MOST_STEPS * len(figures.steps)
    if is_often and worst.kept_waiting_ns >= _MOST_WAITING * waiting:
        return _straggler(figures, worst)
    return _turns(figures, lost[largest], worst)


def _straggler(figures: Figures, worst: RankFigures) -> Verdict:
    cost = worst.kept_waiting_ns / len(figures.steps) / figures.mean_step_ns()
    sentence = (
        f"Rank {worst.rank} is the slowest in {worst.slowest_in_steps} of {len(figures.steps)} steps and costs the "
        f"others {percent(cost)} of a step: look at what it computes."
    )
    advice = [
        f"Does rank {worst.rank} get more or longer data than the others, or do work that they do not, such as "
        "logging, evaluating or saving? Give it less, or let another rank take turns.",
        f"If all ranks do the same work, look at its host{f' {worst.host}' if worst.host else ''}: other processes, "
        "fewer cores than threads, a processor that is hot or shared. `python -m ringtrain.doctor` helps there.",
    ]
    return Verdict("straggler", sentence, advice, worst.rank)


def _turns(figures: Figures, share: float, worst: RankFigures) -> Verdict:
    sentence = (
        f"The ranks wait for each other for {percent(share)} of a step and take turns at being the slowest: rank "
        f"{worst.rank}, which costs most, is it in {worst.slowest_in_steps} of {len(figures.steps)} steps."
    )
    advice = [
        "Batches of unequal length make unequal steps: bring samples of similar length together, or bound the length.",
        "Otherwise it is noise of the machines: other processes, more threads than cores (set OMP_NUM_THREADS), or "
        "data that comes late. Several batches per update (`backward_passes_per_step`) average it out.",
    ]
    return Verdict("turns", sentence, advice)


def _communication(figures: Figures, share: float) -> Verdict:
    is_one_host = len({rank.host for rank in figures.ranks}) == 1
    what = "Communication" if is_one_host else "The network"
    if share >= _IS_THE_LIMIT:
        sentence = f"{what} is the limit: {percent(share)} of a step is communication that nothing hides; send less."
    else:
        sentence = f"{what} costs {percent(share)} of a step, in which nothing is computed; send less, or earlier."
    advice = [*_better_use(figures), *_less_to_send(is_one_host)]
    return Verdict("communication", sentence, advice)


def _less_to_send(is_one_host: bool) -> list[str]:
    advice = [
        "Half the bytes: `compression=hvd.Compression.bf16` (or `fp16`) of DistributedOptimizer.",
        "Fewer updates: larger batches, or `backward_passes_per_step=4`, which communicates once for four of them.",
    ]
    if is_one_host:
        advice.append(
            "All ranks are on one host: gradients in shared memory are reduced without being copied; "
            "`gradient_as_shared_view=True` for PyTorch, `ringtrain.empty` for NumPy."
        )
    return advice


def _better_use(figures: Figures) -> list[str]:
    bandwidth = figures.bandwidth
    if bandwidth is None:
        return []
    advice = []
    if bandwidth.link_used is not None:
        remedy = "only fewer bytes will help" if bandwidth.link_used >= _FULL_LINK else "it could carry more"
        advice.append(f"The link is used to {percent(bandwidth.link_used)} while an allreduce runs: {remedy}.")
    if bandwidth.achieved_gb_per_s < _FAR_FROM_BEST * bandwidth.best_gb_per_s:
        advice.append(
            f"All allreduces together reach {gb_per_s(bandwidth.achieved_gb_per_s)}, the best one "
            f"{gb_per_s(bandwidth.best_gb_per_s)}: many small ones make that difference, and so do ranks that begin "
            "late because their cores compute. `hvd.init(autotune=True)` looks for better sizes."
        )
    return advice


def _negotiation(share: float) -> Verdict:
    sentence = (
        f"The ranks spend {percent(share)} of a step on agreeing what to do next, after all of them had submitted it; "
        "give them fewer and larger operations, or leave a core free."
    )
    advice = [
        "Bring small tensors together: `groups=` of DistributedOptimizer, or `grouped_allreduce`.",
        "Use the same names in each step, and not more of them than 16 times `cache_capacity`: what is known costs one "
        "bit.",
        "Where every core computes, no core has time to negotiate: leave a core free, or set OMP_NUM_THREADS lower.",
    ]
    return Verdict("negotiation", sentence, advice)


def _compute(figures: Figures) -> Verdict:
    share = figures.parts.share(Part.COMPUTE, Part.HIDDEN)
    sentence = f"Compute-bound: {percent(share)} of a step is compute; more ranks will scale."
    hidden = figures.parts.share(Part.HIDDEN)
    advice = [
        "Nothing in ringtrain will make this job much faster. A faster step needs faster compute: more threads for "
        "each rank where cores idle, lower precision, a compiled model.",
        f"During {percent(hidden)} of a step communication goes on behind the compute. More ranks send more messages: "
        "make this report again after adding some.",
    ]
    return Verdict("compute", sentence, advice)
