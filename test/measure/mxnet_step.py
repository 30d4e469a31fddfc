"""A training step of MXNet's models, beside the same step without any communication and through MXNet's own store.

The time by which a step is longer than one without communication is *exposed* communication.
"""

from __future__ import annotations

import argparse

from ringtrain.bench.measurement import Session
from ringtrain.bench.peers import OF_STORES
from ringtrain.bench.report import lines_of
from ringtrain.bench.results import Result, Row
from ringtrain.bench.rounds import ALONE, Contestant, seconds_of_all
from ringtrain.bench.torch_step import subject_of, table_of


class MxnetStep:
    name = library = "mxnet"
    help = "a training step of MXNet's models, beside a Trainer on its parameter server and without communication"
    peers = OF_STORES

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--models", default="resnet18_v1", metavar="LIST", help="of the zoo (default: %(default)s)")
        parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="of a rank (default: %(default)s)")
        parser.add_argument("--image-size", type=int, default=64, metavar="PIXELS", help="default: %(default)s")
        parser.add_argument("--steps", type=int, default=3, metavar="N", help="in each timing (default: %(default)s)")

    def measure(self, session: Session) -> list[Row]:
        session.init()
        has_servers = bool(session.peers())  # before MXNet is imported, which looks for them
        names = session.arguments.models.split(",")
        session.expect(len(names))
        return [_measure_model(session, name, has_servers) for name in names]

    def table(self, result: Result) -> list[str]:
        lines = []
        for row in result.rows:
            lines += [subject_of(row), "", *lines_of(table_of(row)), ""]
        return lines[:-1]


def _measure_model(session: Session, name: str, has_servers: bool) -> Row:
    from measure import mxnet_training as training

    task = training.Task(name, session.arguments)
    runs = {kind: task.train(kind) for kind in training.kinds(has_servers)}
    task.check(runs)
    contestants = [Contestant(kind, run) for kind, run in runs.items()]

    def sample(contestant: Contestant) -> dict[str, float]:
        steps = session.arguments.steps
        return {"seconds": sum(seconds_of_all(session.job, contestant.run) for _ in range(steps)) / steps}

    assert ALONE in runs
    return Row(task.key, session.rounds(contestants, sample))
