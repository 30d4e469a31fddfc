"""How long the host is kept by a step: all gradients submitted under cached names, and synchronised.

The GPU is idle when the host begins, and what it then does is not part of the time.
"""

from __future__ import annotations

import time

from measure.gpu.aim import Aim
from measure.gpu.library import Library
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of, spread_text
from ringtrain.bench.results import Row, Spread
from ringtrain.bench.rounds import Contestant
from ringtrain.bench.step import Gradients

_AIM = Aim("ringtrain's host time for each gradient", must=4, goal=1.5, unit="us")


class Submission:
    name = "submission"

    def why_not(self, session: Session, library: Library) -> str:
        way = session.facts[-1]["way"]
        return "" if way == "nccl" else f'the aim is that of NCCL, and arrays take the way "{way}" here'

    def measure(self, session: Session, library: Library) -> Row:
        gradients = Gradients(session, library.zeros, library.fill)
        # the peer has tensors of torch
        peers = session.peers() if library.name == "torch" else []
        competitors = [ringtrain_competitor.step(), *(one for peer in peers for one in peer.step())]
        contestants = session.admit(competitors, gradients.arrays, gradients.fill, gradients.are_averaged)
        job, steps = session.job, session.arguments.steps

        def sample(contestant: Contestant) -> dict[str, float]:
            seconds = 0.0
            for _ in range(steps):
                library.finish()
                job.barrier()
                begin = time.perf_counter()
                contestant.run()
                seconds += time.perf_counter() - begin
            library.finish()
            return {"seconds": max(job.gather(seconds)) / steps / len(gradients.arrays)}

        return Row({"part": self.name, **gradients.key}, session.rounds(contestants, sample))

    def table(self, row: Row) -> list[str]:
        table = Table(["", "us for each gradient [min-max]", "times ringtrain's"], first_is_text=True)
        for name in row.competitors():
            ratio = "" if name == ringtrain_competitor.NAME else spread_text(row.ratio(name, ringtrain_competitor.NAME))
            table.add([name, spread_text(_microseconds(row, name)), ratio])
        subject = f"host time to submit and synchronise {row.key['tensors']} gradients of {row.key['model']}"
        return [subject, "", *lines_of(table), "", _AIM.verdict(_microseconds(row, ringtrain_competitor.NAME))]


def _microseconds(row: Row, name: str) -> Spread:
    return Spread(*(1e6 * value for value in row.spread(name)))
