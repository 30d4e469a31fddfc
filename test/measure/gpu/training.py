"""A training step of ResNet-50 on GPUs, in bfloat16 and channels_last, beside the same step without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from measure.gpu.aim import Aim
from measure.gpu.library import Library
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of, milliseconds_text, spread_text
from ringtrain.bench.results import Row
from ringtrain.bench.rounds import ALONE, Competitor, Contestant, Distribution, seconds_of_all

_AIM = Aim("ringtrain's step, times that without communication", must=1.02, goal=1.005, digits=3)


class Training:
    name = "training"

    def why_not(self, session: Session, library: Library) -> str:
        return "" if library.name == "torch" else "it trains a model of torch, and needs --library torch"

    def measure(self, session: Session, library: Library) -> Row:
        # torch need not be installed for the other parts
        from measure.torch import gpu_training

        task = gpu_training.Task(session.arguments)
        alone = Contestant(ALONE, task.train(Distribution(ALONE, lambda model, optimizer: (model, optimizer))))
        averages = gpu_training.averages_of(alone.run())
        distributions = [gpu_training.DISTRIBUTION, *(one for peer in session.peers() for one in peer.training())]
        admitted = session.admit(
            [Competitor(one.name, _preparing(task, one)) for one in distributions],
            [],
            lambda: None,
            lambda gradients: gpu_training.are_close(gradients, averages),
        )
        steps = session.arguments.steps

        def sample(contestant: Contestant) -> dict[str, float]:
            def run() -> None:
                for _ in range(steps):
                    contestant.run()
                library.finish()

            return {"seconds": seconds_of_all(session.job, run) / steps}

        row_key = {"part": self.name, **task.key, "ranks": session.job.size}
        return Row(row_key, session.rounds([*admitted[:1], alone, *admitted[1:]], sample))

    def table(self, row: Row) -> list[str]:
        table = Table(["", "ms [min-max]", "times no communication"], first_is_text=True)
        for name in row.competitors():
            ratio = "" if name == ALONE else spread_text(row.ratio(name, ALONE), 3)
            table.add([name, milliseconds_text(row.spread(name)), ratio])
        inputs = "x".join(map(str, row.key["inputs"]))
        subject = (
            f"training step of {row.key['model']} in bfloat16: {row.key['tensors']} gradients; {inputs} on each rank"
        )
        is_for_one = ["The aim is that of one rank."] if row.key["ranks"] > 1 else []
        return [
            subject,
            "",
            *lines_of(table),
            "",
            _AIM.verdict(row.ratio(ringtrain_competitor.NAME, ALONE)),
            *is_for_one,
        ]


def _preparing(task: Any, distribution: Distribution) -> Callable[[Any], Callable[[], Any]]:
    return lambda _: task.train(distribution)
