"""Checks of every operation with arrays on GPUs, of any library: `library` is exact_cupy or exact_torch_gpu.

On fakes these are called by test_gpu_operations.py, on real GPUs by test/gpu/real/.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness.exact import OPS, data, data_of_ranks, reference, shapes_of

import ringtrain as hvd

HVD_OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}

# How long a slow kernel takes: long against all that the host does, short against a test.
SLOW_S = 0.4


class Stopwatch:
    """Says whether the host was kept."""

    def __enter__(self) -> Stopwatch:
        self._begin = time.monotonic()
        return self

    def __exit__(self, *raised: object) -> None:
        self.seconds = time.monotonic() - self._begin


# Every operation


def check_all_ops_and_shapes(library: Any, dtype: np.dtype) -> None:
    for op in OPS:
        if op == "average" and dtype.kind == "b":
            continue
        for shape in shapes_of(op):
            arrays = data_of_ranks(hvd.size(), shape, dtype, op=op)
            expected, before = reference(op, arrays), arrays[hvd.rank()]
            mine = library.on_gpu(before)
            result = hvd.allreduce(mine, op=HVD_OPS[op], name=f"{op}{shape}")
            library.require_on_gpu(result, expected)
            library.require_on_gpu(mine, before)
            assert hvd.allreduce_(mine, op=HVD_OPS[op], name=f"{op}{shape} in place") is mine
            library.require_on_gpu(mine, expected)


def check_allgather(library: Any, dtype: np.dtype) -> None:
    for rows in ([2, 0, 3, 1], [0, 0, 0, 0], [700, 1, 300, 5]):
        parts = [data(rank, (rows[rank], 3), dtype) for rank in range(hvd.size())]
        gathered = hvd.allgather(library.on_gpu(parts[hvd.rank()]), name=f"{rows}")
        library.require_on_gpu(gathered, np.concatenate(parts))


def check_broadcast(library: Any, dtype: np.dtype) -> None:
    for root in range(hvd.size()):
        for shape in ((), (0,), (33,), (300_001,)):
            everybody = data_of_ranks(hvd.size(), shape, dtype, seed=root)
            mine = library.on_gpu(everybody[hvd.rank()])
            library.require_on_gpu(hvd.broadcast(mine, root, name=f"{root}{shape}"), everybody[root])
            library.require_on_gpu(mine, everybody[hvd.rank()])
            assert hvd.broadcast_(mine, root, name=f"{root}{shape} in place") is mine
            library.require_on_gpu(mine, everybody[root])


def check_alltoall(library: Any, dtype: np.dtype) -> None:
    size, rank = hvd.size(), hvd.rank()
    splits = [[(sender + 2 * receiver) % 3 for receiver in range(size)] for sender in range(size)]
    sent = [data(r, (sum(splits[r]), 2), dtype) for r in range(size)]
    parts = [np.split(sent[r], np.cumsum(splits[r])[:-1]) for r in range(size)]
    expected = np.concatenate([parts[r][rank] for r in range(size)])
    numbers = np.array([len(parts[r][rank]) for r in range(size)])
    result, received = hvd.alltoall(library.on_gpu(sent[rank]), splits=splits[rank], name="a list of splits")
    library.require_on_gpu(result, expected)
    assert np.asarray(received).tolist() == numbers.tolist()
    on_gpu = library.on_gpu(np.array(splits[rank]))
    result, received = hvd.alltoall(library.on_gpu(sent[rank]), splits=on_gpu, name="splits on the GPU")
    library.require_on_gpu(result, expected)
    library.require_on_gpu(received, numbers)


def check_reducescatter(library: Any, dtype: np.dtype) -> None:
    size, rank = hvd.size(), hvd.rank()
    for rows in (0, 1, size, 7, 50_001):
        everybody = data_of_ranks(size, (rows, 3), dtype)
        expected = np.array_split(reference("sum", everybody), size)[rank]
        scattered = hvd.reducescatter(library.on_gpu(everybody[rank]), op=hvd.Sum, name=f"{rows}")
        library.require_on_gpu(scattered, expected)


COLLECTIVES = {
    check.__name__.removeprefix("check_"): check
    for check in (check_allgather, check_broadcast, check_alltoall, check_reducescatter)
}


def check_groups_of_different_dtypes(library: Any) -> None:
    kinds = [((5, 2), "float32"), ((0,), "int64"), ((), "float16"), ((300, 40), "float32")]
    of_ranks = [data_of_ranks(hvd.size(), shape, dtype, seed=i) for i, (shape, dtype) in enumerate(kinds)]
    mine = [library.on_gpu(arrays[hvd.rank()]) for arrays in of_ranks]
    expected = [reference("sum", arrays) for arrays in of_ranks]
    for result, right in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), expected, strict=True):
        library.require_on_gpu(result, right)
    hvd.grouped_allreduce_(mine, op=hvd.Sum)
    for result, right in zip(mine, expected, strict=True):
        library.require_on_gpu(result, right)
    pair = [library.on_gpu(np.full(2, hvd.rank())), library.on_gpu(np.int32(hvd.rank()))]
    gathered = hvd.grouped_allgather(pair)
    library.require_on_gpu(gathered[0], np.repeat(np.arange(hvd.size()), 2))
    library.require_on_gpu(gathered[1], np.arange(hvd.size(), dtype="int32"))
    scattered = hvd.grouped_reducescatter([library.on_gpu(np.ones((hvd.size(), 4)))], op=hvd.Sum)
    library.require_on_gpu(scattered[0], np.full((1, 4), float(hvd.size())))


def check_many_at_once_in_another_order_on_each_rank(library: Any) -> None:
    count = 20
    of_ranks = [data_of_ranks(hvd.size(), (50 + number,), "float32", seed=number) for number in range(count)]
    mine = [library.on_gpu(arrays[hvd.rank()]) for arrays in of_ranks]
    order = range(count) if hvd.rank() % 2 else reversed(range(count))
    handles = {number: hvd.allreduce_async_(mine[number], op=hvd.Sum, name=f"{number}") for number in order}
    for number in range(count):
        assert hvd.synchronize(handles[number]) is mine[number]
        library.require_on_gpu(mine[number], reference("sum", of_ranks[number]))
    assert all(map(hvd.poll, handles.values()))


def check_scale_factors(library: Any) -> None:
    mine = library.on_gpu(data(hvd.rank(), (100,), "float32"))
    total = reference("sum", data_of_ranks(hvd.size(), (100,), "float32"))
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    library.require_on_gpu(scaled, total * np.float32(2))
    large = np.full(70_000, 60_000, "float16")
    library.require_on_gpu(hvd.allreduce(library.on_gpu(large), prescale_factor=0.125, postscale_factor=8.0), large)


def check_compression(library: Any, compression: str, dtype: str) -> None:
    compressor = getattr(hvd.Compression, compression)
    expected = reference("sum", data_of_ranks(hvd.size(), (50,), dtype))
    mine = library.on_gpu(data(hvd.rank(), (50,), dtype))
    library.require_on_gpu(hvd.allreduce(mine, op=hvd.Sum, compression=compressor), expected)
    library.require_on_gpu(hvd.allreduce_(mine, op=hvd.Sum, compression=compressor), expected)


def check_transposed(library: Any) -> None:
    before = np.arange(24.0).reshape(4, 6)
    array = library.on_gpu(before)
    library.require_on_gpu(hvd.allreduce(array.T, op=hvd.Sum), before.T * hvd.size())
    transposed = array.T
    assert hvd.allreduce_(transposed, op=hvd.Sum) is transposed
    library.require_on_gpu(array, before * hvd.size())
    hvd.broadcast_(array.T, 0)
    library.require_on_gpu(array, before * hvd.size())


# Streams: operations are between what was put into them before and after, and the host does not wait


def first_operation(library: Any) -> None:
    """Makes what is made once, so that it is not measured."""
    mine = library.on_gpu(np.ones(3))
    hvd.allreduce(mine, name="first")
    hvd.allgather(mine, name="first")
    library.synchronize()


def check_an_operation_lies_between_the_kernels_of_its_stream(library: Any) -> None:
    """Of the current stream."""
    mine = library.on_gpu(np.zeros(1000))
    library.keep_busy(SLOW_S / 4)
    mine += hvd.rank() + 1
    hvd.allreduce_(mine, op=hvd.Sum, name="in place")
    doubled = 2 * mine
    total = hvd.size() * (hvd.size() + 1) / 2
    gathered = hvd.allgather(doubled, name="gather") + 1
    library.require_on_gpu(doubled, np.full(1000, 2 * total))
    library.require_on_gpu(gathered, np.full(1000 * hvd.size(), 2 * total + 1))


OPERATIONS = {
    "allreduce_": lambda mine: hvd.allreduce_(mine),
    "allreduce": lambda mine: hvd.allreduce(mine),
    "allreduce_async_": lambda mine: hvd.synchronize(hvd.allreduce_async_(mine)),
    "grouped_allreduce": lambda mine: hvd.grouped_allreduce([mine, mine])[1],
    "broadcast_": lambda mine: hvd.broadcast_(mine, 0),
    "allgather": lambda mine: hvd.allgather(mine),
    "reducescatter": lambda mine: hvd.reducescatter(mine),
    "alltoall": lambda mine: hvd.alltoall(mine),
    "compressed": lambda mine: hvd.allreduce_(mine, compression=hvd.Compression.fp16),
}


def check_the_host_does_not_wait(library: Any, operation: str) -> None:
    first_operation(library)
    mine = library.on_gpu(np.full(hvd.size() * 4, 0.5))
    mine *= 2  # at first kernels are loaded or compiled, of this one and of the operation
    OPERATIONS[operation](mine)
    library.synchronize()
    library.keep_busy(SLOW_S)
    mine *= 2
    with Stopwatch() as host:
        result = OPERATIONS[operation](mine)
    assert host.seconds < SLOW_S / 2
    assert not library.is_done()
    library.require_on_gpu(result, np.full(result.shape, 2.0))


def start_late(library: Any, busy_s: float) -> tuple[Any, hvd.Handle]:
    """A sum over the ranks of an array of ones, which the current stream makes after so long."""
    mine = library.on_gpu(np.zeros(1000))
    library.keep_busy(busy_s)
    mine += 1
    return mine, hvd.allreduce_async_(mine, op=hvd.Sum)


def check_the_stream_that_waits_is_the_one_that_is_current_then(library: Any) -> None:
    first_operation(library)
    begun_in, ended_in = library.new_stream(), library.new_stream()
    for busy_s in (0, SLOW_S):  # at first kernels are loaded or compiled
        with begun_in:
            mine, handle = start_late(library, busy_s)
        with ended_in:
            assert hvd.synchronize(handle) is mine
            library.require_on_gpu(mine + 1, np.full(1000, hvd.size() + 1.0))


def check_other_streams_go_on(library: Any) -> None:
    first_operation(library)
    busy, other = library.new_stream(), library.new_stream()
    for busy_s in (0, SLOW_S):  # at first kernels are loaded or compiled
        with busy:
            _, handle = start_late(library, busy_s)
        with Stopwatch() as host, other:
            library.require_on_gpu(2 * library.on_gpu(np.ones(10)), np.full(10, 2.0))
        library.require_on_gpu(hvd.synchronize(handle), np.full(1000, float(hvd.size())))
    assert host.seconds < SLOW_S / 2


def check_memory_stays_while_another_stream_makes_the_result(library: Any, compression: str) -> None:
    how = {"op": hvd.Sum, "compression": getattr(hvd.Compression, compression)}
    check_memory_stays(library, lambda mine: hvd.allreduce_async(mine, **how))


def check_memory_stays_while_another_stream_reads_the_result(library: Any) -> None:
    check_memory_stays(library, lambda mine: hvd.allreduce_async(mine, op=hvd.Sum), is_busy_before=False)


def check_memory_stays(library: Any, start: Callable[[Any], Any], is_busy_before: bool = True) -> None:
    """`start`: an allreduce that sums, and makes a new array. `is_busy_before`: the stream that waits for it, then."""
    library.use_own_gpu()
    for _ in range(2):  # the first time the host may be slow
        begun_in, ended_in = library.new_stream(), library.new_stream()
        with begun_in:
            handle = start(library.on_gpu(np.ones(64, "float32")))
        while not hvd.poll(handle):
            time.sleep(0.001)
        with ended_in:
            if is_busy_before:
                library.keep_busy(SLOW_S)
            result = hvd.synchronize(handle)
            if not is_busy_before:
                library.keep_busy(SLOW_S)
            doubled = 2 * result
            del result, handle
        hvd.barrier()  # lets go of what is over
        with begun_in:  # which does not wait, and takes what the library has for it
            _rubbish = [library.empty(64, dtype) for dtype in ("float16", "float32") for _ in range(8)]
            library.synchronize()
        with ended_in:
            library.require_on_gpu(doubled, np.full(64, 2 * hvd.size(), "float32"))
