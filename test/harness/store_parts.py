"""Parts of key-value stores without servers: built from test/kvstore/parts/ and csrc/.

part = Part([("float32", 1000)], workers=2, synchronous=True)
Actor(part, 0).push(0, 1, values)
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from harness.compiling import CORE, filled, folder_of, run_compiler
from harness.rooms import TEST_FOLDER
from ringtrain._core import DTYPES

_SOURCES = TEST_FOLDER / "kvstore" / "parts"
_FLAGS = ["-std=c++17", "-O1", "-Wall", "-fPIC", "-pthread", "-ffp-contract=off", f"-I{CORE}"]
_NAME = "libstoreparts.so"
_OF_STORE = ("actor.cc", "layout.cc", "part.cc")

APPLIED, HELD, DUPLICATE, EARLY, FULL, BUSY = range(6)
DONE, NOT_YET, BUSY_READING = range(3)
ABSENT, HERE, JOINED, GONE = range(4)
NO_CODES, TWO_BIT, ONE_BIT = range(3)
_NEWEST = 2**32 - 1


class Part:
    """Keys, each one piece, as (dtype, elements); in this process, or with `shared` for others of this host, too."""

    def __init__(
        self,
        keys: Sequence[tuple[str, int]],
        workers: int = 1,
        capacity: int | None = None,
        synchronous: bool = False,
        max_staleness: int = -1,
        shared: bool = False,
        of: tuple[int, int] | None = None,
    ) -> None:
        """`of`: process and ticket of its maker."""
        flat = [number for dtype, count in keys for number in (DTYPES[dtype], count)]
        pieces = (ctypes.c_int64 * len(flat))(*flat), ctypes.c_size_t(len(keys))
        capacity = workers if capacity is None else capacity
        self.pointer = ctypes.c_void_p()
        made = ctypes.byref(self.pointer)
        kind = (int(synchronous), ctypes.c_int64(max_staleness))
        if of is None:
            call("part_create", *kind, workers, capacity, int(shared), *pieces, made)
        else:
            call("part_attach", *kind, capacity, *pieces, ctypes.c_int64(of[0]), ctypes.c_uint64(of[1]), made)

    @property
    def name(self) -> tuple[int, int]:
        """The name by which another process finds it."""
        return os.getpid(), int(_library().part_ticket(self.pointer))

    def chunks(self, piece: int) -> range:
        """The numbers of the chunks of a piece."""
        first, last = (_library().part_first_chunk(self.pointer, ctypes.c_size_t(one)) for one in (piece, piece + 1))
        return range(first, last)

    def elements(self, chunk: int) -> int:
        """How many a chunk has."""
        return int(_library().part_elements(self.pointer, ctypes.c_size_t(chunk)))

    def set_rule(self, name: str, form: str = "mxnet", number: str = "", value: float = 0.0) -> None:
        """An optimizer, with one of its numbers."""
        call("part_set_rule", self.pointer, name.encode(), form.encode(), number.encode(), ctypes.c_double(value))

    def set_presence(self, worker: int, presence: int) -> None:
        """Whether others wait for a worker."""
        _library().part_set_presence(self.pointer, ctypes.c_size_t(worker), presence)

    def settle(self, timeout_s: float = 10.0) -> None:
        """Close what can be closed."""
        call("part_settle", self.pointer, ctypes.c_double(timeout_s))

    def let_in(self, worker: int) -> None:
        """A worker comes, or comes back."""
        call("part_let_in", self.pointer, ctypes.c_size_t(worker))

    def closed(self, chunk: int) -> int:
        """Its rounds that are closed."""
        return int(_library().part_closed(self.pointer, ctypes.c_size_t(chunk)))

    def bell(self) -> int:
        """How often the doorbell was rung."""
        return int(_library().part_bell(self.pointer))


class Actor:
    """The actor of one worker, or, numbered `capacity`, of the server."""

    def __init__(self, part: Part, number: int, timeout_s: float = 10.0, term: int = _NEWEST) -> None:
        self.part = part
        self.pointer = ctypes.c_void_p()
        of_process = ctypes.c_double(timeout_s), ctypes.c_uint32(term)
        call("actor_new", part.pointer, number, *of_process, ctypes.byref(self.pointer))

    def close(self) -> None:
        """As if its process had ended."""
        _library().actor_delete(self.pointer)

    def push(
        self,
        chunk: int,
        seq: int,
        values: np.ndarray[Any, Any],
        lr: float = 0.0,
        wd: float = 0.0,
        answer: np.ndarray[Any, Any] | None = None,
        dtype: str = "",
        codes: int = NO_CODES,
        threshold: float = 0.0,
    ) -> tuple[int, bool]:
        """Returns its outcome, and whether the answer is there."""
        outcome, answered = ctypes.c_int(), ctypes.c_int()
        number = DTYPES[dtype or str(values.dtype)]
        place = (None, 0) if answer is None else (answer.ctypes.data_as(ctypes.c_void_p), DTYPES[str(answer.dtype)])
        pushed = (values.ctypes.data_as(ctypes.c_void_p), number, codes, ctypes.c_float(threshold))
        where = (ctypes.c_size_t(chunk), ctypes.c_uint64(seq))
        rates = (ctypes.c_double(lr), ctypes.c_double(wd))
        results = (ctypes.byref(outcome), ctypes.byref(answered))
        call("actor_push", self.pointer, *where, *pushed, *rates, *place, *results)
        return outcome.value, bool(answered.value)

    def read(self, chunk: int, pushes: int = 0, dtype: str = "float32") -> tuple[int, np.ndarray[Any, Any], int]:
        """Whether it is there, the value, num_update."""
        answer = np.zeros(self.part.elements(chunk), dtype)
        reading, num_update = ctypes.c_int(), ctypes.c_uint64()
        place = (answer.ctypes.data_as(ctypes.c_void_p), DTYPES[dtype])
        where = (ctypes.c_size_t(chunk), ctypes.c_uint64(pushes))
        call("actor_read", self.pointer, *where, *place, ctypes.byref(reading), ctypes.byref(num_update))
        return reading.value, answer, num_update.value

    def assign(self, chunk: int, values: np.ndarray[Any, Any]) -> bool:
        """Give a chunk its values."""
        place = values.ctypes.data_as(ctypes.c_void_p)
        return bool(_library().actor_assign(self.pointer, ctypes.c_size_t(chunk), place))

    def pushes(self, chunk: int, worker: int) -> int:
        """How many of a worker's a chunk has counted."""
        return int(_library().actor_pushes(self.pointer, ctypes.c_size_t(chunk), ctypes.c_size_t(worker)))

    def fewest_pushes(self, piece: int, worker: int) -> int:
        """From which a worker that comes back goes on."""
        return int(_library().actor_fewest_pushes(self.pointer, ctypes.c_size_t(piece), ctypes.c_size_t(worker)))

    def stage(
        self,
        piece: int,
        seq: int,
        values: np.ndarray[Any, Any],
        rows: Sequence[int] = (),
        elements: int = 0,
        dtype: str = "",
        codes: int = NO_CODES,
        threshold: float = 0.0,
        publishes: bool = True,
        every: int = 1,
    ) -> None:
        """Keep a push of all elements or of rows, and push it to every so many of its chunks, or with 0 to none."""
        pushed = (values.ctypes.data_as(ctypes.c_void_p), DTYPES[dtype or str(values.dtype)], codes)
        of_rows = ((ctypes.c_int64 * max(1, len(rows)))(*rows), ctypes.c_size_t(len(rows)), ctypes.c_size_t(elements))
        where = (ctypes.c_size_t(piece), ctypes.c_uint64(seq))
        chunks = (int(publishes), ctypes.c_size_t(every))
        call("actor_stage", self.pointer, *where, *pushed, ctypes.c_float(threshold), *of_rows, *chunks)

    def publish(self) -> None:
        """Publish a push that was only kept."""
        call("actor_publish", self.pointer)

    def finish_push_of(self, worker: int) -> bool:
        """As the server does for a dead worker."""
        is_done = ctypes.c_int()
        call("actor_finish_push_of", self.pointer, ctypes.c_size_t(worker), ctypes.byref(is_done))
        return bool(is_done.value)

    def push_for_ever(self, piece: int, number: float) -> None:
        """Until somebody kills the process."""
        call("actor_push_for_ever", self.pointer, ctypes.c_size_t(piece), ctypes.c_float(number))


