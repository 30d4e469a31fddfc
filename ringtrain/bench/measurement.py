"""One launch of a measurement: the ranks, the competitors that take part, and the rounds they go through."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import ringtrain as hvd
from ringtrain.bench import peers, ringtrain_competitor
from ringtrain.bench.ranks import Job
from ringtrain.bench.results import Round
from ringtrain.bench.rounds import Array, Competitor, Contestant, Plan, Probe, Progress, Sampler, cost_for_all, measure


class CannotMeasure(Exception):
    """This job lacks something that the measurement needs; raised on all ranks, before anything is measured."""


class Session:
    """The ranks, options and competitors of a measurement. All ranks call its methods together."""

    def __init__(self, job: Job, arguments: argparse.Namespace) -> None:
        self.job = job
        self.arguments = arguments
        self.notes: list[str] = []
        self.facts: list[dict[str, Any]] = []
        self._plan = Plan(arguments.rounds, arguments.warmup, arguments.only, arguments.patience)
        self._probe = Probe(job)
        self._progress = Progress(job.rank == 0 and (arguments.progress or sys.stderr.isatty()))
        self._peers: peers.Peers | None = None
        self._options: dict[str, str] = {}
        self._network: str | None = None

    def init(self, **options: str) -> None:
        """Initialises with the options of the command line and these, which beat them, on the first network."""
        self._options = {**dict(self.arguments.option), **options}
        if self.arguments.network:
            self._network = self.arguments.network[0]
            self._options["network"] = self._network
            self.notes.append(f"{ringtrain_competitor.NAME}: network={self._network}")
        hvd.init(**cast(Any, self._options))

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
        for competitor, network in self._on_networks(competitors):
            self._use(network)
            fill()
            run = competitor.prepare(tensors)
            begin = time.monotonic()
            results = run()
            seconds = max(self.job.gather(time.monotonic() - begin))
            if not all(self.job.gather(is_right(results))):
                raise RuntimeError(f"{competitor.name} computes a wrong result")
            if seconds > self._plan.patience_s and not competitor.is_own:
                limit = f"more than --patience {self._plan.patience_s:g}"
                self.notes.append(f"{competitor.name} does not take part: one run took {seconds:.1f} s, {limit}")
            else:
                admitted.append(Contestant(competitor.name, run, network))
        return admitted

    def _on_networks(self, competitors: Sequence[Competitor]) -> Iterator[tuple[Competitor, str | None]]:
        """Each competitor, and ringtrain once more for each network but the first, under a name that says so."""
        for competitor in competitors:
            networks = self.arguments.network if competitor.is_own else []
            yield competitor, networks[0] if networks else None
            for network in networks[1:]:
                yield replace(competitor, name=f"{competitor.name} over {network}"), network

    def _use(self, network: str | None) -> bool:
        """Whether ringtrain had to begin anew for it. None: it does not matter."""
        if network in (None, self._network):
            return False
        self.job.barrier()
        hvd.shutdown()
        hvd.init(**cast(Any, {**self._options, "network": network}))
        self._network = network
        return True

    def expect(self, rows: int) -> None:
        self._progress.expect(rows * self._plan.rounds)

    def rounds(self, contestants: Sequence[Contestant], sample: Sampler | None = None) -> list[Round]:
        """All rounds of these contestants; `sample` times one run unless given.

        Raises:
            TimeoutError: the cores were never in the state that --only asks for.
        """
        plan = self._plan
        take = sample or self._cost

        def on_its_network(contestant: Contestant) -> dict[str, float]:
            if self._use(contestant.network):
                for _ in range(plan.warmup):
                    contestant.run()
            return take(contestant)

        rounds = measure(self._probe, plan, self._progress, contestants, on_its_network)
        if len(rounds) < plan.rounds:
            done = f"{len(rounds)} of {plan.rounds} rounds"
            self.notes.append(f"{done}: the cores were not {plan.only} to each other for {plan.patience_s:g} s")
        if not rounds:
            raise TimeoutError(self.notes[-1])
        return rounds

    def _cost(self, contestant: Contestant) -> dict[str, float]:
        return cost_for_all(self.job, contestant.run)

    def close(self) -> None:
        self._progress.close()
        if self._peers is not None:
            self._peers.close()
        hvd.shutdown()
        self.job.close()
