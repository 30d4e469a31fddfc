"""Checks of operations on arrays on GPUs that repeat, of any library: `library` is exact_cupy or exact_torch_gpu.

They are prepared once. On fakes these are called by test_repeated_gpu.py, on real GPUs by test/gpu/real/.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gpu_checks import SLOW_S, Stopwatch, first_operation
from harness.exact import data_of_ranks, reference
from harness.prepared import all_are_prepared

import ringtrain as hvd
from ringtrain.training.gradient_batch import GradientBatch


class Batch:
    """Sums gradients as DistributedOptimizer does."""

    def __init__(self) -> None:
        self._batch = GradientBatch(op=hvd.Sum)

    def start(self, array: Any, name: str) -> Callable[[], Any]:
        self._batch.ready(name, array)
        return lambda: self._batch.wait()[name]


# Each makes a function that starts a sum in place of an array with a name, and returns a function that waits for it.
WAYS: dict[str, Callable[[], Callable[[Any, str], Callable[[], Any]]]] = {
    "allreduce_": lambda: lambda array, name: lambda: hvd.allreduce_(array, op=hvd.Sum, name=name),
    "allreduce_async_": lambda: lambda array, name: hvd.allreduce_async_(array, op=hvd.Sum, name=name).wait,
    "gradient": lambda: Batch().start,
}
# Those that begin before their result is asked for.
ASYNC_WAYS = [way for way in WAYS if way != "allreduce_"]


def prepare(library: Any, start: Callable[[Any, str], Callable[[], Any]], name: str, shape: tuple[int, ...]) -> None:
    """Repeat a sum of float64 until it is prepared."""
    first_operation(library)
    for _ in range(3):
        start(library.on_gpu(np.ones(shape)), name)()
    library.synchronize()


def check_each_repeat_is_exact(library: Any, way: str, dtype: np.dtype) -> None:
    start = WAYS[way]()

    def check(step: int, shape: tuple[int, ...]) -> None:
        arrays = data_of_ranks(hvd.size(), shape, dtype, seed=step)
        mine = library.on_gpu(arrays[hvd.rank()])
        assert start(mine, f"repeated {way} {shape}")() is mine
        library.require_on_gpu(mine, reference("sum", arrays))

    for shape in ((33, 17), (), (0,), (3, 0, 2), (70_001,)):
        for step in range(2):
            check(step, shape)
        with all_are_prepared():
            for step in range(2, 5):
                check(step, shape)


def check_many_in_flight(library: Any) -> None:
    batch = GradientBatch(op=hvd.Sum)
    for step in range(5):
        of_ranks = [data_of_ranks(hvd.size(), (number,), "float32", seed=number + step) for number in range(30)]
        mine = [library.on_gpu(arrays[hvd.rank()]) for arrays in of_ranks]
        for number, array in enumerate(mine):
            batch.ready(f"{number}", array)
        averages = batch.wait()
        for number, arrays in enumerate(of_ranks):
            assert averages[f"{number}"] is mine[number]
            library.require_on_gpu(mine[number], reference("sum", arrays))


def check_weights_and_priorities(library: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    for step in range(6):
        weights = [(one + step) % 3 + 1 for one in range(size)]
        mine = library.on_gpu(np.full(12, float(rank * sum(weights))))
        hvd.allreduce_(mine, name="repeated: weight", weight=weights[rank], priority=step // 3)
        library.require_on_gpu(mine, np.full(12, float(sum(one * weight for one, weight in enumerate(weights)))))
    for weight in (None, 2.0, None):  # the same of all ranks
        for _ in range(3):
            mine = library.on_gpu(np.full(5, float(2 * rank)))
            hvd.allreduce_(mine, name="repeated: weight of all", weight=weight)
            library.require_on_gpu(mine, np.full(5, float(size - 1)))


def check_broadcasts(library: Any) -> None:
    root = hvd.size() - 1
    for step in range(5):
        mine = library.on_gpu(np.full(40, 10 * step + hvd.rank()))
        handle = hvd.broadcast_async_(mine, root, name="repeated: broadcast")
        assert hvd.synchronize(handle) is mine
        library.require_on_gpu(mine, np.full(40, 10 * step + root))
    with all_are_prepared():
        hvd.broadcast_(library.on_gpu(np.zeros(40, int)), root, name="repeated: broadcast")
    handle = hvd.broadcast_async_(library.on_gpu(np.full(40, 1)), root, name="repeated: broadcast")
    with library.new_stream():
        library.require_on_gpu(hvd.synchronize(handle), np.full(40, 1))


CHANGES: dict[str, Callable[[Any, np.ndarray], tuple[Any, np.ndarray]]] = {
    "dtype": lambda library, array: (library.on_gpu(array.astype("float32")), array.astype("float32")),
    "integers": lambda library, array: (library.on_gpu(array.astype("int64")), array.astype("int64")),
    "shape": lambda library, array: (library.on_gpu(array.reshape(4, 3)), array.reshape(4, 3)),
    "length": lambda library, array: (library.on_gpu(array[:2]), array[:2]),
    "order": lambda library, array: (library.on_gpu(array.T.copy()).T, array),
}


def check_a_change_is_seen(library: Any, way: str, change: str) -> None:
    start = WAYS[way]()
    array = np.arange(12.0).reshape(3, 4)
    for changes in (False, False, False, True, False, True, True, False, False):
        mine, before = CHANGES[change](library, array) if changes else (library.on_gpu(array), array)
        assert start(mine, f"repeated: {change} {way}")() is mine
        library.require_on_gpu(mine, before * hvd.size())


def check_host_memory_and_a_gpu_take_turns(library: Any, way: str, on_host: Callable[[Any], Any]) -> None:
    """`on_host`: makes an array of the same library in host memory, or one of NumPy."""
    start = WAYS[way]()
    for is_on_gpu in (False, False, True, True, True, False, False, True, False):
        values = np.arange(6.0)
        mine = library.on_gpu(values) if is_on_gpu else on_host(values)
        assert start(mine, f"repeated: places {way}")() is mine
        if is_on_gpu:
            library.require_on_gpu(mine, values * hvd.size())
        else:
            assert np.asarray(mine).tolist() == (values * hvd.size()).tolist()


# Streams


def check_it_lies_between_the_kernels_of_its_stream(library: Any, way: str) -> None:
    start, name = WAYS[way](), f"repeated: order {way}"
    prepare(library, start, name, (1000,))
    total = hvd.size() * (hvd.size() + 1) / 2
    for stream in (library.new_stream(), library.new_stream()):
        with stream, all_are_prepared():
            mine = library.on_gpu(np.zeros(1000))
            library.keep_busy(SLOW_S / 4)
            mine += hvd.rank() + 1
            start(mine, name)()
            library.require_on_gpu(2 * mine, np.full(1000, 2 * total))


def check_the_host_does_not_wait(library: Any, way: str) -> None:
    start, name = WAYS[way](), f"repeated: host {way}"
    prepare(library, start, name, (8,))
    mine = library.on_gpu(np.full(8, 0.5))
    mine *= 2  # at first kernels are loaded or compiled
    library.synchronize()
    library.keep_busy(SLOW_S)
    mine *= 2
    with Stopwatch() as host, all_are_prepared():
        start(mine, name)()
    assert host.seconds < SLOW_S / 2
    assert not library.is_done()
    library.require_on_gpu(mine, np.full(8, 2.0 * hvd.size()))


def check_the_stream_that_waits_is_the_one_that_is_current_then(library: Any, way: str) -> None:
    start, name = WAYS[way](), f"repeated: current {way}"
    prepare(library, start, name, (1000,))
    begun_in, ended_in = library.new_stream(), library.new_stream()
    for busy_s in (0, SLOW_S):  # at first kernels are loaded or compiled
        with begun_in, all_are_prepared():
            mine = library.on_gpu(np.zeros(1000))
            library.keep_busy(busy_s)
            mine += 1
            wait = start(mine, name)
        with ended_in:
            assert wait() is mine
            library.require_on_gpu(mine + 1, np.full(1000, hvd.size() + 1.0))


def check_memory_of_a_dropped_array_is_not_used_again_meanwhile(library: Any, way: str) -> None:
    """Also where the stream that waited for the operation is another one than that of the array."""
    start, name = WAYS[way](), f"repeated: memory {way}"
    prepare(library, start, name, (64,))
    for _ in range(2):  # the first time the host may be slow
        begun_in, ended_in = library.new_stream(), library.new_stream()
        with begun_in, all_are_prepared():
            library.keep_busy(SLOW_S / 2)
            wait = start(library.on_gpu(np.ones(64)), name)
        with ended_in:
            wait()
            del wait
        hvd.barrier()  # lets go of what is over
        with begun_in:  # which does not wait, and takes what the library has for it
            rubbish = [library.empty(64, "float64") for _ in range(16)]
        with ended_in:
            library.synchronize()
        with begun_in:
            for one in rubbish:
                library.require_on_gpu(one, np.full(64, 77.0))


def check_a_dropped_array_is_kept(library: Any) -> None:
    prepare(library, WAYS["allreduce_async_"](), "repeated: dropped", (500,))
    batch = Batch()
    for _ in range(20):
        library.keep_busy(0.005)
        handle = hvd.allreduce_async_(library.on_gpu(np.ones(500)), op=hvd.Sum, name="repeated: dropped")
        batch.start(library.on_gpu(np.ones(500)), "dropped")()
        end = time.monotonic() + 60
        while not hvd.poll(handle):
            assert time.monotonic() < end
            time.sleep(0.001)
        del handle
    mine = library.on_gpu(np.ones(500))
    library.require_on_gpu(hvd.allreduce_(mine, op=hvd.Sum), np.full(500, float(hvd.size())))