def call(name: str, *arguments: Any) -> None:
    """Raises RuntimeError with what it throws."""
    function = getattr(_library(), name)
    function.restype = ctypes.c_char_p
    error = function(*arguments)
    if error is not None:
        raise RuntimeError(error.decode())


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises DoubleUnavailable where there is no compiler, and RuntimeError with what it says where it fails."""
    own = sorted(_SOURCES.glob("*.cc"))
    below = [path for folder in ("base", "kernels", "memory") for path in sorted((CORE / folder).glob("*.cc"))]
    of_memory = [path for path in below if path.parent.name != "memory" or path.name == "shm.cc"]
    sources = [*own, *of_memory, *(CORE / "kvstore" / "store" / name for name in _OF_STORE)]
    folder = folder_of("storeparts", _FLAGS, [*sources, *sorted(CORE.rglob("*.h"))])
    library = ctypes.CDLL(str(filled(folder, lambda folder: _build(sources, folder)) / _NAME))
    for name in ("part_ticket", "part_closed", "part_elements", "actor_pushes", "actor_fewest_pushes"):
        getattr(library, name).restype = ctypes.c_uint64
    for name in ("part_chunks", "part_first_chunk"):
        getattr(library, name).restype = ctypes.c_size_t
    library.part_bell.restype = ctypes.c_uint32
    return library


def _build(sources: Sequence[Path], folder: Path) -> None:
    objects = [str(folder / f"{path.parent.name}-{path.stem}.o") for path in sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        lines = [
            [*_FLAGS, "-c", str(source), "-o", compiled] for source, compiled in zip(sources, objects, strict=True)
        ]
        list(pool.map(run_compiler, lines))
    run_compiler(["-shared", "-pthread", *objects, "-ldl", "-o", str(folder / _NAME)])
