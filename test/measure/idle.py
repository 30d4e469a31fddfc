"""The cost of a job while it does nothing."""

from __future__ import annotations

import argparse
import time

import numpy as np

import ringtrain as hvd
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of
from ringtrain.bench.results import Result, Round, Row


class Idle:
    name = "idle"
    help = "processor time of each rank while nothing is submitted"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="how long (default: %(default)s)")

    def measure(self, session: Session) -> list[Row]:
        session.init()
        hvd.allreduce(np.ones(1), name="idle")
        time.sleep(0.2)  # the engine falls asleep
        before = time.process_time()
        time.sleep(session.arguments.seconds)
        used = time.process_time() - before
        return [
            Row({"rank": rank}, [Round({ringtrain_competitor.NAME: {"seconds": seconds}})])
            for rank, seconds in enumerate(session.job.gather(used))
        ]

    def table(self, result: Result) -> list[str]:
        table = Table(["rank", "CPU seconds", "of a core"])
        for row in result.rows:
            used = row.spread(ringtrain_competitor.NAME).median
            table.add([str(row.key["rank"]), f"{used:.4f}", f"{used / result.arguments['seconds']:.2%}"])
        return lines_of(table)
