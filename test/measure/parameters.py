"""The parameters of a network from one rank to all, as before a training: `broadcast_parameters`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ringtrain as hvd
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of, milliseconds_text, spread_text
from ringtrain.bench.results import Result, Row
from ringtrain.bench.rounds import Array, Competitor
from ringtrain.bench.step import Gradients, add_model_flags


class Parameters:
    name = "parameters"
    help = "the parameters of a network from rank 0 to all"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_model_flags(parser)
        parser.add_argument("--link-gbit", type=float, metavar="X", help="speed of a host's link: adds its share")

    def measure(self, session: Session) -> list[Row]:
        session.init()
        parameters = Gradients(session)
        competitors = [Competitor(ringtrain_competitor.NAME, _broadcast, is_own=True)]
        competitors.append(Competitor("ringtrain, one array", _broadcast_as_one, is_own=True))
        for peer in session.peers():
            competitors += [_tensor_by_tensor(competitor) for competitor in peer.collective("broadcast")]
        value = session.job.gather(parameters.value)[0]
        contestants = session.admit(
            competitors,
            parameters.arrays,
            parameters.fill,
            lambda arrays: all(bool((array == value).all()) for array in arrays),
        )
        session.expect(1)
        return [Row(parameters.key, session.rounds(contestants))]

    def table(self, result: Result) -> list[str]:
        (row,) = result.rows
        link_gbit = result.arguments["link_gbit"]
        table = Table(["", "ms [min-max]", "times ringtrain's", "GB/s", *(["of link"] if link_gbit else [])], True)
        for name in row.competitors():
            time = row.spread(name)
            ratio = "" if name == ringtrain_competitor.NAME else spread_text(row.ratio(name, ringtrain_competitor.NAME))
            speed = row.key["bytes"] / time.median / 1e9
            share = [f"{8 * speed / link_gbit:.3f}"] if link_gbit else []
            table.add([name, milliseconds_text(time), ratio, f"{speed:.2f}", *share])
        subject = f"{row.key['model']}: {row.key['tensors']} parameters, {row.key['bytes'] / 1e6:.1f} MB"
        return [subject, "", *lines_of(table)]


def _broadcast(tensors: Sequence[Array]) -> Callable[[], Sequence[Array]]:
    def run() -> Sequence[Array]:
        hvd.broadcast_parameters(list(tensors))
        return tensors

    return run


def _broadcast_as_one(tensors: Sequence[Array]) -> Callable[[], Sequence[Array]]:
    """The aim: as many bytes in one operation."""
    whole = np.concatenate([tensor.reshape(-1) for tensor in tensors])

    def run() -> Sequence[Array]:
        hvd.broadcast_(whole, 0, name="whole")
        return [whole]

    return run


def _tensor_by_tensor(competitor: Competitor) -> Competitor:
    def prepare(tensors: Sequence[Array]) -> Callable[[], Any]:
        runs = [competitor.prepare([tensor]) for tensor in tensors]

        def run() -> Sequence[Array]:
            for one in runs:
                one()
            return tensors

        return run

    return Competitor(f"{competitor.name}, tensor by tensor", prepare)
