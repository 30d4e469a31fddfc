"""allgather, broadcast, alltoall, reducescatter and barrier on every Group."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from harness.exact import (
    COMPLEX,
    DTYPE_OF_EACH_SIZE,
    DTYPES,
    complex_data_of_ranks,
    data,
    data_of_ranks,
    gathered_together,
    reference,
    require_equal,
)

import ringtrain as hvd

RING = {"RINGTRAIN_ALLREDUCE_ALGORITHM": "ring"}
MPI = {"RINGTRAIN_NETWORK": "mpi", "RINGTRAIN_ALLREDUCE_ALGORITHM": "mpi"}

# rows per rank are made of these; one is more than fits into a mailbox
ROWS = [1, 0, 5, 40_000]
TRAILING = [(), (3,), (2, 0), (1, 7)]


def check_allgather(dtype):
    for first in range(len(ROWS)):
        rows = [ROWS[(first + rank) % len(ROWS)] for rank in range(hvd.size())]
        for trailing in TRAILING:
            parts = [data(rank, (rows[rank], *trailing), dtype) for rank in range(hvd.size())]
            result = hvd.allgather(parts[hvd.rank()], name=f"{first}{trailing}")
            require_equal(result, np.concatenate(parts))


def check_broadcast(dtype):
    for root in range(hvd.size()):
        for shape in ((), (0,), (33,), (300_001,)):
            everybody = data_of_ranks(hvd.size(), shape, dtype, seed=root)
            mine = everybody[hvd.rank()].copy()
            require_equal(hvd.broadcast(mine, root, name=f"{root}{shape}"), everybody[root])
            require_equal(mine, everybody[hvd.rank()])
            assert hvd.broadcast_(mine, root, name=f"{root}{shape} in place") is mine
            require_equal(mine, everybody[root])


def splits_of(sender, size, scale):
    return [(sender + 2 * receiver) % 3 * scale for receiver in range(size)]


def check_alltoall(dtype):
    size, rank = hvd.size(), hvd.rank()
    for scale in (0, 1, 30_000):
        sent = [data(r, (sum(splits_of(r, size, scale)), 2), dtype) for r in range(size)]
        parts = [np.split(sent[r], np.cumsum(splits_of(r, size, scale))[:-1]) for r in range(size)]
        result, received = hvd.alltoall(sent[rank], splits=splits_of(rank, size, scale), name=f"{scale}")
        require_equal(result, np.concatenate([parts[r][rank] for r in range(size)]))
        assert received.tolist() == [len(parts[r][rank]) for r in range(size)]
    even = np.arange(size * 2, dtype="int32").reshape(size, 2) + 100 * rank
    require_equal(
        hvd.alltoall(even), np.stack([np.array([2 * rank, 2 * rank + 1], "int32") + 100 * r for r in range(size)])
    )


def check_reducescatter(dtype):
    size, rank = hvd.size(), hvd.rank()
    for rows in (0, 1, size, 7, 50_001):
        everybody = data_of_ranks(size, (rows, 3), dtype)
        expected = np.array_split(reference("sum", everybody), size)[rank]
        require_equal(hvd.reducescatter(everybody[rank], op=hvd.Sum, name=f"{rows}"), expected)


CHECKS = [check_allgather, check_broadcast, check_alltoall, check_reducescatter]
NAMES = [check.__name__.removeprefix("check_") for check in CHECKS]


@pytest.mark.ranks(3, dtypes=DTYPES)
@pytest.mark.ranks(1, 2, 4, fast=True, dtypes=DTYPE_OF_EACH_SIZE)
@pytest.mark.ranks(2, 3, 4, env=RING, fast=True, dtypes=DTYPE_OF_EACH_SIZE, way="ring")
@pytest.mark.ranks(2, 3, 4, env=MPI, fast=True, dtypes=DTYPE_OF_EACH_SIZE, way="mpi")
@pytest.mark.parametrize("which", range(len(CHECKS)), ids=NAMES)
def test_every_dtype(dtype, which):
    CHECKS[which](dtype)


# Where else it is sent, bytes are bytes. reducescatter computes as allreduce does.


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_arrays_that_begin_anywhere_in_a_page():
    rank, count = hvd.rank(), 70_001
    memory = np.empty(count + 2 * 4096, np.uint8)
    everybody = data_of_ranks(hvd.size(), (count,), np.uint8)
    # a few bytes behind the place in its page of a mailbox, a slot or the page itself, where memory is copied otherwise
    for offset in [page + few for page in (0, 16, 512, 768) for few in range(34)]:
        begin = (offset - memory.ctypes.data) % 4096
        mine = memory[begin : begin + count]
        mine[:] = everybody[rank]
        require_equal(hvd.broadcast_(mine, 0, name="broadcast"), everybody[0])
        mine[:] = everybody[rank]
        require_equal(hvd.allreduce_(mine, op=hvd.Sum, name="sum"), reference("sum", everybody))
        mine[:] = everybody[rank]
        require_equal(hvd.allgather(mine, name="gather"), np.concatenate(everybody))


# small ones between large ones, so that what travels together begins and ends anywhere in them
COUNTS_OF_MANY = [1, 0, 200_001, *range(1, 60), 65_536, 3, 70_007, 5]


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.ranks(2, 3, 4, env=RING, way="ring")
def test_broadcasts_that_travel_together():
    size, rank, last = hvd.size(), hvd.rank(), hvd.size() - 1
    dtypes = [np.dtype(name) for name in ("float32", "uint8", "int64", "float16")]
    for seed in range(3):  # the third step consists of cached names
        everybody = [
            data_of_ranks(size, (count,), dtypes[i % len(dtypes)], seed=seed) for i, count in enumerate(COUNTS_OF_MANY)
        ]
        mine = [arrays[rank].copy() for arrays in everybody]
        roots = [last if i % 7 else 0 for i in range(len(mine))]
        begun = [
            hvd.broadcast_async_(array, root, name=f"together {i}")
            for i, (array, root) in enumerate(zip(mine, roots, strict=True))
        ]
        for handle in begun:
            hvd.synchronize(handle)
        for array, arrays, root in zip(mine, everybody, roots, strict=True):
            require_equal(array, arrays[root])


@pytest.mark.ranks(2, 3, env={"RINGTRAIN_SHARED_MEMORY": "off"})
def test_short_broadcasts_travel_together_in_a_tree():
    mine = [np.full(3, 10 * hvd.rank() + i, np.int64) for i in range(20)]
    hvd.broadcast_parameters(mine, root_rank=hvd.size() - 1)
    for i, array in enumerate(mine):
        require_equal(array, np.full(3, 10 * (hvd.size() - 1) + i, np.int64))


@pytest.mark.ranks(1, 2, 3, 4, fast=True)
@pytest.mark.ranks(2, 3, env=RING, fast=True, way="ring")
@pytest.mark.ranks(2, 3, env={"RINGTRAIN_SHARED_MEMORY": "off"}, way="no shared memory")
def test_allgathers_that_travel_together():
    rank = hvd.rank()
    for step in (0, 1, 1, 1):  # with cached names in the end
        everybody = gathered_together(hvd.size(), COUNTS_OF_MANY, step)
        begun = [hvd.allgather_async(arrays[rank], name=f"together {i}") for i, arrays in enumerate(everybody)]
        for handle, arrays in zip(begun, everybody, strict=True):
            require_equal(hvd.synchronize(handle), np.concatenate(arrays))
        grouped = hvd.grouped_allgather([arrays[rank] for arrays in everybody], name="group")
        for result, arrays in zip(grouped, everybody, strict=True):
            require_equal(result, np.concatenate(arrays))


@pytest.mark.ranks(1, 2, 3, 4, fast=True)
@pytest.mark.ranks(2, 3, env=RING, fast=True, way="ring")
@pytest.mark.ranks(2, 3, 5, env={"RINGTRAIN_SHARED_MEMORY": "off"}, slow=True, way="no shared memory")
@pytest.mark.ranks(4, hosts=(2, 2))
def test_reducescatters_that_travel_together():
    size, rank = hvd.size(), hvd.rank()
    dtypes = ["float32", "uint8", "int64", "float16"]
    for step in (0, 1, 1, 1):  # with cached names in the end
        everybody = [
            data_of_ranks(size, (rows, 1 + i % 3), dtypes[i % len(dtypes)], seed=i + step)
            for i, rows in enumerate(COUNTS_OF_MANY)
        ]
        parts = [np.array_split(reference("sum", arrays), size)[rank] for arrays in everybody]
        begun = [
            hvd.reducescatter_async(arrays[rank], op=hvd.Sum, name=f"together {i}")
            for i, arrays in enumerate(everybody)
        ]
        for handle, part in zip(begun, parts, strict=True):
            require_equal(hvd.synchronize(handle), part)
        grouped = hvd.grouped_reducescatter([arrays[rank] for arrays in everybody], op=hvd.Sum, name="group")
        for result, part in zip(grouped, parts, strict=True):
            require_equal(result, part)


@pytest.mark.ranks(2, 3)
def test_factors_of_reducescatters_that_travel_together():
    rows = np.arange(6, dtype="int32").reshape(6, 1)
    own = np.array_split(rows, hvd.size())[hvd.rank()]
    for _ in range(3):
        begun = [
            hvd.reducescatter_async(rows + i, op=hvd.Max, name=f"scaled {i}", prescale_factor=2.0, postscale_factor=3.0)
            for i in range(5)
        ]
        for i, handle in enumerate(begun):
            require_equal(hvd.synchronize(handle), 6 * (own + np.int32(i)))


@pytest.mark.ranks(2, 3)
def test_a_reducescatter_that_does_not_fit_fails_alone_among_others():
    rank, size = hvd.rank(), hvd.size()
    dtypes = [np.float64 if rank == 0 and i == 3 else np.float32 for i in range(6)]
    for _ in range(2):
        begun = [
            hvd.reducescatter_async(np.full(size + i, i, dtype), op=hvd.Sum, name=f"scattered {i}")
            for i, dtype in enumerate(dtypes)
        ]
        with pytest.raises(hvd.MismatchError, match=r'reducescatter "scattered 3".*float64'):
            hvd.synchronize(begun[3])
        for i, handle in enumerate(begun):
            if i != 3:
                expected = np.array_split(np.full(size + i, size * i, np.float32), size)[rank]
                require_equal(hvd.synchronize(handle), expected)


@pytest.mark.ranks(2, 3)
def test_an_allgather_that_does_not_fit_fails_alone_among_others():
    rank, size = hvd.rank(), hvd.size()
    dtypes = [np.float64 if rank == 0 and i == 3 else np.float32 for i in range(6)]
    begun = [hvd.allgather_async(np.full(rank + i, rank, dtype), name=f"fits {i}") for i, dtype in enumerate(dtypes)]
    with pytest.raises(hvd.MismatchError, match=r'allgather "fits 3".*float64'):
        hvd.synchronize(begun[3])
    for i, handle in enumerate(begun):
        if i != 3:
            require_equal(hvd.synchronize(handle), np.concatenate([np.full(r + i, r, np.float32) for r in range(size)]))


@pytest.mark.ranks(2)
def test_results_that_are_gone_leave_no_memory_behind():
    def resident_mb():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    part = np.zeros(1 << 20, np.uint8)
    for number in range(130):
        result = hvd.allgather(part)
        if number == 30:
            before = resident_mb()
    assert result.nbytes == 2 << 20
    assert resident_mb() - before < 20  # of the 200 MB that the last hundred had


@pytest.mark.ranks(2, 3, env={"RINGTRAIN_SHARED_MEMORY": "off"})
@pytest.mark.parametrize("which", range(len(CHECKS)), ids=NAMES)
def test_without_shared_memory(which):
    CHECKS[which](np.dtype("float32"))


@pytest.mark.ranks(1, 2, 3)
def test_groups():
    size, rank = hvd.size(), hvd.rank()
    tensors = [np.full((rank + 1, 2), rank, "int64"), np.full(3, rank, "float32")]
    gathered = hvd.grouped_allgather(tensors)
    require_equal(gathered[0], np.concatenate([np.full((r + 1, 2), r, "int64") for r in range(size)]))
    require_equal(gathered[1], np.repeat(np.arange(size, dtype="float32"), 3))
    received = hvd.grouped_broadcast(tensors[1:], size - 1)
    require_equal(received[0], np.full(3, size - 1, "float32"))
    hvd.grouped_broadcast_(tensors[1:], size - 1)
    require_equal(tensors[1], np.full(3, size - 1, "float32"))
    scattered = hvd.grouped_reducescatter([np.ones((size, 4)), np.ones(size + 1)], op=hvd.Sum)
    require_equal(scattered[0], np.full((1, 4), float(size)))
    require_equal(scattered[1], np.full(2 if rank == 0 else 1, float(size)))
    exchanged = hvd.grouped_alltoall([np.full(size, rank), np.full(2 * size, rank)], splits=[None, [2] * size])
    require_equal(exchanged[0], np.arange(size))
    require_equal(exchanged[1][0], np.repeat(np.arange(size), 2))
    assert exchanged[1][1].tolist() == [2] * size


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers(dtype):
    size, rank, last = hvd.size(), hvd.rank(), hvd.size() - 1
    for shape in ((), (0,), (5,), (2 * size, 3), (40_000,)):
        everybody = complex_data_of_ranks(size, shape, dtype, "average")
        mine, total = everybody[rank], np.asarray(sum(everybody), dtype)
        require_equal(hvd.allreduce(mine), np.asarray(total / size, dtype))
        require_equal(hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16), total)
        scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        require_equal(scaled, np.asarray(total / 2, dtype))
        require_equal(hvd.grouped_allreduce([mine, mine.real], op=hvd.Sum)[0], total)
        require_equal(hvd.grouped_allreduce([mine, mine.real], op=hvd.Sum)[1], total.real)
        require_equal(hvd.broadcast(mine, last), everybody[-1])
        require_equal(hvd.allgather(mine), np.concatenate([np.atleast_1d(one) for one in everybody]))
        require_equal(mine, complex_data_of_ranks(size, shape, dtype, "average")[rank])
        for change, expected in (
            (lambda array: hvd.allreduce_(array, op=hvd.Sum), total),
            (lambda array: hvd.synchronize(hvd.allreduce_async_(array, op=hvd.Sum)), total),
            (lambda array: hvd.grouped_allreduce_([array], op=hvd.Sum)[0], total),
            (lambda array: hvd.broadcast_(array, last), everybody[-1]),
        ):
            changed = mine.copy()
            assert change(changed) is changed
            require_equal(changed, expected)
    everybody = complex_data_of_ranks(size, (2 * size, 3), dtype)
    mine, total = everybody[rank], np.asarray(sum(everybody), dtype)
    require_equal(hvd.reducescatter(mine, op=hvd.Sum), np.split(total, size)[rank])
    require_equal(hvd.alltoall(mine), np.concatenate([np.split(one, size)[rank] for one in everybody]))
    splits = [2] * size
    require_equal(hvd.alltoall(mine, splits)[0], np.concatenate([np.split(one, size)[rank] for one in everybody]))
    strided = np.zeros((2 * size, 6), dtype)
    strided[:, ::2] = mine
    assert hvd.allreduce_(strided[:, ::2], op=hvd.Sum) is not None
    require_equal(strided[:, ::2], total)
    require_equal(strided[:, 1::2], np.zeros((2 * size, 3), dtype))


@pytest.mark.ranks(1, 2)
def test_a_complex_number_of_python():
    require_equal(hvd.allreduce(1 + 2j * hvd.rank(), op=hvd.Sum), np.asarray(hvd.size() + 2j * (hvd.size() - 1)))
    require_equal(hvd.allgather(3j), np.full(hvd.size(), 3j))


@pytest.mark.ranks(1, 2)
def test_operations_with_an_order_or_a_product_refuse_complex_numbers():
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        for reduce in (hvd.allreduce, hvd.allreduce_, hvd.reducescatter):
            with pytest.raises(ValueError, match=f"op={op.name} is for real numbers, not for complex64; use op=Sum"):
                reduce(np.ones(4, "complex64"), op=op)
    with pytest.raises(ValueError, match="no first dimension"):
        hvd.reducescatter(1j)
    with pytest.raises(
        TypeError, match=r"cannot send dtype complex256; convert it with array.astype\(numpy.complex128\)"
    ):
        hvd.allreduce(np.ones(4, "clongdouble"))


@pytest.mark.ranks(2)
def test_ranks_that_disagree_about_complex_numbers_see_the_pairs():
    with pytest.raises(hvd.MismatchError, match=r"float32\[4, 2\].*float64\[4, 2\]"):
        hvd.allreduce(np.ones(4, "complex128" if hvd.rank() else "complex64"), name="different")
    with pytest.raises(hvd.MismatchError, match=r"float64\[4, 2\].*float64\[4\]"):
        hvd.allreduce(np.ones(4, "float64" if hvd.rank() else "complex128"), name="different")


@pytest.mark.ranks(1, 2, 3)
def test_a_number_is_gathered_as_one_row():
    require_equal(hvd.allgather(np.int32(hvd.rank())), np.arange(hvd.size(), dtype="int32"))


@pytest.mark.ranks(1, 2, 3)
def test_scatter_averages_and_scales():
    rows = np.arange(6.0).reshape(6, 1)
    require_equal(hvd.reducescatter(rows), np.array_split(rows, hvd.size())[hvd.rank()])
    integers = hvd.reducescatter(rows.astype("int32"), op=hvd.Max, prescale_factor=2.0, postscale_factor=3.0)
    require_equal(integers, (6 * np.array_split(rows, hvd.size())[hvd.rank()]).astype("int32"))


class Halved(hvd.Compressor):
    """As a user writes one."""

    @staticmethod
    def compress(tensor):
        return tensor / 2, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return (2 * tensor).astype(ctx)


@pytest.mark.ranks(2)
def test_a_compression_of_ones_own():
    mine = np.full(4, float(hvd.rank() + 1))
    require_equal(hvd.reducescatter(mine, None, Halved, hvd.Sum), np.full(2, 3.0))
    require_equal(hvd.grouped_reducescatter([mine], None, Halved)[0], np.full(2, 1.5))
    require_equal(hvd.allreduce(mine, compression=Halved), np.full(4, 1.5))


@pytest.mark.ranks(1, 2, 3)
def test_async_forms_poll_and_synchronize():
    handles = [
        hvd.allgather_async(np.ones(2), name="gather"),
        hvd.broadcast_async(np.ones(2), 0, name="broadcast"),
        hvd.alltoall_async(np.ones(hvd.size()), name="alltoall"),
        hvd.reducescatter_async(np.ones(hvd.size()), name="scatter"),
        hvd.allreduce_async(np.ones(2), name="reduce"),
    ]
    results = [hvd.synchronize(handle) for handle in handles]
    assert all(hvd.poll(handle) for handle in handles)
    assert hvd.synchronize(handles[0]) is results[0]
    assert [len(result) for result in results] == [2 * hvd.size(), 2, hvd.size(), 1, 2]


@pytest.mark.ranks(1, 2, 3)
def test_async_forms_of_groups_and_in_place():
    size, rank, last = hvd.size(), hvd.rank(), hvd.size() - 1
    mine = [np.full((size, 2), float(rank)), np.full(size, rank, "int32")]
    total = sum(range(size))
    changed = [array.copy() for array in mine]
    handles = {
        "gather": hvd.grouped_allgather_async(mine, name="gather"),
        "reduce": hvd.grouped_allreduce_async(mine, op=hvd.Sum, name="reduce"),
        "reduce in place": hvd.grouped_allreduce_async_([changed[0]], op=hvd.Sum, name="reduce in place"),
        "exchange": hvd.grouped_alltoall_async(mine, [None, [1] * size], name="exchange"),
        "cast": hvd.grouped_broadcast_async(mine, last, name="cast"),
        "cast in place": hvd.grouped_broadcast_async_([changed[1]], last, name="cast in place"),
        "scatter": hvd.grouped_reducescatter_async(mine, op=hvd.Sum, name="scatter"),
    }
    results = {name: hvd.synchronize(handle) for name, handle in handles.items()}
    assert results["reduce in place"][0] is changed[0] and results["cast in place"][0] is changed[1]
    assert results["exchange"][1][1].tolist() == [1] * size
    results["exchange"][1] = results["exchange"][1][0]
    for place, dtype in enumerate(("float64", "int32")):
        shape = mine[place].shape
        require_equal(results["gather"][place], np.concatenate([np.full(shape, r, dtype) for r in range(size)]))
        require_equal(results["reduce"][place], np.full(shape, total, dtype))
        require_equal(results["exchange"][place], np.concatenate([np.full(shape, r, dtype)[:1] for r in range(size)]))
        require_equal(results["cast"][place], np.full(shape, last, dtype))
        require_equal(results["scatter"][place], np.full(shape, total, dtype)[:1])
        require_equal(mine[place], np.full(shape, rank, dtype))
    require_equal(changed[0], np.full((size, 2), float(total)))
    require_equal(changed[1], np.full(size, last, "int32"))
    single = np.full(3, float(rank))
    assert hvd.synchronize(hvd.broadcast_async_(single, last)) is single
    require_equal(single, np.full(3, float(last)))


@pytest.mark.ranks(2, 3)
def test_a_result_outlives_its_handle():
    kept = [hvd.allgather(np.full(1000, hvd.rank())) for _ in range(50)]
    for one in kept:
        require_equal(one, np.repeat(np.arange(hvd.size()), 1000))


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_nobody_passes_a_barrier_before_the_last_has_come():
    begin = time.monotonic()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(0.3)
    hvd.barrier()
    assert time.monotonic() - begin > 0.25
