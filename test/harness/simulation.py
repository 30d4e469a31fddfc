"""The core's Coordinators and its Autotune without a job: built from test/engine/simulation/ and csrc/.

simulation = Simulation(1000)
plans = simulation.round([[Request(OpKind.ALLREDUCE, "g", shape=[16])]] * 1000)[0]
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from harness.compiling import CORE, filled, folder_of, run_compiler
from harness.rooms import TEST_FOLDER
from ringtrain._core import DTYPES, OpKind, ReduceOp

_SOURCES = TEST_FOLDER / "engine" / "simulation"
# The seam is first: its base/clock.h takes the place of the product's.
_FLAGS = ["-std=c++17", "-O1", "-Wall", "-fPIC", "-pthread", f"-I{_SOURCES / 'seam'}", f"-I{CORE}", f"-I{_SOURCES}"]
_COUNTED = "-fsanitize-coverage=trace-pc"  # of coordination/: see steps.h
_NAME = "libsimulation.so"
# The parts of the core that it needs: base/, of coordination/ what uses neither shared memory nor a network, the alarm.
_NOT_OF_COORDINATION = ("shm_channel.cc",)
_OF_NETWORK = ("alarm", "endpoint", "network")

# (name, error message or "", rows of the first tensor, result, ranks that have joined)
Part = tuple[str, str, list[int], int, list[int]]


class Request:
    """The announcement of one simulated rank."""

    def __init__(
        self,
        kind: OpKind,
        name: str,
        dtype: int = DTYPES["float32"],
        shape: Sequence[int] = (),
        op: ReduceOp = ReduceOp.Sum,
        root: int = 0,
        process_set: int = 0,
        priority: int = 0,
        numbers: Sequence[int] = (),
        prescale: float = 1.0,
    ) -> None:
        sizes, values = (_array(ctypes.c_int64, one) for one in (shape, numbers))
        own = (kind.value, name.encode(), dtype, sizes, ctypes.c_size_t(len(sizes)), op.value, root)
        more = (process_set, priority, values, ctypes.c_size_t(len(values)), ctypes.c_double(prescale))
        self.pointer = ctypes.c_void_p(_library().request_new(*own, *more))

    def __del__(self) -> None:
        _library().request_delete(self.pointer)


class Simulation:
    """Coordinators of `size` ranks in this process, over wires in memory."""

    def __init__(
        self,
        size: int,
        cache_capacity: int = 1024,
        fusion_threshold_bytes: int = 128 << 20,
        stall_warning_s: float = 60.0,
        stall_shutdown_s: float = 600.0,
    ) -> None:
        self._size = size
        limits = (ctypes.c_size_t(cache_capacity), ctypes.c_size_t(fusion_threshold_bytes))
        patience = (ctypes.c_double(stall_warning_s), ctypes.c_double(stall_shutdown_s))
        self._pointer = ctypes.c_void_p(_library().simulation_new(size, *limits, *patience))

    def __del__(self) -> None:
        _library().simulation_delete(self._pointer)

    def round(self, fresh: Sequence[Sequence[Request]]) -> list[list[list[Part]]]:
        """One round: of each rank what it becomes ready for, and then its plans, as lists of parts."""
        for rank, requests in enumerate(fresh):
            self.begin(rank, requests)
        return self.finish()

    def begin(self, rank: int, fresh: Sequence[Request]) -> None:
        """The first half of a round, on one rank."""
        pointers = _array(ctypes.c_void_p, [request.pointer.value for request in fresh])
        _require_success(_library().simulation_begin(self._pointer, rank, pointers, ctypes.c_size_t(len(pointers))))

    def finish(self, plan_s: float = 0.0) -> list[list[list[Part]]]:
        """The second half, on all ranks. Each plan keeps the ranks of its process set for so many seconds."""
        plans = ctypes.c_char_p()
        _require_success(_library().simulation_finish(self._pointer, ctypes.c_double(plan_s), ctypes.byref(plans)))
        ranks = json.loads(plans.value or b"")
        return [[[tuple(part) for part in plan] for plan in of_rank] for of_rank in ranks]

    def say_blocked(self, rank: int, is_blocked: bool) -> None:
        """That all threads of a rank wait, or that this is over."""
        _library().simulation_say_blocked(self._pointer, rank, int(is_blocked))

    def answer(self, rank: int, whereabouts: str) -> None:
        """Sets the answer of a rank in its next round, when it was asked where its threads are."""
        _library().simulation_answer(self._pointer, rank, whereabouts.encode())

    def pass_time(self, seconds: float) -> None:
        """Lets so much time pass for all ranks. Their clock stands still otherwise."""
        _library().simulation_pass_time(ctypes.c_double(seconds))

    def is_due(self) -> bool:
        """Whether some rank would come to another round by itself."""
        return bool(_library().simulation_is_due(self._pointer))

    def messages_handled(self) -> list[int]:
        """Messages sent and received so far, by rank."""
        return [_library().simulation_messages(self._pointer, rank) for rank in range(self._size)]

    def bytes_handled(self) -> list[int]:
        """Their bytes, by rank."""
        return [_library().simulation_bytes(self._pointer, rank) for rank in range(self._size)]

    def came_with_values(self) -> list[int]:
        """How many rounds have brought the values of an allreduce, by rank."""
        return [_library().simulation_came_with_values(self._pointer, rank) for rank in range(self._size)]


class Cost(NamedTuple):
    """The share of rank 0 in one round."""

    seconds: float  # of the processor
    messages: int
    bytes: int
    peak_bytes: int  # of memory, more than before the round
    agreed: int  # operations


class Crowd:
    """The Coordinator of rank 0 alone, in a world of `size` ranks whose messages the tree brings to it."""

    def __init__(self, size: int, cache_capacity: int = 1024, stall_warning_s: float = 60.0) -> None:
        patience = ctypes.c_double(stall_warning_s)
        self._pointer = ctypes.c_void_p(_library().crowd_new(size, ctypes.c_size_t(cache_capacity), patience))

    def __del__(self) -> None:
        _library().crowd_delete(self._pointer)

    def settle(self, *fresh: Sequence[Request]) -> Cost:
        """One round with something new: rank r has become ready for the requests number r modulo their count."""
        return self._round(fresh, repeats=False)

    def repeat(self, fresh: Sequence[Request]) -> Cost:
        """One round in which all ranks are ready for these, which all know."""
        return self._round([fresh], repeats=True)

    def say_blocked(self) -> None:
        """All threads of all ranks wait from now on."""
        _library().crowd_say_blocked(self._pointer)

    def pass_time(self, seconds: float) -> None:
        """Lets so much time pass for all ranks."""
        _library().simulation_pass_time(ctypes.c_double(seconds))

    def _round(self, fresh: Sequence[Sequence[Request]], repeats: bool) -> Cost:
        pointers = _array(ctypes.c_void_p, [request.pointer.value for of_rank in fresh for request in of_rank])
        counts = _array(ctypes.c_size_t, [len(of_rank) for of_rank in fresh])
        cost = (ctypes.c_double * len(Cost._fields))()
        kinds = ctypes.c_size_t(len(fresh))
        _require_success(_library().crowd_round(self._pointer, pointers, counts, kinds, int(repeats), cost))
        return Cost(cost[0], *(int(number) for number in cost[1:]))


def death(size: int) -> Cost:
    """The share of the busiest rank in the news of one death, by the real Alarm; memory is not measured."""
    cost = (ctypes.c_double * 3)()
    _require_success(_library().death(size, cost))
    return Cost(cost[0], int(cost[1]), int(cost[2]), 0, 0)


def steps() -> int:
    """How much the Coordinators of all simulations have done so far, in basic blocks of their code."""
    return int(_library().simulation_steps())


def simulate_autotune(
    threshold: int,
    mailbox: int,
    thresholds: Sequence[int],
    mailboxes: Sequence[int],
    speed: Callable[[int, int], float],
) -> tuple[int, int, int, str]:
    """Autotune on a job whose speed(threshold, mailbox) is given: both sizes in the end, operations, the report."""
    sizes, operations = _array(ctypes.c_size_t, [threshold, mailbox]), ctypes.c_size_t()
    lists = [_array(ctypes.c_size_t, one) for one in (thresholds, mailboxes)]
    counted = [word for one in lists for word in (one, ctypes.c_size_t(len(one)))]
    called = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_size_t, ctypes.c_size_t)(speed)
    report = _library().autotune(sizes, *counted, called, ctypes.byref(operations))
    return sizes[0], sizes[1], operations.value, report.decode()


def _array(kind: Any, values: Sequence[int | None]) -> Any:
    return (kind * len(values))(*values)


def _require_success(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises DoubleUnavailable where there is no compiler, and RuntimeError with what it says where it fails."""
    own = sorted(_SOURCES.glob("*.cc"))
    coordination = [path for path in (CORE / "coordination").glob("*.cc") if path.name not in _NOT_OF_COORDINATION]
    network = [CORE / "network" / f"{name}.cc" for name in _OF_NETWORK]
    sources = [*own, *coordination, *network, *(CORE / "base").glob("*.cc"), CORE / "runtime" / "autotune.cc"]
    headers = [path for folder in (_SOURCES, CORE) for path in folder.rglob("*.h")]
    folder = filled(
        folder_of("simulation", [*_FLAGS, _COUNTED], sorted([*sources, *headers])), functools.partial(_build, sources)
    )
    library = ctypes.CDLL(str(folder / _NAME))
    for name in ("request_new", "simulation_new", "crowd_new"):
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("simulation_begin", "simulation_finish", "crowd_round", "death", "autotune"):
        getattr(library, name).restype = ctypes.c_char_p
    for name in ("simulation_messages", "simulation_bytes", "simulation_came_with_values", "simulation_steps"):
        getattr(library, name).restype = ctypes.c_size_t
    return library


def _build(sources: Sequence[Path], folder: Path) -> None:
    def compile_one(source: Path) -> str:
        compiled = str(folder / f"{source.stem}.o")
        flags = [*_FLAGS, _COUNTED] if source.parent.name == "coordination" else _FLAGS
        run_compiler([*flags, "-c", str(source), "-o", compiled])
        return compiled

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, sources))
    run_compiler(["-shared", "-pthread", *objects, "-Wl,--no-undefined", "-ldl", "-o", str(folder / _NAME)])
