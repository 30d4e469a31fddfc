"""One launch of a measurement: the ranks, the competitors that take part, and the rounds they go through."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import ringtrain as hvd
from ringtrain.bench import peers, ringtrain_competitor
from ringtrain.bench.core_distance import Probe
from ringtrain.bench.job import Job
from ringtrain.bench.results import Round
from ringtrain.bench.rounds import Array, Competitor, Contestant, Plan, Progress, Sampler, measure, seconds_of_all


class CannotMeasure(Exception):
    """This job lacks what the measurement wants; raised on all ranks, before anything is measured."""


class Session:
    """What a measurement works with. All ranks call its methods together."""

    def __init__(self, job: Job, arguments: argparse.Namespace) -> None:
        self.job = job
        self.arguments = arguments
        self.notes: list[str] = []
        self.facts: list[dict[str, Any]] = []
        self._plan = Plan(arguments.rounds, arguments.warmup, arguments.only, arguments.patience)
        self._probe = Probe(job)
        self._progress = Progress(job.rank == 0 and (arguments.progress or sys.stderr.isatty()))
        self._peers: peers.Peers | None = None

    def init(self, **options: str) -> None:
        """With the options of the command line and these, which go first."""
        hvd.init(**{**dict(self.arguments.option), **options})

    def peers(self) -> list[peers.Peer]:
        """The peers that were asked for and are installed."""
        if self._peers is None:
            self._peers = peers.find(self.job, self.arguments.peers)
            self.notes += [f"{name} does not take part: {reason}" for name, reason in self._peers.missing.items()]
        return self._peers.present

    def admit(
        self,
        competitors: Sequence[Competitor],
        tensors: Sequence[Array],
        fill: Callable[[], None],
        is_right: Callable[[Any], bool],
    ) -> list[Contestant]:
        """Prepare the competitors, and check the result of each; a peer whose first run takes too long is left out.

        Args:
            tensors: what they all work on.
            fill: writes the data into the tensors for which `is_right` knows the result.

        Raises:
            RuntimeError: one of them computes something else.
        """
        admitted = []
        for competitor in competitors:
            fill()
            run = competitor.prepare(tensors)
            begin = time.monotonic()
            results = run()
            seconds = max(self.job.gather(time.monotonic() - begin))
            if not all(self.job.gather(is_right(results))):
                raise RuntimeError(f"{competitor.name} computes a wrong result")
            if seconds > self._plan.patience_s and competitor.name != ringtrain_competitor.NAME:
                limit = f"more than --patience {self._plan.patience_s:g}"
                self.notes.append(f"{competitor.name} does not take part: one run took {seconds:.1f} s, {limit}")
            else:
                admitted.append(Contestant(competitor.name, run))
        return admitted

    def expect(self, rows: int) -> None:
        self._progress.expect(rows * self._plan.rounds)

    def rounds(self, contestants: Sequence[Contestant], sample: Sampler | None = None) -> list[Round]:
        """All rounds of these contestants; `sample` times one run unless given.

        Raises:
            TimeoutError: the cores were never in the state that --only wants.
        """
        plan = self._plan
        rounds = measure(self.job, self._probe, plan, self._progress, contestants, sample or self._seconds)
        if len(rounds) < plan.rounds:
            done = f"{len(rounds)} of {plan.rounds} rounds"
            self.notes.append(f"{done}: the cores were not {plan.only} to each other for {plan.patience_s:g} s")
        if not rounds:
            raise TimeoutError(self.notes[-1])
        return rounds

    def _seconds(self, contestant: Contestant) -> dict[str, float]:
        return {"seconds": seconds_of_all(self.job, contestant.run)}

    def close(self) -> None:
        self._progress.close()
        if self._peers is not None:
            self._peers.close()
        hvd.shutdown()
