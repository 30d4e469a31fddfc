"""Competitors, and the one loop that times them: in turn, round by round, on the same data."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import ringtrain._core as _core
from ringtrain.bench.ranks import Job
from ringtrain.bench.results import Round

# --- how far apart the cores of ranks 0 and 1 of a node are: virtual machines move them -------------------------------


NEAR_NS = 200.0
_FOLDER = "/dev/shm"
_LIMIT_S = 0.2


class Probe:
    """Measures the round trip of a word between two ranks. All ranks call its methods together."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._takes_part = job.local_size > 1 and job.local_rank < 2
        self._board = _share(job)

    def distance_ns(self) -> float | None:
        """The largest of all nodes; None where no node has two ranks, or the scheduler let no two of them run."""
        if self._takes_part and self._job.local_rank == 0:
            self._board[:] = 0
        self._job.barrier()
        own = 0.0
        if self._takes_part:
            own = _core.round_trip_ns(self._board.ctypes.data, self._job.local_rank == 0, _LIMIT_S)
        largest = max(self._job.gather(own))
        return largest if 0 < largest < float("inf") else None

    def wait_for(self, state: str | None, patience_s: float) -> float | None:
        """The distance, as soon as it is "near" or "far" as wanted (None: at once), or when the patience is over."""
        deadline = time.monotonic() + patience_s
        while True:
            distance_ns = self.distance_ns()
            is_over = any(self._job.gather(time.monotonic() > deadline))
            if state in (None, state_of(distance_ns)) or is_over:
                return distance_ns
            time.sleep(0.05)


def state_of(distance_ns: float | None) -> str:
    if distance_ns is None:
        return "unknown"
    return "near" if distance_ns < NEAR_NS else "far"


def _share(job: Job) -> np.ndarray:
    """The board of this node: a mapped file that has no name any more."""
    with contextlib.ExitStack() as files:
        path = ""
        if job.local_rank == 0:
            file = files.enter_context(tempfile.NamedTemporaryFile(dir=_FOLDER, prefix="ringtrain.bench-"))
            file.truncate(_core.ROUND_TRIP_BYTES)
            path = file.name
        path = job.gather_on_node(path)[0]
        descriptor = os.open(path, os.O_RDWR)
        try:
            mapped = mmap.mmap(descriptor, _core.ROUND_TRIP_BYTES)
        finally:
            os.close(descriptor)
        job.barrier()
    return np.frombuffer(mapped, np.uint8)


# --- rounds -----------------------------------------------------------------------------------------------------------


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
    probe: Probe, plan: Plan, progress: Progress, contestants: Sequence[Contestant], sample: Sampler
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
    """Returns the cost of one run: "seconds", and "cpu", the processor time of all ranks together.

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
