"""A training step of JAX models, one compiled program, beside the same step without any communication.

The time by which a step is longer than one without communication is *exposed* communication. Then JAX's own sharding,
carried by ringtrain, beside gloo: sums of several sizes, and a training step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ringtrain.bench import peers, ringtrain_competitor
from ringtrain.bench.arguments import some_of
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of, milliseconds_text, spread_text
from ringtrain.bench.results import Result, Row
from ringtrain.bench.rounds import ALONE, Competitor, Contestant, seconds_of_all

peers.MODULES |= {"jax-gloo": "measure.jax.gloo", "mpi4jax": "measure.jax.over_mpi4jax"}

MODELS = ("mlp", "large")
_SMALL = "4 bytes"
_LONE = "one rank"


@runtime_checkable
class HasSharding(Protocol):
    """A peer that carries JAX's own sharding."""

    def jax_sharding(self, program: str, name: str, times: int) -> list[Competitor]:
        """Its way to run a program of `measure.jax.sharding`."""


@runtime_checkable
class HasJax(Protocol):
    """A peer that averages gradients inside jit."""

    def jax_training(self, task: Any) -> list[Competitor]:
        """Its ways to train the model of a `measure.jax.training.Task`."""


class JaxStep:
    name = library = "jax"
    peers = ("jax-gloo", "mpi4jax")
    help = "a training step of JAX models, and JAX's own sharding, beside jax.distributed with gloo and mpi4jax"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--models",
            type=some_of(MODELS, "models", False),
            default=",".join(MODELS),
            metavar="LIST",
            help="%(default)s",
        )
        parser.add_argument("--steps", type=int, default=3, metavar="N", help="in each timing (default: %(default)s)")

    def measure(self, session: Session) -> list[Row]:
        from ringtrain.jax import distributed  # before peers import JAX

        present = session.peers()
        session.init()
        distributed.init()
        models = session.arguments.models
        works = _works_of_sharding(models, session.arguments.steps) if session.job.size > 1 else []
        session.expect(len(models) + 2 + len(works))
        measured = [_measure_small(session), _measure_lone(session)]
        with_jax = [peer for peer in present if isinstance(peer, HasJax)]
        measured += [_measure_model(session, name, with_jax) for name in models]
        with_sharding = [peer for peer in present if isinstance(peer, HasSharding)]
        return [*measured, *(_measure_sharding(session, work, with_sharding) for work in works)]

    def table(self, result: Result) -> list[str]:
        lines = []
        for row in result.rows:
            lines += [_subject(row), "", *lines_of(_table_of(row)), ""]
        return lines[:-1]


def _measure_small(session: Session) -> Row:
    # JAX need not be installed for the other measurements
    from measure.jax import training

    contestants = [Contestant(name, call) for name, call in training.small_calls().items()]
    for contestant in contestants:
        contestant.run()
    return Row({"model": _SMALL}, session.rounds(contestants, lambda one: _seconds(session, one, 50)))


def _measure_lone(session: Session) -> Row:
    from measure.jax import training

    calls = training.lone_calls(session.job.rank, session.job.size)
    contestants = [Contestant(name, call) for name, call in calls.items()]
    for contestant in contestants:
        contestant.run()
    key = {"model": _LONE, "calls": training.LONE_CALLS}
    return Row(key, session.rounds(contestants, lambda one: _seconds(session, one, 20)))


def _measure_model(session: Session, name: str, peers: Sequence[HasJax]) -> Row:
    from measure.jax import training

    task = training.Task(name, session.job.rank)
    expected = task.first_step()
    own = training.own_competitor(task, ringtrain_competitor.NAME)
    admitted = session.admit(
        [own, *(one for peer in peers for one in peer.jax_training(task))],
        [],
        lambda: None,
        lambda params: training.are_close(params, expected),
    )
    alone = Contestant(ALONE, task.train(lambda gradients: gradients))
    alone.run()
    contestants = [*admitted[:1], alone, *admitted[1:]]
    return Row(task.key, session.rounds(contestants, lambda one: _seconds(session, one, session.arguments.steps)))


def _works_of_sharding(models: Sequence[str], steps: int) -> list[tuple[str, str, int]]:
    """Returns program, name and how often it is run in one timing."""
    from measure.jax import sharding

    sums = [("sum_arrays", name, sharding.times_of(name)) for name in sharding.SUMS]
    return [*sums, *(("train", model, steps) for model in models)]


def _measure_sharding(session: Session, work: tuple[str, str, int], peers: Sequence[HasSharding]) -> Row:
    from measure.jax import sharding, training

    program, name, times = work
    job = session.job
    if program == "train":
        expected = training.Task(name, job.rank).first_step()
    total = job.size * (job.size + 1) / 2

    def is_right(results: Any) -> bool:
        if program == "train":
            return training.are_close(results, expected)
        return all(ends == (total, total) for ends in results)

    own = Competitor(ringtrain_competitor.NAME, lambda _: getattr(sharding, program)(name, times))
    competitors = [own, *(one for peer in peers for one in peer.jax_sharding(program, name, times))]
    contestants = session.admit(competitors, [], lambda: None, is_right)

    def seconds(contestant: Contestant) -> dict[str, float]:
        mean = seconds_of_all(job, contestant.run) / times
        return {"seconds": mean, "shortest": mean}

    key = {"model": f"step of {name}" if program == "train" else name, "sharding": True}
    return Row(key, session.rounds(contestants, seconds))


def _seconds(session: Session, contestant: Contestant, times: int) -> dict[str, float]:
    seconds = [seconds_of_all(session.job, contestant.run) for _ in range(times)]
    return {"seconds": sum(seconds) / times, "shortest": min(seconds)}


def _table_of(row: Row) -> Table:
    table = Table(["", "ms [min-max]", "shortest ms", "ringtrain's time / this", "of the shortest"], first_is_text=True)
    first = row.competitors()[0]
    for name in row.competitors():
        shortest = row.spread(name, "shortest").least
        cells = [name, milliseconds_text(row.spread(name)), f"{1e3 * shortest:.3f}"]
        if name != first:
            cells += [spread_text(row.ratio(first, name)), f"{row.spread(first, 'shortest').least / shortest:.2f}"]
        table.add([*cells, *[""] * (5 - len(cells))])
    return table


def _subject(row: Row) -> str:
    if row.key["model"] == _SMALL:
        return "an allreduce of 4 bytes"
    if row.key["model"] == _LONE:
        return f"{row.key['calls']} calls of a program of one rank, as in a job of one"
    if "sharding" in row.key:
        return f"JAX's own sharding: {row.key['model']}"
    inputs = "x".join(map(str, row.key["inputs"]))
    megabytes = f"{row.key['bytes'] / 1e6:.1f} MB"
    return f"{row.key['model']}: {row.key['tensors']} gradients, {megabytes}; {inputs} on each rank"
