"""Competitors, and the one loop that times them: in turn, round by round, on the same data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ringtrain.bench.core_distance import Probe, state_of
from ringtrain.bench.job import Job
from ringtrain.bench.results import Round

Array = np.ndarray[Any, np.dtype[Any]]
# The name of the Distribution that leaves every rank its own gradients.
ALONE = "no communication"


@dataclass(frozen=True)
class Competitor:
    """One way to do the work. `prepare` makes buffers and views for the tensors; what it returns does the work once and
    returns the results. `is_own`: ringtrain, which is there once for each network that is asked for."""

    name: str
    prepare: Callable[[Sequence[Array]], Callable[[], Any]]
    is_own: bool = False


@dataclass(frozen=True)
class Distribution:
    """One way to average the gradients. `distribute` takes a torch model and its optimizer, and returns what is used in
    place of them."""

    name: str
    distribute: Callable[[Any, Any], tuple[Any, Any]]


class Contestant(NamedTuple):
    """A Competitor that is ready to run, on this network if it is ringtrain."""

    name: str
    run: Callable[[], Any]
    network: str | None = None


@dataclass(frozen=True)
class Plan:
    """How much is measured. `only`: in which state of the cores a round may begin. `patience_s`: how long one run of a
    competitor, or the waiting for that state, may take."""

    rounds: int
    warmup: int
    only: str | None = None
    patience_s: float = 10.0


class Progress:
    """Counts rounds; shows them if told to and if tqdm is installed."""

    def __init__(self, is_shown: bool) -> None:
        self._bar: Any = None
        if is_shown:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(unit=" rounds", leave=False)

    def expect(self, rounds: int) -> None:
        if self._bar is not None:
            self._bar.total = (self._bar.total or 0) + rounds
            self._bar.refresh()

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


# Measures a contestant once, on all ranks together, and returns the same on all of them.
Sampler = Callable[[Contestant], dict[str, float]]


def measure(
    job: Job, probe: Probe, plan: Plan, progress: Progress, contestants: Sequence[Contestant], sample: Sampler
) -> list[Round]:
    """Rounds of all contestants, in an order that is another one in each round. They end early if the cores do not come
    into the state that is wanted."""
    for contestant in contestants:
        for _ in range(plan.warmup):
            sample(contestant)
    rounds = []
    for number in range(plan.rounds):
        distance_ns = probe.wait_for(plan.only, plan.patience_s)
        if plan.only not in (None, state_of(distance_ns)):
            break
        first = number % len(contestants)
        order = [*contestants[first:], *contestants[:first]]
        values = {contestant.name: sample(contestant) for contestant in order}
        rounds.append(Round({contestant.name: values[contestant.name] for contestant in contestants}, distance_ns))
        progress.advance()
    return rounds


def cost_for_all(job: Job, run: Callable[[], Any], iterations: int = 1) -> dict[str, float]:
    """What one run costs: "seconds", and "cpu", the processor time of all ranks together.

    Seconds count from when the first rank of a node begins until its last one has ended, on the slowest node. All ranks
    come out of a barrier first, but where they share cores some come out of it later, and their own time would not show
    what they had to wait for. The clock is one for all processes of a node.
    """
    job.barrier()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(iterations):
        run()
    end, used = time.perf_counter(), time.process_time() - used
    begins, ends = zip(*job.gather_on_node((begin, end)), strict=True)
    seconds, cpu = zip(*job.gather((max(ends) - min(begins), used)), strict=True)
    return {"seconds": max(seconds) / iterations, "cpu": sum(cpu) / iterations}


def seconds_of_all(job: Job, run: Callable[[], Any]) -> float:
    """The seconds of `cost_for_all`."""
    return cost_for_all(job, run)["seconds"]
