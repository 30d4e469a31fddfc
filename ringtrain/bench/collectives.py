"""The collectives over a range of sizes: one row each, with the formulas of nccl-tests.

`bytes` is what nccl-tests calls the size: the larger one of what a rank puts in and what it gets out.
Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.arguments import add_sizes
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of, spread_text
from ringtrain.bench.results import Result, Row, Spread
from ringtrain.bench.rounds import Array, Contestant, cost_for_all

# Small operations are repeated until about so many bytes have gone through, in one timing.
_BYTES_OF_TIMING = 4 << 20
_MOST_ITERATIONS = 100


def _usual_share(ranks: int) -> float:
    """Returns the share that each rank sends: all but its own part."""
    return (ranks - 1) / ranks


@dataclass(frozen=True)
class Collective:
    """One collective: how much of it there is for each rank, and what comes out.

    expected: what the parts of equal length of the result are full of, if the input of each rank is full of a value.
    is_split: each rank has an equal part of the values, of which there must be a multiple of the ranks, and
        gives_part: puts only that part in.
    bus_factor: bytes that the hardware has to move for each byte of the size, among so many ranks.
    ranks_cross: every rank of a host has bytes of its own for the other hosts.
    """

    name: str
    expected: Callable[[list[int]], list[int]]
    is_split: bool = True
    gives_part: bool = False
    bus_factor: Callable[[int], float] = _usual_share
    ranks_cross: bool = False

    def link_factor(self, ranks: int, hosts: int) -> float:
        """Bytes that have to leave or enter a host for each byte of the size, if it has one link and all share it."""
        return self.bus_factor(hosts) * (ranks / hosts if self.ranks_cross else 1)


COLLECTIVES = (
    Collective(
        "allreduce", lambda values: [sum(values)], is_split=False, bus_factor=lambda ranks: 2 * _usual_share(ranks)
    ),
    Collective("allgather", lambda values: values, gives_part=True),
    Collective("broadcast", lambda values: values[:1], is_split=False, bus_factor=lambda ranks: 1.0),
    Collective("alltoall", lambda values: values, ranks_cross=True),
    Collective("reducescatter", lambda values: [sum(values)]),
)


class Sweep:
    """The subcommand of one collective."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self.name = collective.name
        self.help = f"{collective.name} of one array, over a range of sizes"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_sizes(parser, "64M")
        parser.add_argument("--dtype", default="float32", help="default: %(default)s")
        if self.name == "allreduce":
            parser.add_argument(
                "--compression", choices=tuple(ringtrain_competitor.COMPRESSIONS), help="beside the one without"
            )
        parser.add_argument("--link-gbit", type=float, metavar="X", help="speed of a host's link: adds its share")

    def measure(self, session: Session) -> list[Row]:
        session.init()
        session.peers()
        dtype = ringtrain_competitor.dtype_of(session.arguments.dtype)
        step = session.job.size if self._collective.is_split else 1
        counts = [step * parts for parts in _ascending(session.arguments, dtype.itemsize * step)]
        session.expect(len(counts))
        return [self._row(session, count, dtype) for count in counts]

    def _row(self, session: Session, count: int, dtype: np.dtype[Any]) -> Row:
        job = session.job
        array = np.empty(count // job.size if self._collective.gives_part else count, dtype)
        values = [1 + rank % 4 for rank in range(job.size)]  # their sums are exact in every dtype
        competitors = [ringtrain_competitor.collective(self.name)]
        compression = getattr(session.arguments, "compression", None)
        if compression:
            values = [int(local_rank == 0) for local_rank in job.gather(job.local_rank)]  # 1 on each host
            competitors = ringtrain_competitor.compressed_allreduce(compression)
        expected = self._collective.expected(values)
        competitors += [competitor for peer in session.peers() for competitor in peer.collective(self.name)]
        contestants = session.admit(
            competitors, [array], lambda: array.fill(values[job.rank]), lambda result: _is_full_of(result, expected)
        )
        array.fill(0)  # sums of sums would overflow
        size = count * dtype.itemsize
        iterations = iterations_for(size)

        def sample(contestant: Contestant) -> dict[str, float]:
            return cost_for_all(job, contestant.run, iterations)

        return Row({"bytes": size}, session.rounds(contestants, sample))

    def table(self, result: Result) -> list[str]:
        ranks, hosts = result.environment["ranks"], result.environment["hosts"]
        link_gbit = result.arguments["link_gbit"]
        peers = list(
            dict.fromkeys(
                name for row in result.rows for name in row.competitors() if name != ringtrain_competitor.NAME
            )
        )
        link = ["of link"] if link_gbit else []
        has_cpu = result.arguments["cpu"]
        cpu, of_peers = (["cpu us"], [f"{peer}'s" for peer in peers]) if has_cpu else ([], [])
        head = ["bytes", "us", "min-max", "algbw GB/s", "busbw GB/s", "Gbit/s", *link, *peers, *cpu, *of_peers]
        table = Table(head)
        for row in result.rows:
            time = row.spread(ringtrain_competitor.NAME)
            algbw = row.key["bytes"] / time.median / 1e9
            busbw = algbw * self._collective.bus_factor(ranks)
            cells = [str(row.key["bytes"]), *_microseconds(time), f"{algbw:.3f}", f"{busbw:.3f}", f"{8 * busbw:.2f}"]
            if link_gbit:
                factor = self._collective.link_factor(ranks, hosts) or self._collective.bus_factor(ranks)
                cells.append(f"{8 * algbw * factor / link_gbit:.3f}")
            cells += _ratios(row, peers, "seconds")
            if has_cpu:
                used = row.spread(ringtrain_competitor.NAME, "cpu")
                cells += [f"{1e6 * used.median:.1f}", *_ratios(row, peers, "cpu")]
            table.add(cells)
        return [*lines_of(table), *(["A peer's column: its time / ringtrain's, median [min-max]."] if peers else [])]


def iterations_for(size: int) -> int:
    """How often an operation of so many bytes is repeated in one timing."""
    return max(1, min(_MOST_ITERATIONS, _BYTES_OF_TIMING // size))


def _ratios(row: Row, peers: list[str], quantity: str) -> list[str]:
    present = row.competitors()
    own = ringtrain_competitor.NAME
    return [spread_text(row.ratio(peer, own, quantity)) if peer in present else "" for peer in peers]


def _ascending(arguments: argparse.Namespace, unit_bytes: int) -> Iterator[int]:
    """The sizes that are asked for, in units; each once."""
    last, size = 0, arguments.min_bytes
    while size <= arguments.max_bytes:
        units = max(1, size // unit_bytes)
        if units > last:
            yield units
        last, size = units, size * arguments.factor


def _is_full_of(result: Array, expected: list[int]) -> bool:
    parts = np.reshape(result, (len(expected), -1))
    return all(bool((part == value).all()) for part, value in zip(parts, expected, strict=True))


def _microseconds(time: Spread) -> list[str]:
    return [f"{1e6 * time.median:.1f}", f"{1e6 * time.least:.1f}-{1e6 * time.most:.1f}"]


# --- latency: small allreduces under a cached name, one after another -------------------------------------------------


# quantity in a round -> percentile of its calls
_PERCENTILES = {"seconds": 50, "p10": 10, "p99": 99, "min": 0}


class Latency:
    name = "latency"
    help = "single calls of a small cached allreduce_: median, p10, p99, min"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add_sizes(parser, "64K")
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
