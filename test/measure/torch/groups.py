"""The cases of measure.groups, and their rounds."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringtrain.bench import ringtrain_competitor, torch_groups
from ringtrain.bench.measurement import Session
from ringtrain.bench.results import Round, Row
from ringtrain.bench.rounds import Contestant, cost_for_all

_GLOO = "gloo"
_CALLS = 20  # while a rank is stopped


@dataclass(frozen=True)
class Ways:
    """The groups of this rank on one backend: with its neighbour, across two pairs, and with all."""

    pair: Any
    across: Any
    world: Any


@dataclass(frozen=True)
class Case:
    """`prepare` returns what one iteration does on this rank; None: it rests."""

    name: str
    prepare: Callable[[Ways], Callable[[int], Any] | None]
    iterations: int


def _ways(backend: str) -> Ways:
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = across = None
    for first in range(0, size - 1, 2):
        group = dist.new_group([first, first + 1], backend=backend)
        pair = group if rank // 2 == first // 2 else pair
    for first in range(0, size - 3, 4):
        for place in (0, 1):
            group = dist.new_group([first + place, first + place + 2], backend=backend)
            across = group if (rank // 4, rank % 2) == (first // 4, place) else across
    return Ways(pair, across, dist.new_group(backend=backend))


def _all_reduce(bytes_: int, all_pairs: bool) -> Callable[[Ways], Callable[[int], Any] | None]:
    def prepare(ways: Ways) -> Callable[[int], Any] | None:
        if not all_pairs and dist.get_rank() >= 2:
            return None
        tensor = torch.zeros(bytes_ // 4)
        return lambda _: dist.all_reduce(tensor, group=ways.pair)

    return prepare


def _token(bytes_: int) -> Callable[[Ways], Callable[[int], Any]]:
    """96 calls after each other: what a token of a tensor parallel model with 48 layers needs."""

    def prepare(ways: Ways) -> Callable[[int], Any]:
        tensor = torch.zeros(bytes_ // 4)

        def token(_: int) -> None:
            for _layer in range(96):
                dist.all_reduce(tensor, group=ways.world)

        return token

    return prepare


def _two_dimensions(ways: Ways) -> Callable[[int], Any]:
    """A step of tensor parallel layers in pairs, with gradients that are averaged across the pairs meanwhile."""
    activation, gradients = torch.zeros(1 << 16), [torch.zeros(1 << 20) for _ in range(2)]

    def step(_: int) -> None:
        works = []
        for layer in range(24):
            dist.all_reduce(activation, group=ways.pair)
            if layer in (17, 23):
                works.append(dist.all_reduce(gradients[layer == 23], group=ways.across, async_op=True))
        for work in works:
            work.wait()

    return step


def _overlapping(bytes_: int) -> Callable[[Ways], Callable[[int], Any]]:
    def prepare(ways: Ways) -> Callable[[int], Any]:
        tensors = [torch.zeros(bytes_ // 4) for _ in range(16)]

        def step(_: int) -> None:
            groups = (ways.across, ways.pair)
            works = [dist.all_reduce(one, group=groups[i % 2], async_op=True) for i, one in enumerate(tensors)]
            for work in works:
                work.wait()

        return step

    return prepare


def _message(length: Callable[[int], int]) -> Callable[[Ways], Callable[[int], Any] | None]:
    """There and back between ranks 0 and 1."""

    def prepare(ways: Ways) -> Callable[[int], Any] | None:
        rank = dist.get_rank()
        if rank >= 2:
            return None

        def there_and_back(call: int) -> None:
            tensor = torch.zeros(length(call))
            for sender in (0, 1):
                if rank == sender:
                    dist.send(tensor, 1 - rank, group=ways.world)
                else:
                    dist.recv(tensor, 1 - rank, group=ways.world)

        return there_and_back

    return prepare


def _changing(call: int) -> int:
    return 1 + call * 7919 % 20_011


def _changing_all_reduce(ways: Ways) -> Callable[[int], Any]:
    return lambda call: dist.all_reduce(torch.zeros(_changing(call)), group=ways.world)


def _changing_broadcast(ways: Ways) -> Callable[[int], Any]:
    return lambda call: dist.broadcast(torch.zeros(_changing(call)), 0, group=ways.world)


def _changing_objects(ways: Ways) -> Callable[[int], Any]:
    objects: list[Any] = [None] * dist.get_world_size()
    return lambda call: dist.all_gather_object(objects, "x" * (call % 300), group=ways.world)


CASES = (
    Case("all_reduce of a pair, 4 B", _all_reduce(4, False), 200),
    Case("all_reduce of a pair, 256 KB", _all_reduce(256 << 10, False), 50),
    Case("all_reduce of all pairs, 4 B", _all_reduce(4, True), 200),
    Case("all_reduce of all pairs, 256 KB", _all_reduce(256 << 10, True), 50),
    Case("a token of all ranks, 4 KB", _token(4 << 10), 1),
    Case("a token of all ranks, 64 KB", _token(64 << 10), 1),
    Case("a token of all ranks, 256 KB", _token(256 << 10), 1),
    Case("tensor x data parallel", _two_dimensions, 4),
    Case("16 async of two groups, 1 KB", _overlapping(1 << 10), 10),
    Case("16 async of two groups, 256 KB", _overlapping(256 << 10), 5),
    Case("message there and back, 4 B", _message(lambda _: 1), 200),
    Case("message there and back, sizes that change", _message(_changing), 100),
    Case("all_reduce of sizes that change", _changing_all_reduce, 100),
    Case("broadcast of sizes that change", _changing_broadcast, 100),
    Case("all_gather_object of sizes that change", _changing_objects, 50),
)
_STOPPED = f"{_CALLS} calls of a pair while another rank is stopped"


def measure(session: Session) -> list[Row]:
    with torch_groups.opened(session.job) as opened:
        ways = {name: _ways("gloo" if name == _GLOO else "ringtrain") for name in opened}
        has_four = session.job.size >= 4
        cases = [case for case in CASES if has_four or not _needs_four(case)]
        session.expect(len(cases))
        rows = [_measure_case(session, case, ways) for case in cases]
        if has_four:
            rows.append(_measure_stopped(session, ways))
        rows.append(_measure_idle(session, session.arguments.idle_groups))
    return rows


def _needs_four(case: Case) -> bool:
    return case.prepare is _two_dimensions or "async" in case.name or "all pairs" in case.name


def _measure_case(session: Session, case: Case, ways: dict[str, Ways]) -> Row:
    calls = 0

    def contestant(name: str, own: Ways) -> Contestant:
        run = case.prepare(own)

        def once() -> None:
            nonlocal calls
            calls += 1
            if run is not None:
                run(calls)

        return Contestant(name, once)

    contestants = [contestant(name, own) for name, own in ways.items()]

    def sample(one: Contestant) -> dict[str, float]:
        return cost_for_all(session.job, one.run, case.iterations)

    return Row({"case": case.name}, session.rounds(contestants, sample))


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _measure_stopped(session: Session, ways: dict[str, Ways]) -> Row:
    job = session.job
    pids = job.gather(os.getpid())
    tensor = torch.zeros(1)

    def sample(one: Contestant) -> dict[str, float]:
        group = ways[one.name].pair
        seconds = 0.0
        job.barrier()
        if job.rank < 2:
            dist.all_reduce(tensor, group=group)
            with _stopped(pids[-1]) if job.rank == 0 else contextlib.nullcontext():
                dist.barrier(group)
                begin = time.perf_counter()
                for _ in range(_CALLS):
                    dist.all_reduce(tensor, group=group)
                seconds = time.perf_counter() - begin
                dist.barrier(group)
        return {"seconds": max(job.gather(seconds)), "cpu": 0.0}

    contestants = [Contestant(name, lambda: None) for name in ways]
    return Row({"case": _STOPPED}, session.rounds(contestants, sample))


def _status() -> tuple[float, int]:
    """Bytes of /dev/shm that are in use, and threads of this process."""
    memory = os.statvfs("/dev/shm")
    return float((memory.f_blocks - memory.f_bfree) * memory.f_frsize), len(os.listdir("/proc/self/task"))


def _cpu_but_gloos() -> float:
    """Seconds that this process has used, but for the threads of gloo, which are never idle."""
    nanoseconds = 0
    for thread in Path("/proc/self/task").iterdir():
        if not (thread / "comm").read_text().startswith("gloo"):
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def _measure_idle(session: Session, count: int) -> Row:
    seconds = 3.0
    job = session.job

    def cpu() -> float:
        job.barrier()
        time.sleep(0.5)  # the engine falls asleep
        used = _cpu_but_gloos()
        time.sleep(seconds)
        return (_cpu_but_gloos() - used) / seconds

    before = _status()
    groups = [dist.new_group([0, 1], backend="ringtrain") for _ in range(count)]
    if job.rank < 2:
        for group in groups:
            dist.all_reduce(torch.zeros(1), group=group)
    job.barrier()
    after = _status()
    costs = job.gather({"shm": after[0] - before[0], "threads": after[1] - before[1], "cpu": cpu()})
    most = {key: float(max(cost[key] for cost in costs)) for key in costs[0]}
    return Row({"idle groups": count}, [Round({ringtrain_competitor.NAME: {"seconds": 0.0, **most}})])
