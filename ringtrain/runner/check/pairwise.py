"""Between each two hosts: bandwidth through MPI, the time of a round trip, and how far their clocks are apart.

Runs with one rank on each host. Rank 0 prints what `check.py` reads.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ringtrain.runner.check.host_report import describe_host

if TYPE_CHECKING:
    from mpi4py import MPI

RESULT = "ringrun-check "

_TRIPS_S = 0.1
_MESSAGE_BYTES = 1 << 20
_SEND_S = 0.25
# so many messages are under way at once, or each would wait for the one before
_WINDOW = 4
_MORE, _LAST = 1, 2


class Pair(NamedTuple):
    """Bandwidths from `first` to `second` and back; the clock of `second` minus that of `first`."""

    first: int
    second: int
    there_mb_per_s: float
    back_mb_per_s: float
    round_trip_us: float
    clock_offset_ms: float


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """All pairs of `size` ranks, in rounds in which no rank is twice: a tournament, where one of the circle stays."""
    circle = list(range(size + size % 2))
    found = []
    for _ in range(len(circle) - 1):
        pairs = [sorted((circle[i], circle[-1 - i])) for i in range(len(circle) // 2)]
        found.append([(first, second) for first, second in pairs if second < size])
        circle.insert(1, circle.pop())
    return found


def main() -> None:
    report = describe_host(initialize=True)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    measured = []
    for pairs in rounds(world.size):
        world.Barrier()
        for first, second in pairs:
            if world.rank == first:
                measured.append(_measure(world, first, second))
            elif world.rank == second:
                _answer(world, first)
    gathered = world.gather((report, measured))
    if gathered is not None:
        reports = [report for report, _ in gathered]
        print(RESULT + json.dumps([reports, [pair for _, pairs in gathered for pair in pairs]]), flush=True)


def _measure(world: MPI.Comm, first: int, second: int) -> Pair:
    trips = []
    until = time.monotonic() + _TRIPS_S
    is_last = False
    while not is_last:
        is_last = time.monotonic() > until
        begin = time.time()
        world.send(is_last, second)
        there = world.recv(source=second)
        end = time.time()
        trips.append((end - begin, there - (begin + end) / 2))
    # the shortest trip leaves the least room for an error
    round_trip_s, offset_s = min(trips)
    there = _send_for_a_while(world, second)
    _receive(world, second)
    return Pair(first, second, there, world.recv(source=second), round_trip_s * 1e6, offset_s * 1e3)


def _answer(world: MPI.Comm, first: int) -> None:
    is_last = False
    while not is_last:
        is_last = world.recv(source=first)
        world.send(time.time(), first)
    _receive(world, first)
    world.send(_send_for_a_while(world, first), first)


def _send_for_a_while(world: MPI.Comm, to: int) -> float:
    """In MB/s."""
    message = bytearray(_MESSAGE_BYTES)
    begin = time.monotonic()
    under_way: deque[MPI.Request] = deque()
    count, tag = 0, _MORE
    while tag == _MORE:
        tag = _LAST if time.monotonic() - begin > _SEND_S else _MORE
        under_way.append(world.Isend(message, to, tag))
        count += 1
        if len(under_way) == _WINDOW:
            under_way.popleft().Wait()
    for request in under_way:
        request.Wait()
    world.recv(source=to)
    return count * _MESSAGE_BYTES / (time.monotonic() - begin) / 1e6


def _receive(world: MPI.Comm, source: int) -> None:
    from mpi4py import MPI

    message, status = bytearray(_MESSAGE_BYTES), MPI.Status()
    while status.Get_tag() != _LAST:
        world.Recv(message, source, MPI.ANY_TAG, status)
    world.send(None, source)


if __name__ == "__main__":
    main()
