"""The load of the busiest process in a job of very many ranks, by the real code.

Meetings: the process that serves them, see scale_rendezvous.py. Agreement: the Coordinator and the Ledger of rank 0,
in this process, with the messages that a tree of so many ranks brings. Rank 0 is the busiest rank: all others handle
fewer messages of the same kinds. One death: the Alarms of all ranks, one after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from harness.simulation import Cost, Crowd, Request, death

from measure import scale_rendezvous
from ringtrain._core import OpKind
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of
from ringtrain.bench.results import Result, Round, Row

# A second without progress, and the usual time before a warning.
_QUIET_S, _WARNING_S, _ANSWER_S = 1.1, 61.0, 3.0


class Scale:
    name = "scale"
    help = "load of rank 0 among a thousand ranks and more, simulated (no launcher)"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--ranks", type=int, nargs="+", default=[1024], metavar="N", help="default: %(default)s")
        operations = "in a step (default: %(default)s)"
        parser.add_argument("--operations", type=int, nargs="+", default=[161, 1000], metavar="N", help=operations)

    def measure(self, session: Session) -> list[Row]:
        if session.job.size > 1:
            raise RuntimeError("scale simulates its ranks: start it without a launcher and without -np")
        rows = []
        for ranks in session.arguments.ranks:
            for meeting in scale_rendezvous.measure(ranks):
                cost = Cost(meeting.seconds, meeting.messages, meeting.sent_bytes, int(1e6 * meeting.memory_mb), 0)
                rows.append(_row(ranks, 0, meeting.what, cost))
            rows.append(_row(ranks, 0, "one death", death(ranks)))
            for operations in session.arguments.operations:
                rows += [_row(ranks, operations, what, cost) for what, cost in rounds_of(ranks, operations)]
        return rows

    def table(self, result: Result) -> list[str]:
        table = Table(["ranks", "operations", "of the busiest process", "processor ms", "messages", "KB", "memory MB"])
        for row in result.rows:
            values = row.rounds[0].values["busiest"]
            ms, kilobytes, megabytes = 1e3 * values["seconds"], values["bytes"] / 1e3, values["peak_bytes"] / 1e6
            cells = [f"{ms:.1f}", f"{values['messages']:.0f}", f"{kilobytes:.0f}", f"{megabytes:.1f}"]
            table.add([str(row.key["ranks"]), str(row.key["operations"] or ""), str(row.key["what"]), *cells])
        return [*lines_of(table), "Messages are received and sent; bytes at a meeting are sent. Memory is the most."]


def rounds_of(ranks: int, operations: int) -> Iterator[tuple[str, Cost]]:
    """Each kind of round in a world of so many ranks, and the share of rank 0 in it."""
    step = [Request(OpKind.ALLREDUCE, f"gradient.layer{index}.weight", shape=[1024]) for index in range(operations)]
    half = operations // 2
    crowd = Crowd(ranks)
    yield "first step", crowd.settle(step)
    yield "repeated step", crowd.repeat(step)
    yield "<end>", crowd.settle([Request(OpKind.BARRIER, "<end>")])
    crowd = Crowd(ranks)
    crowd.settle(step)
    yield "join", crowd.settle([Request(OpKind.JOIN, "<join>", numbers=[0])])
    # every other rank waits for what the ranks beside it have not submitted
    crowd = Crowd(ranks)
    yield "first step of two stages", crowd.settle(step[:half], step[half:])
    crowd.say_blocked()
    crowd.pass_time(_QUIET_S)
    yield "deadlock", crowd.settle([])
    crowd = Crowd(ranks)
    crowd.settle(step[:half], step[half:])
    crowd.pass_time(_WARNING_S)
    yield "question about a stall", crowd.settle([])
    crowd.pass_time(_ANSWER_S)
    yield "warning about a stall", crowd.settle([])


def _row(ranks: int, operations: int, what: str, cost: Cost) -> Row:
    values = {name: float(value) for name, value in cost._asdict().items()}
    return Row({"ranks": ranks, "operations": operations, "what": what}, [Round({"busiest": values})])
