"""A training step of torch models, beside the same step without any communication.

All ranks take each step at the same time, also those without communication: they share the memory and the clock of the
processor then, too. The time by which a step is longer than one without communication is *exposed* communication.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.arguments import some_of
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of, milliseconds_text, spread_text
from ringtrain.bench.results import Result, Row, Spread
from ringtrain.bench.rounds import ALONE, Competitor, Contestant, Distribution, seconds_of_all

MODELS = ("resnet18", "resnet50", "transformer")


class TorchStep:
    name = library = "torch"
    help = "a training step of torch models, beside DDP and beside the same step without communication"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_training_flags(parser, ",".join(MODELS))

    def measure(self, session: Session) -> list[Row]:
        session.init()
        of_peers = [one for peer in session.peers() for one in peer.training()]
        session.expect(len(session.arguments.models))
        # torch need not be installed for the other measurements
        from ringtrain.bench import torch_training as training

        distributions = [*training.distributions(), *of_peers]
        return [measure_model(session, name, distributions) for name in session.arguments.models]

    def table(self, result: Result) -> list[str]:
        lines = []
        for row in result.rows:
            lines += [subject_of(row), "", *lines_of(table_of(row)), ""]
        return lines[:-1]


def add_training_flags(parser: argparse.ArgumentParser, models: str) -> None:
    add = parser.add_argument
    add("--models", type=some_of(MODELS, "models", False), default=models, metavar="LIST", help="%(default)s")
    add("--batch-size", type=int, default=8, metavar="N", help="of a rank (default: %(default)s)")
    add("--image-size", type=int, default=64, metavar="PIXELS", help="default: %(default)s")
    add("--sequence-length", type=int, default=64, metavar="TOKENS", help="default: %(default)s")
    add("--steps", type=int, default=3, metavar="N", help="in each timing (default: %(default)s)")


def measure_model(
    session: Session, name: str, distributions: Sequence[Distribution], floors: Sequence[Distribution] = ()
) -> Row:
    """A model that is trained in these ways in turn, the first of them ringtrain's, and without communication.

    `floors`: ways that average nothing, such as the wrapper of a peer for one rank.
    """
    # torch need not be installed for the other measurements
    from ringtrain.bench import torch_training as training

    task = training.Task(name, session.arguments)
    alone = Contestant(ALONE, task.train(Distribution(ALONE, lambda model, optimizer: (model, optimizer))))
    averages = training.averages_of(alone.run())
    admitted = session.admit(
        [_competitor(task, one) for one in distributions],
        [],
        lambda: None,
        lambda gradients: training.are_close(gradients, averages),
    )

    def sample(contestant: Contestant) -> dict[str, float]:
        steps = session.arguments.steps
        return {"seconds": sum(seconds_of_all(session.job, contestant.run) for _ in range(steps)) / steps}

    alone_too = [Contestant(one.name, task.train(one)) for one in floors]
    return Row(task.key, session.rounds([*admitted[:1], alone, *alone_too, *admitted[1:]], sample))


def _competitor(task: Any, distribution: Distribution) -> Competitor:
    return Competitor(distribution.name, lambda _: task.train(distribution))


def table_of(row: Row, floor: str = "") -> Table:
    """`floor`: the name of one of these ways. The time beyond it is shown, too."""
    head = [
        "",
        "ms [min-max]",
        "times no communication",
        "times ringtrain's",
        "exposed ms",
        "exposed, times ringtrain's",
        *([f"ms beyond {floor}", "times ringtrain's"] if floor else []),
    ]
    table = Table(head, first_is_text=True)
    bases = [ALONE, *([floor] if floor else [])]
    for name in row.competitors():
        time = milliseconds_text(row.spread(name))
        to_own = "" if name == ringtrain_competitor.NAME else spread_text(row.ratio(name, ringtrain_competitor.NAME))
        to_alone = "" if name == ALONE else spread_text(row.ratio(name, ALONE))
        beyond = [text for base in bases for text in _texts_beyond(row, name, base)]
        table.add([name, time, to_alone, to_own, *beyond])
    return table


def _texts_beyond(row: Row, name: str, base: str) -> tuple[str, str]:
    if name in (ALONE, base):
        return "", ""
    beyond, of_own = _beyond(row, name, base), _beyond(row, ringtrain_competitor.NAME, base).median
    is_known = name != ringtrain_competitor.NAME and min(beyond.median, of_own) > 0
    return milliseconds_text(beyond), f"{beyond.median / of_own:.2f}" if is_known else ""


def _beyond(row: Row, name: str, base: str) -> Spread:
    """Seconds longer than that one of the same round."""
    rounds = [one.values for one in row.rounds if name in one.values]
    return Spread.of([values[name]["seconds"] - values[base]["seconds"] for values in rounds])


def subject_of(row: Row) -> str:
    inputs = "x".join(map(str, row.key["inputs"]))
    megabytes = f"{row.key['bytes'] / 1e6:.1f} MB"
    return f"{row.key['model']}: {row.key['tensors']} gradients, {megabytes}; {inputs} on each rank, one thread"
