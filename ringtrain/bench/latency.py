"""Small allreduces under a cached name, one after another: how long does a single call take?"""

from __future__ import annotations

import argparse
import time

import numpy as np

from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.flags import parse_bytes
from ringtrain.bench.report import Table, lines_of, spread_text
from ringtrain.bench.results import Result, Row
from ringtrain.bench.rounds import Contestant
from ringtrain.bench.session import Session

# quantity in a round -> percentile of its calls
_PERCENTILES = {"seconds": 50, "p10": 10, "p99": 99, "min": 0}


class Latency:
    name = "latency"
    help = "single calls of a small cached allreduce_: median, p10, p99, min"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--min-bytes", type=parse_bytes, default="4", metavar="SIZE", help="default: %(default)s")
        parser.add_argument("--max-bytes", type=parse_bytes, default="64K", metavar="SIZE", help="default: %(default)s")
        parser.add_argument("--factor", type=int, default=4, help="from one size to the next (default: %(default)s)")
        parser.add_argument("--calls", type=int, default=1000, help="in each round (default: %(default)s)")

    def measure(self, session: Session) -> list[Row]:
        session.init()
        session.peers()
        sizes = [session.arguments.min_bytes]
        while sizes[-1] * session.arguments.factor <= session.arguments.max_bytes:
            sizes.append(sizes[-1] * session.arguments.factor)
        session.expect(len(sizes))
        return [self._row(session, size) for size in sizes]

    def _row(self, session: Session, size: int) -> Row:
        job, calls = session.job, session.arguments.calls
        array = np.empty(max(1, size // 4), np.float32)
        competitors = [ringtrain_competitor.collective("allreduce")]
        competitors += [competitor for peer in session.peers() for competitor in peer.collective("allreduce")]
        contestants = session.admit(
            competitors, [array], lambda: array.fill(1), lambda result: bool((result == job.size).all())
        )
        array.fill(0)  # sums of sums would overflow

        def sample(contestant: Contestant) -> dict[str, float]:
            job.barrier()
            marks = np.empty(calls + 1)
            used = time.process_time()
            marks[0] = time.perf_counter()
            for call in range(calls):
                contestant.run()
                marks[call + 1] = time.perf_counter()
            used = (time.process_time() - used) / calls
            own_values = np.percentile(np.diff(marks), list(_PERCENTILES.values())).tolist()
            values, cpu = zip(*job.gather((own_values, used)), strict=True)
            slowest = np.max(values, axis=0).tolist()
            return {**dict(zip(_PERCENTILES, slowest, strict=True)), "cpu": sum(cpu)}

        return Row({"bytes": array.nbytes}, session.rounds(contestants, sample))

    def table(self, result: Result) -> list[str]:
        has_cpu = result.arguments["cpu"]
        cpu = ["cpu us"] if has_cpu else []
        table = Table(["bytes", "", "median us [min-max]", "p10", "p99", "min", *cpu, "times ringtrain's"])
        for row in result.rows:
            for name in row.competitors():
                median = 1e6 * np.array(row.spread(name))
                others = [f"{1e6 * row.spread(name, quantity).median:.2f}" for quantity in ("p10", "p99", "min")]
                if has_cpu:
                    others.append(f"{1e6 * row.spread(name, 'cpu').median:.2f}")
                ratio = (
                    "" if name == ringtrain_competitor.NAME else spread_text(row.ratio(name, ringtrain_competitor.NAME))
                )
                cells = [f"{median[0]:.2f} [{median[1]:.2f}-{median[2]:.2f}]", *others, ratio]
                table.add([str(row.key["bytes"]), name, *cells])
        return [*lines_of(table), "Each value is the median over the rounds of that of the calls of a round."]
