"""A synthetic backward pass, whose gradients are submitted as it goes on.

Each layer is computed for a while, and then its gradient is submitted. From the last layer to the first, and the
first has the highest priority, since the next forward pass begins with it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import ringtrain as hvd
from measure.arithmetic import Arithmetic
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of, milliseconds_text, spread_text
from ringtrain.bench.results import Result, Row, Spread
from ringtrain.bench.rounds import Array, Contestant
from ringtrain.bench.step import Gradients, add_model_flags

_COMPUTE, _COMMUNICATE, _TOGETHER = "compute", "communicate", "together"


def add_backward_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument(
        "--layer-us", type=float, default=300.0, metavar="US", help="compute for each gradient (default: 300)"
    )


class Overlap:
    name = "overlap"
    help = "gradients submitted while a synthetic backward pass goes on"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_backward_flags(parser)

    def measure(self, session: Session) -> list[Row]:
        session.init()
        gradients = Gradients(session)
        session.admit([ringtrain_competitor.step()], gradients.arrays, gradients.fill, gradients.are_averaged)
        backward = Backward(gradients.arrays, 1e-6 * session.arguments.layer_us)
        contestants = [
            Contestant(_COMPUTE, backward.compute),
            Contestant(_COMMUNICATE, backward.communicate),
            Contestant(_TOGETHER, backward.run),
        ]
        session.expect(1)
        rows = [Row(gradients.key, session.rounds(contestants))]
        session.job.barrier()
        session.facts.append(backward.watch())
        return rows

    def table(self, result: Result) -> list[str]:
        (row,) = result.rows
        table = Table(["", "ms [min-max]"], first_is_text=True)
        for name in (_COMPUTE, _COMMUNICATE, _TOGETHER):
            table.add([name, milliseconds_text(row.spread(name))])
        hidden = Spread.of([_hidden_share(one.values) for one in row.rounds])
        return [
            *lines_of(table),
            f"hidden behind the computing: {spread_text(hidden)} of the communication",
            *map(_order_text, result.facts),
        ]


class Backward:
    """One rank's backward pass over some layers, one gradient each."""

    def __init__(self, gradients: Sequence[Array], layer_s: float) -> None:
        self._arithmetic = Arithmetic()
        self._units = self._arithmetic.units_for(layer_s)
        self._layers = [(index, f"layer{index}", gradient) for index, gradient in enumerate(gradients)][::-1]

    def compute(self) -> None:
        for _ in self._layers:
            self._arithmetic.run(self._units)

    def communicate(self) -> None:
        self._wait([self._submit(*layer) for layer in self._layers])

    def run(self) -> None:
        handles = []
        for layer in self._layers:
            self._arithmetic.run(self._units)
            handles.append(self._submit(*layer))
        self._wait(handles)

    def watch(self) -> dict[str, Any]:
        """A pass that asks which gradients are there, after each layer and all the time after the last one.

        Returns:
            `backward_s`: when the last gradient was submitted; `finished_s`: when each gradient was seen to be there,
            in the order of the parameters. Seconds from the beginning of the pass.
        """
        begin = time.perf_counter()
        pending: dict[int, hvd.Handle[Any]] = {}
        finished_s = [0.0] * len(self._layers)

        def look() -> None:
            for index in [index for index, handle in pending.items() if handle.poll()]:
                pending.pop(index).wait()
                finished_s[index] = time.perf_counter() - begin

        for layer in self._layers:
            self._arithmetic.run(self._units)
            pending[layer[0]] = self._submit(*layer)
            look()
        backward_s = time.perf_counter() - begin
        while pending:
            look()
        return {"backward_s": backward_s, "finished_s": finished_s}

    def _submit(self, index: int, name: str, gradient: Array) -> hvd.Handle[Any]:
        return hvd.allreduce_async_(gradient, name=name, priority=-index)

    def _wait(self, handles: Sequence[hvd.Handle[Any]]) -> None:
        for handle in handles:
            hvd.synchronize(handle)


def _hidden_share(values: dict[str, dict[str, float]]) -> float:
    compute, communicate, together = (values[name]["seconds"] for name in (_COMPUTE, _COMMUNICATE, _TOGETHER))
    return (compute + communicate - together) / communicate


def _order_text(fact: dict[str, Any]) -> str:
    finished_s, backward_s = fact["finished_s"], fact["backward_s"]
    early = sum(moment <= backward_s for moment in finished_s) / len(finished_s)
    after = 1e3 * (finished_s[0] - backward_s)
    last = 1e3 * (max(finished_s) - backward_s)
    return (
        f"{early:.0%} of the gradients were there when the backward pass ended; that of the first layer "
        f"{after:.2f} ms later, the last one {last:.2f} ms later"
    )
