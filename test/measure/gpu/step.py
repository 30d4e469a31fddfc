"""How long the GPU is kept by a step: all gradients of a network, averaged over the ranks where they are.

The GPU is kept busy first, so that the host is ahead of it as in training, and the time runs from when the GPU comes to
the step until it has all averages.
"""

from __future__ import annotations

from measure.gpu.aim import Aim
from measure.gpu.library import Library
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of, milliseconds_text, spread_text
from ringtrain.bench.results import Row
from ringtrain.bench.rounds import Contestant
from ringtrain.bench.step import Gradients


class Step:
    name = "step"

    def why_not(self, session: Session, library: Library) -> str:
        if library.name != "torch":
            return "it is measured beside torch.distributed, and needs --library torch"
        return "" if session.peers() else "it is measured beside torch.distributed with NCCL, which does not take part"

    def measure(self, session: Session, library: Library) -> Row:
        # torch need not be installed for the other parts
        from measure.torch.stopwatch import Stopwatch

        gradients = Gradients(session, library.zeros, library.fill)
        competitors = [ringtrain_competitor.step(), *(one for peer in session.peers() for one in peer.step())]
        contestants = session.admit(competitors, gradients.arrays, gradients.fill, gradients.are_averaged)
        job, steps = session.job, session.arguments.steps
        stopwatch = Stopwatch(1e-3 * session.arguments.lead_ms)

        def sample(contestant: Contestant) -> dict[str, float]:
            gpu_s = host_s = late_s = 0.0
            for _ in range(steps):
                job.barrier()
                of_ranks = job.gather(stopwatch.time(contestant.run))
                gpu_s += max(one.gpu_s for one in of_ranks) / steps
                host_s += max(one.host_s for one in of_ranks) / steps
                late_s = max(late_s, *(one.host_s - one.lead_s for one in of_ranks))
            return {"seconds": gpu_s, "host": host_s, "late": late_s}

        return Row({"part": self.name, **gradients.key}, session.rounds(contestants, sample))

    def table(self, row: Row) -> list[str]:
        table = Table(["", "GPU ms [min-max]", "times ringtrain's", "host ms [min-max]"], first_is_text=True)
        for name in row.competitors():
            ratio = "" if name == ringtrain_competitor.NAME else spread_text(row.ratio(name, ringtrain_competitor.NAME))
            host = milliseconds_text(row.spread(name, "host"))
            table.add([name, milliseconds_text(row.spread(name)), ratio, host])
        megabytes = f"{row.key['bytes'] / 1e6:.1f} MB"
        subject = f"GPU time of a step: {row.key['tensors']} gradients of {row.key['model']}, {megabytes}"
        verdicts = [
            Aim(f"ringtrain's GPU time, times that of {name}", must=1.1, goal=0.9).verdict(
                row.ratio(ringtrain_competitor.NAME, name)
            )
            for name in row.competitors()
            if name != ringtrain_competitor.NAME
        ]
        return [subject, "", *lines_of(table), *_late_hosts(row), "", *verdicts]


def _late_hosts(row: Row) -> list[str]:
    late = [name for name in row.competitors() if row.spread(name, "late").most > 0]
    if not late:
        return []
    return [f"The GPU had to wait for the host of {' and '.join(late)}: choose a larger --lead-ms."]
