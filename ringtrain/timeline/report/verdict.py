"""The limit of a job in one sentence, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from ringtrain.timeline.report.figures import Figures, RankFigures, gb_per_s, percent
from ringtrain.timeline.report.step_parts import Part

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
        "give them fewer and larger operations."
    )
    advice = [
        "Bring small tensors together: `groups=` of DistributedOptimizer, or `grouped_allreduce`.",
        "Use the same names in each step, and not more of them than 16 times `cache_capacity`: what is known costs one "
        "bit.",
        "Where every core computes, nobody has time to negotiate: leave a core free, or set OMP_NUM_THREADS lower.",
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
