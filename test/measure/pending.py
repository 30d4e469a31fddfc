"""Many operations in flight: all are submitted under names of their own, then all are waited for.

The time for each of them must not grow with their number.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ringtrain as hvd
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of
from ringtrain.bench.results import Result, Row
from ringtrain.bench.rounds import Array, Competitor

_ELEMENTS = 4
_runs = itertools.count()


def _submitter(kind: str) -> Callable[[Array, str], Any]:
    """Returns the function that submits one operation."""
    kinds: dict[str, Callable[[Array, str], Any]] = {
        "allreduce": lambda array, name: hvd.allreduce_async_(array, op=hvd.Sum, name=name),
        "allgather": lambda array, name: hvd.allgather_async(array, name=name),
        "broadcast": lambda array, name: hvd.broadcast_async_(array, 0, name=name),
        "alltoall": lambda array, name: hvd.alltoall_async(array, name=name),
    }
    return kinds[kind]


def _competitor(kind: str, order: str) -> Competitor:
    submit = _submitter(kind)

    def prepare(tensors: Sequence[Array]) -> Callable[[], Any]:
        (rows,) = tensors
        places = list(range(len(rows)))
        if order == "other":
            np.random.default_rng(hvd.rank()).shuffle(places)

        def run() -> Any:
            run_number = next(_runs)
            handles = [submit(rows[place], f"{kind} {place} of {run_number}") for place in places]
            for handle in handles:
                result = hvd.synchronize(handle)
            return result

        return run

    return Competitor(ringtrain_competitor.NAME, prepare, is_own=True)


class Pending:
    name = "pending"
    help = "many operations in flight at a time: microseconds for each, for growing numbers of them"
    peers: tuple[str, ...] = ()

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--counts", type=int, nargs="+", default=[1000, 16_000, 50_000], metavar="N", help="default: %(default)s")
        add("--kind", choices=["allreduce", "allgather", "broadcast", "alltoall"], default="allreduce")
        add("--order", choices=["same", "other"], default="same", help="of the names on the ranks: default %(default)s")

    def measure(self, session: Session) -> list[Row]:
        session.init()
        counts = session.arguments.counts
        session.expect(len(counts))
        return [self._row(session, count) for count in counts]

    def _row(self, session: Session, count: int) -> Row:
        ranks = session.job.size
        rows = np.zeros((count, ranks * _ELEMENTS), np.float32)
        competitor = _competitor(session.arguments.kind, session.arguments.order)
        contestants = session.admit([competitor], [rows], lambda: rows.fill(0), lambda result: not np.any(result))
        return Row({"operations": count}, session.rounds(contestants))

    def table(self, result: Result) -> list[str]:
        table = Table(["operations", "", "us each", "min-max", "cpu us each"])
        for row in result.rows:
            for name in row.competitors():
                each = 1e6 * np.array(row.spread(name)) / row.key["operations"]
                cpu = 1e6 * row.spread(name, "cpu").median / row.key["operations"]
                cells = [f"{each[0]:.1f}", f"{each[1]:.1f}-{each[2]:.1f}", f"{cpu:.1f}"]
                table.add([str(row.key["operations"]), name, *cells])
        return lines_of(table)
