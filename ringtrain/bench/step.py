"""The communication of a training step: all gradients of a network, averaged over the ranks where they are.

The floor is measured in the same rounds: all ranks at the same time read and write their own gradients once.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.arithmetic import floor
from ringtrain.bench.measurement import CannotMeasure, Session
from ringtrain.bench.models import MODELS, Shape
from ringtrain.bench.report import Table, lines_of, milliseconds_text, spread_text
from ringtrain.bench.results import Result, Row
from ringtrain.bench.rounds import Array, Contestant

# --- how much memory ringtrain itself takes in this process -----------------------------------------------------------


# Files that never had a name, which no MPI has there; or had one, where ranks cannot see each other's processes.
_SEGMENT = re.compile(r"/dev/shm/(#\d+|ringtrain-\w+-\S+) \(deleted\)$")
_STAT_BLOCK_BYTES = 512


class OwnMemory(NamedTuple):
    """Bytes. `of_node` is the memory in use of the node's shared segments; `segments` the part of this process, each
    page divided by how many processes have it; `private` what the process itself has."""

    of_node: int
    segments: int
    private: int

    @classmethod
    def read(cls) -> OwnMemory:
        """Returns what the kernel says now."""
        segments = 0
        is_segment = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            name, *values = line.split()
            if not name.endswith(":"):
                is_segment = _SEGMENT.search(line) is not None
            elif is_segment and name == "Pss:":
                segments += _bytes(values)
        return cls(_of_node(), segments, _private())


def _of_node() -> int:
    """Not the size of the segments: the arena has as much address space for each rank as the host has memory."""
    blocks = {}
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this folder is closed, and those of other threads may be
            if _SEGMENT.match(os.readlink(file)):
                status = file.stat()
                blocks[status.st_dev, status.st_ino] = status.st_blocks
    return sum(blocks.values()) * _STAT_BLOCK_BYTES


def _private() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, *values = line.split()
        if name == "RssAnon:":
            return _bytes(values)
    raise RuntimeError("/proc/self/status has no RssAnon")


def _bytes(values: list[str]) -> int:
    number, unit = values
    assert unit == "kB"
    return int(number) << 10


# --- the step ---------------------------------------------------------------------------------------------------------


FLOOR = "floor"
_STEPS_BEFORE_MEMORY = 3


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=tuple(MODELS), default="resnet50", help="default: %(default)s")
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")


class Gradients:
    """The gradients of a model, and data whose average is known. `zeros` and `fill_array`: of the array library.

    All are `value` on this rank, and `sum` is that of all ranks.
    """

    def __init__(
        self,
        session: Session,
        zeros: Callable[[Shape, np.dtype[Any]], Any] = np.zeros,
        fill_array: Callable[[Any, int], None] = np.ndarray.fill,
    ) -> None:
        dtype = ringtrain_competitor.dtype_of(session.arguments.dtype)
        shapes = MODELS[session.arguments.model]()
        ranks = self._ranks = session.job.size
        self.arrays: list[Array] = [zeros(shape, dtype) for shape in shapes]
        self.bytes = sum(array.nbytes for array in self.arrays)
        self.key = {"model": session.arguments.model, "tensors": len(shapes), "bytes": self.bytes}
        self._fill_array = fill_array
        self.value = 1 + session.job.rank % 4
        self.sum = sum(1 + rank % 4 for rank in range(ranks))
        self.fill()

    def fill(self) -> None:
        for array in self.arrays:
            self._fill_array(array, self.value)

    def are_averaged(self, results: Any) -> bool:
        """Within the precision of the dtype."""
        return _all_are(results, self.sum / self._ranks)

    def are_summed(self, results: Any) -> bool:
        """Likewise."""
        return _all_are(results, self.sum)


def _all_are(arrays: Any, value: float) -> bool:
    tolerance = value / 100
    return all(abs(float(extreme) - value) <= tolerance for array in arrays for extreme in (array.min(), array.max()))


class Step:
    name = "step"
    help = "all gradients of a network, averaged in place"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_model_flags(parser)
        parser.add_argument("--shared", action="store_true", help="also in arrays made by ringtrain.empty")

    def measure(self, session: Session) -> list[Row]:
        arguments = session.arguments
        if arguments.shared and len(arguments.network) > 1:
            raise CannotMeasure("--shared needs one --network: arrays of ringtrain.empty belong to one init()")
        gradients = Gradients(session)
        before = OwnMemory.read()
        session.init()
        own = session.admit([ringtrain_competitor.step()], gradients.arrays, gradients.fill, gradients.are_averaged)
        session.facts.append(_own_memory(session, own[-1], before))

        others = [competitor for peer in session.peers() for competitor in peer.step()]
        if arguments.shared:
            others.insert(0, ringtrain_competitor.step_in_shared_arrays())
        admitted = session.admit(others, gradients.arrays, gradients.fill, gradients.are_averaged)
        session.expect(1)
        contestants = [*own, Contestant(FLOOR, floor(gradients.arrays)), *admitted]
        return [Row(gradients.key, session.rounds(contestants))]

    def table(self, result: Result) -> list[str]:
        (row,) = result.rows
        ranks = result.environment["ranks"]
        bus_bytes = row.key["bytes"] * 2 * (ranks - 1) / ranks
        has_cpu = result.arguments["cpu"]
        cpu = ["cpu ms"] if has_cpu else []
        table = Table(["", "ms [min-max]", *cpu, "times ringtrain's", "of the floor", "busbw GB/s"], first_is_text=True)
        for name in row.competitors():
            time = row.spread(name)
            ratio = "" if name == ringtrain_competitor.NAME else spread_text(row.ratio(name, ringtrain_competitor.NAME))
            cells = [name, milliseconds_text(time)]
            if has_cpu:
                cells.append(milliseconds_text(row.spread(name, "cpu")))
            if name == FLOOR:
                table.add([*cells, ratio, "", ""])
                continue
            share = spread_text(row.ratio(FLOOR, name))
            table.add([*cells, ratio, share, f"{bus_bytes / time.median / 1e9:.2f}"])
        megabytes = f"{row.key['bytes'] / 1e6:.1f} MB"
        subject = f"{row.key['model']}: {row.key['tensors']} gradients, {megabytes} {result.arguments['dtype']}"
        return [subject, "", *lines_of(table), "", _memory_text(result.facts)]


def _own_memory(session: Session, contestant: Contestant, before: OwnMemory) -> dict[str, Any]:
    """The most of any rank, after some steps of ringtrain and before any peer is loaded."""
    for _ in range(_STEPS_BEFORE_MEMORY):
        contestant.run()
    session.job.barrier()
    after = OwnMemory.read()
    growth = OwnMemory(*(late - early for late, early in zip(after, before, strict=True)))
    of_ranks = [OwnMemory(*of_rank) for of_rank in session.job.gather(growth)]
    return {name: max(getattr(one, name) for one in of_ranks) for name in OwnMemory._fields}


def _memory_text(launches: list[dict[str, Any]]) -> str:
    most = [max(fact[name] for fact in launches) / (1 << 20) for name in OwnMemory._fields]
    of_node, segments, private = most
    return (
        f"memory of ringtrain itself, for each rank: {segments + private:.1f} MiB, of which {private:.1f} private "
        f"and {segments:.1f} its share of the node's {of_node:.1f} of segments"
    )
