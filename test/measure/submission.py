"""The cost for the training thread of submitting a gradient that was submitted in every step before.

The gradients are small, and the time is that of a burst of them, until the last one is submitted. Nothing is left out:
the hook of torch is called as backward() calls it.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable

import numpy as np

import ringtrain as hvd
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of
from ringtrain.bench.results import Result, Row
from ringtrain.bench.rounds import Contestant
from ringtrain.training.gradient_batch import GradientBatch

_ELEMENTS = 8


class Submission:
    name = "submission"
    help = "the time that a training thread takes to submit a small cached gradient"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--gradients", type=int, default=161, metavar="N", help="default: %(default)s")
        parser.add_argument("--steps", type=int, default=100, metavar="N", help="in each timing (default: %(default)s)")

    def measure(self, session: Session) -> list[Row]:
        session.init()
        count, steps = session.arguments.gradients, session.arguments.steps
        names = [f"layer{place}.weight" for place in range(count)]
        contestants = [Contestant(*_of_async(names)), Contestant(*_of_batch(names))]
        if importlib.util.find_spec("torch") and session.job.size > 1:  # who is alone has no hooks
            from measure.torch_hooks import step_of_hooks

            contestants.append(Contestant("torch, hook", step_of_hooks(names, _ELEMENTS)))
        session.expect(1)

        def sample(contestant: Contestant) -> dict[str, float]:
            seconds = []
            for _ in range(steps):
                session.job.barrier()
                seconds.append(contestant.run() / count)
            own = [float(np.median(seconds)), min(seconds)]
            median, smallest = np.max(session.job.gather(own), axis=0).tolist()
            return {"seconds": median, "min": smallest}

        return [Row({"gradients": count}, session.rounds(contestants, sample))]

    def table(self, result: Result) -> list[str]:
        (row,) = result.rows
        table = Table(["", "us [min-max]", "min"], first_is_text=True)
        for name in row.competitors():
            median, low, high = 1e6 * np.array(row.spread(name))
            table.add([name, f"{median:.2f} [{low:.2f}-{high:.2f}]", f"{1e6 * row.spread(name, 'min').median:.2f}"])
        subject = f"{row.key['gradients']} gradients; of the steps of a round the median and the shortest, for each"
        return [subject, *lines_of(table)]


def _of_async(names: list[str]) -> tuple[str, Callable[[], float]]:
    arrays = [np.zeros(_ELEMENTS, np.float32) for _ in names]

    def step() -> float:
        begin = time.perf_counter()
        handles = [hvd.allreduce_async_(array, name=name) for name, array in zip(names, arrays, strict=True)]
        seconds = time.perf_counter() - begin
        for handle in handles:
            handle.wait()
        return seconds

    return "NumPy, allreduce_async_", step


def _of_batch(names: list[str]) -> tuple[str, Callable[[], float]]:
    arrays = [np.zeros(_ELEMENTS, np.float32) for _ in names]
    batch = GradientBatch()

    def step() -> float:
        begin = time.perf_counter()
        for place, name in enumerate(names):
            batch.ready(name, arrays[place])
        seconds = time.perf_counter() - begin
        batch.wait()
        return seconds

    return "NumPy, DistributedOptimizer", step
