"""The cost of the timeline: the same synthetic training step with it and without it."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import ringtrain as hvd
from measure.overlap import Backward, add_backward_flags
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of, milliseconds_text, spread_text
from ringtrain.bench.results import Result, Row
from ringtrain.bench.rounds import Contestant, seconds_of_all
from ringtrain.bench.step import Gradients

_WITHOUT, _WITH = "without", "with a timeline"


class TimelineCost:
    name = "timeline"
    help = "a synthetic training step with a timeline and without"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_backward_flags(parser)
        parser.add_argument("--steps", type=int, default=10, metavar="N", help="in each timing (default: %(default)s)")

    def measure(self, session: Session) -> list[Row]:
        session.init()
        gradients = Gradients(session)
        session.admit([ringtrain_competitor.step()], gradients.arrays, gradients.fill, gradients.are_averaged)
        backward = Backward(gradients.arrays, 1e-6 * session.arguments.layer_us)
        session.expect(1)
        with tempfile.TemporaryDirectory(prefix="ringtrain-bench-") as name:
            # every rank writes its part beside the file of rank 0
            path = Path(session.job.gather(name)[0]) / "timeline.json"

            def sample(contestant: Contestant) -> dict[str, float]:
                if contestant.name == _WITH:
                    hvd.start_timeline(str(path))
                steps = session.arguments.steps
                seconds = sum(seconds_of_all(session.job, contestant.run) for _ in range(steps)) / steps
                hvd.stop_timeline()
                return {"seconds": seconds}

            contestants = [Contestant(_WITHOUT, backward.run), Contestant(_WITH, backward.run)]
            rows = [Row(gradients.key, session.rounds(contestants, sample))]
            session.job.barrier()  # the folder is there until nobody writes to it
        return rows

    def table(self, result: Result) -> list[str]:
        (row,) = result.rows
        table = Table(["", "ms [min-max]", "times without"], first_is_text=True)
        table.add([_WITHOUT, milliseconds_text(row.spread(_WITHOUT)), ""])
        table.add([_WITH, milliseconds_text(row.spread(_WITH)), spread_text(row.ratio(_WITH, _WITHOUT), 3)])
        return [f"{row.key['tensors']} gradients, computed one after the other", "", *lines_of(table)]
