"""The links between hosts, and what each way to train would send over them."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import ringtrain as hvd
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.measurement import CannotMeasure, Session
from ringtrain.bench.models import MODELS
from ringtrain.bench.report import Table, lines_of, milliseconds_text, spread_text
from ringtrain.bench.results import Result, Row, Spread
from ringtrain.bench.rounds import Contestant
from ringtrain.job.session import ranks_of_nodes
from ringtrain.training import difference_codes
from ringtrain.training.islands import Islands

_SMALL_BYTES = 8
_FIRST_BYTES, _MOST_BYTES = 128 << 10, 64 << 20
# A large message takes at least so many times as long as a small one, so that the rest is the rate of the link.
_TIMES_SMALL = 4.0
_ALLREDUCE, _ALLGATHER = "allreduce", "allgather"


class Links:
    name = "links"
    help = "the links between hosts, and the bytes and milliseconds of a step for each way to train over them"
    peers = ()

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--model", choices=tuple(MODELS), default="resnet50", help="default: %(default)s")
        add("--parameters", type=_count, metavar="N", help="of another model: 25.6M, 7G")
        add("--every", type=int, default=50, metavar="H", help="steps between two outer steps of DiLoCo (default: 50)")
        add("--seconds", type=float, default=0.3, metavar="S", help="of a large message (default: %(default)s)")

    def measure(self, session: Session) -> list[Row]:
        if session.job.hosts == 1:
            raise CannotMeasure("links are between hosts, and all ranks are on one: give several hosts with -H")
        session.init()
        hosts = ranks_of_nodes()
        names_of_ranks = session.job.gather(socket.gethostname())
        names = [names_of_ranks[ranks[0]] for ranks in hosts]
        islands = Islands("links")
        islands.choose()
        if session.job.rank == 0:
            session.facts.append({"hosts": names, "ranks": [len(ranks) for ranks in hosts], "islands": islands.lists})
        pairs = list(itertools.combinations(range(len(hosts)), 2))
        session.expect(len(pairs) + 2)
        rows = []
        for one, other in pairs:
            exchange = functools.partial(_exchange, hosts[one][0], hosts[other][0])
            rows.append(_row(session, {"link": [names[one], names[other]]}, exchange))
        rows.append(_row(session, {"operation": _ALLREDUCE}, _allreduce))
        firsts = {ranks[0] for ranks in hosts}
        rows.append(_row(session, {"operation": _ALLGATHER}, functools.partial(_allgather, firsts)))
        return rows

    def table(self, result: Result) -> list[str]:
        facts = result.facts[0]
        links = Table(["between", "there and back ms", "Mbit/s"], first_is_text=True)
        for row in result.rows:
            if "link" in row.key:
                time_s = row.spread(ringtrain_competitor.NAME)
                rate = row.spread(ringtrain_competitor.NAME, "bytes_per_s")
                links.add([" and ".join(row.key["link"]), milliseconds_text(time_s), _megabits(rate)])
        return [*lines_of(links), "", f'islands="links" would be {facts["islands"]}', "", *_ways(result)]


def _count(text: str) -> int:
    number, factor = (text[:-1], {"K": 1e3, "M": 1e6, "G": 1e9}.get(text[-1:].upper(), 0.0))
    try:
        count = int(float(number) * factor) if factor else int(text)
    except ValueError:
        count = 0
    if count <= 0:
        raise argparse.ArgumentTypeError(f'must be a number of parameters such as 25.6M, not "{text}"')
    return count


# --- the measurement: all ranks call it together ----------------------------------------------------------------------


def _exchange(first: int, second: int, size: int) -> None:
    """A message from one rank to another, and its answer of the same length; the other ranks do nothing."""
    message = np.zeros(size, np.uint8)
    if hvd.rank() == first:
        hvd.send(message, second)
        hvd.recv(message, second)
    elif hvd.rank() == second:
        hvd.recv(message, first)
        hvd.send(message, first)


def _allreduce(size: int) -> None:
    hvd.allreduce_(np.zeros(max(1, size // 4), np.float32), op=hvd.Sum, name="links.allreduce")


def _allgather(firsts: set[int], size: int) -> None:
    """Gathers one message of each host, as the codes of DiLoCo are."""
    hvd.allgather(np.zeros((int(hvd.rank() in firsts), size), np.uint8), name="links.allgather")


def _row(session: Session, key: dict[str, Any], run: Callable[[int], None]) -> Row:
    """`run` works on so many bytes; the bytes per second are those beyond what a small message takes."""

    def seconds_of(size: int) -> float:
        session.job.barrier()
        begin = time.perf_counter()
        run(size)
        seconds: list[float] = session.job.gather(time.perf_counter() - begin)
        return max(seconds)

    def large_bytes() -> int:
        """Returns the size of a message that takes --seconds, the same on all ranks."""
        size = _FIRST_BYTES
        while size < _MOST_BYTES:
            seconds, small = seconds_of(size), seconds_of(_SMALL_BYTES)
            if seconds >= max(session.arguments.seconds, _TIMES_SMALL * small):
                break
            size *= 2
        return size

    large = large_bytes()

    def sample(_: Contestant) -> dict[str, float]:
        small_s = seconds_of(_SMALL_BYTES)
        sent = 2 * large if "link" in key else large  # there and back
        return {"seconds": small_s, "bytes_per_s": sent / max(seconds_of(large) - small_s, 1e-9)}

    return Row(key, session.rounds([Contestant(ringtrain_competitor.NAME, lambda: None)], sample))


# --- what a step would send -------------------------------------------------------------------------------------------


class _Way(NamedTuple):
    """`bytes` of an array or a message for each parameter, in one operation every so many steps."""

    name: str
    operation: str
    bytes: float
    every: int


def _ways_of(every: int) -> list[_Way]:
    block = 1 << 16
    codes = {bits: difference_codes.message_bytes(block, bits) / block for bits in (8, 4)}
    return [
        _Way("DistributedOptimizer", _ALLREDUCE, 4, 1),
        _Way("DistributedOptimizer, fp16", _ALLREDUCE, 2, 1),
        _Way(f"DiLoCo, every={every}", _ALLREDUCE, 4, every),
        _Way(f"DiLoCo, every={every}, fp16", _ALLREDUCE, 2, every),
        _Way(f"DiLoCo, every={every}, int8", _ALLGATHER, codes[8], every),
        _Way(f"DiLoCo, every={every}, int4", _ALLGATHER, codes[4], every),
    ]


def _ways(result: Result) -> list[str]:
    arguments, facts = result.arguments, result.facts[0]
    hosts = len(facts["hosts"])
    parameters = arguments["parameters"] or sum(math.prod(shape) for shape in MODELS[arguments["model"]]())
    rows = {row.key["operation"]: row for row in result.rows if "operation" in row.key}
    latency_s = {name: row.spread(ringtrain_competitor.NAME).median for name, row in rows.items()}
    rates = {name: row.spread(ringtrain_competitor.NAME, "bytes_per_s").median for name, row in rows.items()}
    # the ranks of an island average in every step, and all ranks agree on that
    of_islands = latency_s[_ALLREDUCE] if max(facts["ranks"]) > 1 else 0.0
    table = Table([f"{parameters:,} parameters", "MB a step and host", "ms a step"], first_is_text=True)
    for way in _ways_of(arguments["every"]):
        size = way.bytes * parameters
        sent = size * (2 * (hosts - 1) / hosts if way.operation == _ALLREDUCE else hosts - 1)
        seconds = (latency_s[way.operation] + size / rates[way.operation]) / way.every
        if way.every > 1:
            seconds += of_islands
        table.add([way.name, f"{sent / way.every / 1e6:.2f}", f"{1e3 * seconds:.1f}"])
    explained = (
        "Milliseconds of communication, computed from the latency and the rate of an allreduce and an allgather."
    )
    return [*lines_of(table), explained, "A part of them is hidden while the step computes."]


def _megabits(spread: Spread) -> str:
    return spread_text(Spread(*(8e-6 * value for value in spread)), 1)
