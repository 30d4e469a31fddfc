"""How much the ranks say to agree on a step, among simulated ranks in this process: real coordinators, no MPI.

The first step announces all gradients; the steady one repeats it, when they are known.
"""

from __future__ import annotations

import argparse
import time

from harness.simulation import Request, Simulation

from ringtrain._core import OpKind
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of
from ringtrain.bench.results import Result, Round, Row, Values

_FIRST, _STEADY = "first", "steady"


class Negotiation:
    name = "negotiation"
    help = "messages and bytes of the busiest of many simulated ranks (no launcher)"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--max-ranks", type=int, default=1024, metavar="N", help="default: %(default)s")
        parser.add_argument("--tensors", type=int, default=161, metavar="N", help="in a step (default: %(default)s)")

    def measure(self, session: Session) -> list[Row]:
        if session.job.size > 1:
            raise RuntimeError("negotiation simulates its ranks: start it without a launcher and without -np")
        ranks, rows = 2, []
        while ranks <= session.arguments.max_ranks:
            rows.append(Row({"ranks": ranks}, [Round(_steps(ranks, session.arguments.tensors))]))
            ranks *= 2
        return rows

    def table(self, result: Result) -> list[str]:
        head = [f"{step} {what}" for step in (_STEADY, _FIRST) for what in ("messages", "bytes", "ms")]
        table = Table(["ranks", *head])
        for row in result.rows:
            cells = []
            for step in (_STEADY, _FIRST):
                values = row.rounds[0].values[step]
                cells += [f"{values['messages']:.0f}", f"{values['bytes']:.0f}", f"{1e3 * values['seconds']:.1f}"]
            table.add([str(row.key["ranks"]), *cells])
        return [*lines_of(table), "Messages and bytes are those of the busiest rank; all ranks share these CPUs."]


def _steps(ranks: int, tensors: int) -> Values:
    simulation = Simulation(ranks)
    gradients = [Request(OpKind.ALLREDUCE, f"gradient{index}", shape=[1024]) for index in range(tensors)]
    values: Values = {}
    for step in (_FIRST, _STEADY):
        messages, sent = simulation.messages_handled(), simulation.bytes_handled()
        begin = time.perf_counter()
        simulation.round([gradients] * ranks)
        values[step] = {
            "seconds": time.perf_counter() - begin,
            "messages": _most(simulation.messages_handled(), messages),
            "bytes": _most(simulation.bytes_handled(), sent),
        }
    return values


def _most(after: list[int], before: list[int]) -> float:
    return float(max(late - early for late, early in zip(after, before, strict=True)))
