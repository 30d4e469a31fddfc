"""torch.distributed on the backend "ringtrain": its operations over some sizes, and training steps, beside gloo."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.arguments import parse_bytes, some_of
from ringtrain.bench.collectives import iterations_for
from ringtrain.bench.measurement import CannotMeasure, Session
from ringtrain.bench.report import Table, lines_of, spread_text
from ringtrain.bench.results import Result, Row
from ringtrain.bench.rounds import Competitor, Contestant, Distribution, cost_for_all
from ringtrain.bench.torch_step import add_training_flags, measure_model, subject_of, table_of

OPERATIONS = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "all_to_all_single",
    "send_recv",
    "all_reduce_in_pairs",
)
TRAININGS = ("ddp", "fsdp")
_GLOO = "gloo"


class C10d:
    name = "c10d"
    library = "torch"
    peers = (_GLOO, "mpi")
    help = 'torch.distributed on the backend "ringtrain", beside gloo: its operations, and steps of DDP and FSDP2'

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add, operations, trainings = (
            parser.add_argument,
            some_of(OPERATIONS, "operations"),
            some_of(TRAININGS, "trainings"),
        )
        add("--operations", type=operations, default=",".join(OPERATIONS), metavar="LIST")
        add("--sizes", type=_sizes, default="4,4K,256K,8M,32M", metavar="LIST", help="default: %(default)s")
        add("--trainings", type=trainings, default=",".join(TRAININGS), metavar="LIST", help="%(default)s")
        add_training_flags(parser, "resnet50")

    def measure(self, session: Session) -> list[Row]:
        if len(session.arguments.network) > 1:
            raise CannotMeasure("c10d measures one network at a time: groups end with the job that they are made in")
        if session.job.size == 1:
            raise CannotMeasure("c10d needs at least two ranks: use -np 2")
        session.init()
        session.peers()
        # torch need not be installed for the other measurements
        from ringtrain.bench import torch_groups as groups

        arguments = session.arguments
        session.expect(
            len(arguments.operations) * len(arguments.sizes) + len(arguments.trainings) * len(arguments.models)
        )
        with groups.opened(session.job) as opened:
            rows = [
                _measure_operation(session, opened, operation, size)
                for operation in arguments.operations
                for size in arguments.sizes
            ]
            for training in arguments.trainings:
                distribute = functools.partial(groups.distribution, training)
                of_groups = [Distribution(name, distribute(group)) for name, group in opened.items()]
                floor = Distribution(_floor_of(training), distribute(groups.of_this_rank()))
                rows += [_measure_training(session, training, model, of_groups, floor) for model in arguments.models]
        return rows

    def table(self, result: Result) -> list[str]:
        rows = [row for row in result.rows if "operation" in row.key]
        lines = _lines_of_operations(rows) if rows else []
        for row in result.rows:
            if "training" in row.key:
                training = row.key["training"]
                lines += ["", f"{training}, {subject_of(row)}", "", *lines_of(table_of(row, _floor_of(training)))]
        return lines


def _measure_operation(session: Session, opened: dict[str, Any], operation: str, size: int) -> Row:
    from ringtrain.bench import torch_groups as groups

    job = session.job
    data = groups.Data(operation, max(1, size // 4), job.rank, job.size)
    own = ringtrain_competitor.NAME
    competitors = [
        Competitor(name, functools.partial(groups.prepare, operation, data, group), is_own=name == own)
        for name, group in opened.items()
    ]
    kind = groups.OF_MPI.get(operation)
    for peer in session.peers():
        if kind is not None and not groups.is_of_torch(peer):
            competitors += peer.collective(kind)
    contestants = session.admit(competitors, [data.array], data.fill, data.is_right)
    data.clear()  # sums of sums would overflow
    iterations = iterations_for(data.bytes)

    def sample(contestant: Contestant) -> dict[str, float]:
        return cost_for_all(job, contestant.run, iterations)

    return Row({"operation": operation, "bytes": data.bytes}, session.rounds(contestants, sample))


def _measure_training(
    session: Session, training: str, model: str, distributions: list[Distribution], floor: Distribution
) -> Row:
    row = measure_model(session, model, distributions, [floor])
    return Row({"training": training, **row.key}, row.rounds)


def _floor_of(training: str) -> str:
    """The same in a group of one rank: copies to and from buckets, for example, and no communication."""
    return f"{training} of one rank"


def _lines_of_operations(rows: list[Row]) -> list[str]:
    own = ringtrain_competitor.NAME
    peers = list(dict.fromkeys(name for row in rows for name in row.competitors() if name != own))
    table = Table(["", "bytes", "us", "min-max", *peers], first_is_text=True)
    for row in rows:
        time = row.spread(own)
        ratios = [spread_text(row.ratio(peer, own)) if peer in row.competitors() else "" for peer in peers]
        least_most = f"{1e6 * time.least:.1f}-{1e6 * time.most:.1f}"
        table.add([row.key["operation"], str(row.key["bytes"]), f"{1e6 * time.median:.1f}", least_most, *ratios])
    return [*lines_of(table), *(["A peer's column: its time / ringtrain's, median [min-max]."] if peers else [])]


def _sizes(text: str) -> list[int]:
    return [parse_bytes(one) for one in text.split(",")]
