"""One rank is late in each step, while a thread of each rank computes: what does the waiting of the others cost?

In each round, and beside the compute threads: nobody communicates for as long as the delay; a step for which nobody is
late; one for which the last rank is late.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

from measure.arithmetic import Arithmetic
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of, milliseconds_text, spread_text
from ringtrain.bench.results import Result, Row, Spread
from ringtrain.bench.rounds import Contestant, seconds_of_all
from ringtrain.bench.step import Gradients, add_model_flags

_ALONE, _IN_TIME, _LATE = "nobody communicates", "in time", "late"


class ComputeThread:
    """A thread that does arithmetic all the time and remembers when it finished each unit."""

    def __init__(self) -> None:
        self._arithmetic = Arithmetic()
        self._finished: list[float] = []
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)

    def __enter__(self) -> ComputeThread:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_stopping = True
        self._thread.join()

    def units_between(self, begin: float, end: float) -> int:
        """Units finished between two times of `time.perf_counter`; earlier ones are forgotten."""
        finished, self._finished = self._finished, []
        return sum(begin <= moment < end for moment in finished)

    def _work(self) -> None:
        while not self._is_stopping:
            self._arithmetic.run(1)
            self._finished.append(time.perf_counter())


class Straggler:
    name = "straggler"
    help = "one rank is late in each step: throughput kept by those who compute beside it, time added"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_model_flags(parser)
        parser.add_argument("--delay-ms", type=float, default=20.0, metavar="MS", help="default: %(default)s")
        parser.add_argument("--steps", type=int, default=5, metavar="N", help="in each timing (default: %(default)s)")

    def measure(self, session: Session) -> list[Row]:
        session.init()
        job, delay_s = session.job, 1e-3 * session.arguments.delay_ms
        gradients = Gradients(session)
        competitors = [
            ringtrain_competitor.step(),
            *(competitor for peer in session.peers() for competitor in peer.step()),
        ]
        admitted = session.admit(competitors, gradients.arrays, gradients.fill, gradients.are_averaged)
        is_late = job.rank == job.size - 1
        contestants = [Contestant(_ALONE, lambda: time.sleep(delay_s))]
        for name, run, network in admitted:
            contestants.append(Contestant(f"{name}, {_IN_TIME}", run, network))
            contestants.append(Contestant(f"{name}, {_LATE}", _delayed(run, delay_s) if is_late else run, network))
        session.expect(1)
        with ComputeThread() as compute:

            def sample(contestant: Contestant) -> dict[str, float]:
                seconds, units = 0.0, 0
                for _ in range(session.arguments.steps):
                    job.barrier()
                    begin = time.perf_counter()
                    seconds += seconds_of_all(job, contestant.run) / session.arguments.steps
                    units += sum(job.gather(compute.units_between(begin, begin + delay_s)))
                return {"seconds": seconds, "units": float(units)}

            return [Row(gradients.key, session.rounds(contestants, sample))]

    def table(self, result: Result) -> list[str]:
        (row,) = result.rows
        delay_s = 1e-3 * result.arguments["delay_ms"]
        table = Table(["", "ms in time", "ms late", "ms added", "throughput kept"], first_is_text=True)
        for late in row.competitors():
            name, _, state = late.rpartition(", ")
            if state != _LATE:
                continue
            in_time = f"{name}, {_IN_TIME}"
            added = [
                one.values[late]["seconds"] - one.values[in_time]["seconds"] - delay_s
                for one in row.rounds
                if late in one.values
            ]
            kept = spread_text(row.ratio(late, _ALONE, "units"))
            times = [milliseconds_text(row.spread(one)) for one in (in_time, late)]
            table.add([name, *times, milliseconds_text(Spread.of(added)), kept])
        return lines_of(table)


def _delayed(run: Callable[[], object], delay_s: float) -> Callable[[], object]:
    def late() -> object:
        time.sleep(delay_s)
        return run()

    return late
