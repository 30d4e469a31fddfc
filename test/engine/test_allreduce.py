"""allreduce on every Group: exact results for every op, dtype and shape, in place or not."""

import ml_dtypes
import numpy as np
import pytest
from harness.exact import (
    DTYPE_OF_EACH_SIZE,
    DTYPES,
    FLOATS,
    OPS,
    data,
    data_of_ranks,
    reference,
    require_equal,
    shapes_of,
)

import ringtrain as hvd

RING = {"RINGTRAIN_ALLREDUCE_ALGORITHM": "ring"}
MPI = {"RINGTRAIN_NETWORK": "mpi", "RINGTRAIN_ALLREDUCE_ALGORITHM": "mpi"}
SOCKETS = {"RINGTRAIN_NETWORK": "sockets", "RINGTRAIN_SHARED_MEMORY": "off"}
DOUBLING = {"RINGTRAIN_ALLREDUCE_ALGORITHM": "doubling"}
TINY_CHUNKS = {"RINGTRAIN_MAILBOX_KB": "4", "RINGTRAIN_ALLREDUCE_ALGORITHM": "auto"}

HVD_OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


def check_all_ops_and_shapes(dtype):
    for op in OPS:
        if op == "average" and dtype.kind == "b":
            continue
        for shape in shapes_of(op):
            arrays = data_of_ranks(hvd.size(), shape, dtype, op=op)
            expected, mine = reference(op, arrays), arrays[hvd.rank()]
            before = mine.copy()
            result = hvd.allreduce(mine, op=HVD_OPS[op], name=f"{op}{shape}")
            require_equal(result, expected)
            require_equal(mine, before)
            assert hvd.allreduce_(mine, op=HVD_OPS[op], name=f"{op}{shape} in place") is mine
            require_equal(mine, expected)


# Every dtype on three ranks: more than two arrays are summed, and nothing can be halved.


@pytest.mark.ranks(3, slow=True, dtypes=DTYPES)
@pytest.mark.ranks(1, 2, 4, fast=True, dtypes=DTYPE_OF_EACH_SIZE)
@pytest.mark.ranks(3, env=RING, slow=True, dtypes=DTYPES, way="ring")
@pytest.mark.ranks(2, 4, env=RING, fast=True, dtypes=DTYPE_OF_EACH_SIZE, way="ring")
@pytest.mark.ranks(3, env=MPI, fast=True, dtypes=DTYPES, way="mpi")
@pytest.mark.ranks(2, 4, env=MPI, slow=True, dtypes=DTYPE_OF_EACH_SIZE, way="mpi")
@pytest.mark.ranks(3, env=DOUBLING, fast=True, dtypes=DTYPES, way="doubling")
@pytest.mark.ranks(6, env=DOUBLING, slow=True, dtypes=DTYPE_OF_EACH_SIZE, way="doubling")
@pytest.mark.ranks(2, 3, env=TINY_CHUNKS, dtypes=DTYPE_OF_EACH_SIZE, way="small mailboxes")
def test_every_op_and_shape(dtype):
    check_all_ops_and_shapes(dtype)


@pytest.mark.ranks(2, 3, env={"RINGTRAIN_SHARED_MEMORY": "off"})
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_op_and_shape_without_shared_memory(dtype):
    check_all_ops_and_shapes(np.dtype(getattr(ml_dtypes, dtype, dtype)))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.ranks(2, 3, 4, env=RING, way="ring")
@pytest.mark.ranks(2, 5, env=DOUBLING, way="doubling")
@pytest.mark.ranks(
    2, 3, env={"RINGTRAIN_ALLREDUCE_ALGORITHM": "measured", "RINGTRAIN_SHARED_MEMORY": "off"}, way="measured"
)
def test_sizes_around_every_switch():
    # around a cache line, the small path, a mailbox or halving, the ring, blocks, a chunk of all mailboxes, and packing
    for base in (16, 4096, 16384, 32768, 3 << 14, 1 << 16, 32768 * hvd.size(), 1 << 18):
        for count in (base - 1, base, base + 1):
            expected = reference("sum", data_of_ranks(hvd.size(), (count,), "float32"))
            require_equal(hvd.allreduce(data(hvd.rank(), (count,), "float32"), op=hvd.Sum, name=f"{count}"), expected)


@pytest.mark.ranks(2, 3, env=RING, dtypes=["float32", "float16", "int8"], way="ring")
@pytest.mark.ranks(
    3, env={**RING, "RINGTRAIN_RING_CHUNK_KB": "1"}, slow=True, dtypes=["float64", "float16"], way="many blocks"
)
def test_many_arrays_at_once_on_the_ring(dtype):
    # small ones that are packed, and large ones that are cut into blocks
    shapes = [(3,), (1 << 20,), (0,), (70_001,), (300_007, 2), (1,), (1 << 19,)]
    mine = [data(hvd.rank(), shape, dtype, seed=i) for i, shape in enumerate(shapes)]
    before = [array.copy() for array in mine]
    results = hvd.grouped_allreduce(mine, op=hvd.Sum)
    for i, shape in enumerate(shapes):
        require_equal(mine[i], before[i])
        require_equal(results[i], reference("sum", data_of_ranks(hvd.size(), shape, dtype, seed=i)))


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_scale_factors():
    mine = data(hvd.rank(), (100,), "float32")
    total = reference("sum", data_of_ranks(hvd.size(), (100,), "float32"))
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    require_equal(scaled, total * np.float32(2))
    integers = hvd.allreduce(mine.astype("int32"), op=hvd.Sum, postscale_factor=0.5)
    require_equal(integers, np.trunc(total.astype("float64") * 0.5).astype("int32"))
    largest = hvd.allreduce(mine, op=hvd.Max, prescale_factor=-1.0)
    require_equal(largest, reference("max", [-one for one in data_of_ranks(hvd.size(), (100,), "float32")]))


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", "uint32", "uint64"])
def test_an_average_of_integers_is_truncated_towards_zero(dtype):
    """In the dtype of the array, as Horovod's; but exact, where that multiplies by 1 / size."""
    largest, smallest = np.iinfo(dtype).max, np.iinfo(dtype).min
    size, rank = hvd.size(), hvd.rank()
    first = np.array([7, 2, 1, 0, 99, largest - 1, largest // 3, smallest, smallest // 3]).astype(dtype)
    others = np.array([0, 3, 0, 0, 2, 1, largest // 3, 0, smallest // 3]).astype(dtype)
    sums = [int(one) + (size - 1) * int(other) for one, other in zip(first, others, strict=True)]
    wrapped = np.array([(number - smallest) % (largest - smallest + 1) + smallest for number in sums], dtype=object)
    expected = np.array([abs(int(n)) // size * (1 if n >= 0 else -1) for n in wrapped], dtype=dtype)
    mine = first if rank == 0 else others
    require_equal(hvd.allreduce(mine), expected)
    require_equal(hvd.grouped_allreduce([mine, mine], op=hvd.Average)[1], expected)
    require_equal(hvd.reducescatter(np.tile(mine, (size, 1)), op=hvd.Average), expected[None])
    require_equal(hvd.allreduce(mine[0] * 0 + np.array(98, dtype), prescale_factor=1 / 49), np.array(2, dtype))
    hvd.allreduce_(mine)
    require_equal(mine, expected)


UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]


def check_unsigned_values_above_the_signed_range(dtype):
    size, rank = hvd.size(), hvd.rank()
    largest = np.iinfo(dtype).max
    half = largest // 2 + 1
    # 97 columns, so that both whole vectors and a rest are reduced
    of_ranks = np.tile(np.array([[half + r, largest - r, half - 1 + r, r] for r in range(size)], dtype), (1, 97))
    mine = of_ranks[rank]
    reductions = {
        hvd.Sum: np.sum(of_ranks, 0, dtype=dtype),  # wraps
        hvd.Product: np.prod(of_ranks, 0, dtype=dtype),
        hvd.Min: of_ranks.min(0),
        hvd.Max: of_ranks.max(0),
        hvd.Average: np.sum(of_ranks, 0, dtype=dtype) // np.array(size, dtype),
    }
    for op, expected in reductions.items():
        require_equal(hvd.allreduce(mine, op=op, name=f"{op.name} {dtype}"), expected)
    # 2.5 is more than the type holds, which is its largest value; 2 ** -3 is exact.
    most = np.full(3, largest - 7 if dtype == "uint64" else largest, dtype)
    require_equal(hvd.allreduce(most, op=hvd.Max, prescale_factor=2.5), np.full(3, largest, dtype))
    powers = np.full(3, half, dtype)
    require_equal(hvd.allreduce(powers, op=hvd.Max, postscale_factor=2.0**-3), powers // np.array(8, dtype))
    require_equal(hvd.allreduce(powers, op=hvd.Max, prescale_factor=-1.0), np.zeros(3, dtype))


@pytest.mark.ranks(2, 3, fast=True)
@pytest.mark.ranks(3, env=RING, way="ring")
@pytest.mark.ranks(3, env=MPI, way="mpi")
@pytest.mark.ranks(3, env=SOCKETS, way="sockets")
@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned_values_above_the_signed_range(dtype):
    check_unsigned_values_above_the_signed_range(dtype)


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", UNSIGNED)
def test_unsigned_arrays_in_groups_in_process_sets_and_beside_ranks_that_have_joined(dtype):
    size, last = hvd.size(), hvd.size() - 1
    large = np.iinfo(dtype).max - 5
    mine = np.array([large + (hvd.rank() == 0), 1, hvd.rank()], dtype)
    maximum, total = hvd.grouped_allreduce([mine, mine], op=hvd.Max), hvd.allreduce_(mine.copy(), op=hvd.Sum)
    require_equal(maximum[1], np.array([large + 1, 1, last], dtype))
    require_equal(total[1:], np.array([size, sum(range(size))], dtype))
    alone = hvd.add_process_set([last])
    if alone.included():
        require_equal(hvd.allreduce(mine, op=hvd.Sum, process_set=alone), mine)
        require_equal(hvd.reducescatter(mine, op=hvd.Sum, process_set=alone), mine)
    hvd.barrier()
    hvd.remove_process_set(alone)
    if hvd.rank() == 0:
        require_equal(hvd.allreduce(mine, op=hvd.Sum, name="beside"), mine)
    hvd.join()


@pytest.mark.ranks(2, initialised=False)
@pytest.mark.parametrize("simd", ["scalar", "avx2", "avx512", "neon"])
def test_unsigned_values_above_the_signed_range_with_each_instruction_set(simd):
    try:
        hvd.init(simd=simd)
    except ValueError:
        pytest.skip(f"this CPU has no {simd}")
    for dtype in UNSIGNED:
        check_unsigned_values_above_the_signed_range(dtype)
    hvd.shutdown()


@pytest.mark.ranks(2, 3)
def test_a_prescale_factor_keeps_float16_in_range():
    mine = np.full(70_000, 60_000, "float16")
    require_equal(hvd.allreduce(mine, prescale_factor=0.125, postscale_factor=8.0), mine)


@pytest.mark.ranks(1, 2)
def test_older_spelling_of_the_op():
    ones = np.ones(3, "float32")
    require_equal(hvd.allreduce(ones, average=False), ones * hvd.size())
    require_equal(hvd.allreduce(ones, average=True), ones)
    require_equal(hvd.allreduce(ones), ones)


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("length", [1, 3, 1 << 17], ids=["copied-1", "copied-3", "read"])
@pytest.mark.parametrize("name", [None, "again"])
def test_the_result_is_an_array_of_its_own(length, name):
    """A small array is copied, so the script may change it at once; a large one is read until the result is there."""
    expected = np.full((2, length), 3, np.float64)
    for _ in range(4):
        mine = np.full((length, 2), hvd.rank() + 1.0).T  # neither contiguous nor writable
        mine.flags.writeable = False
        results = [hvd.allreduce(mine, op=hvd.Sum, name=name)]
        handle = hvd.allreduce_async(mine, op=hvd.Sum, name=name and f"{name} async")
        if length < 1 << 17:
            mine.base[:] = np.nan
        results.append(hvd.synchronize(handle))
        for result in results:
            require_equal(result, expected)
            assert result.flags.owndata and result.flags.c_contiguous and result.flags.writeable
            result[:] = 0
        assert results[0] is not results[1]


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_numbers_and_arrays_that_are_not_contiguous():
    assert hvd.allreduce(2.0, op=hvd.Sum) == 2 * hvd.size()
    assert hvd.allreduce(np.float32(3), op=hvd.Sum).shape == ()
    array = np.arange(24, dtype="float64").reshape(4, 6)
    require_equal(hvd.allreduce(array.T, op=hvd.Sum), array.T * hvd.size())
    require_equal(hvd.allreduce(array[::2, ::3], op=hvd.Sum), array[::2, ::3] * hvd.size())
    view = array[:, 1:4]
    assert hvd.allreduce_(view, op=hvd.Sum) is view
    expected = np.arange(24, dtype="float64").reshape(4, 6)
    expected[:, 1:4] *= hvd.size()
    require_equal(array, expected)


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_a_group_of_different_dtypes():
    shapes_and_dtypes = [((5, 2), "float32"), ((0,), "int64"), ((), "float16"), ((300, 40), "float32")]
    mine = [data(hvd.rank(), shape, dtype, seed=i) for i, (shape, dtype) in enumerate(shapes_and_dtypes)]
    expected = [
        reference("sum", data_of_ranks(hvd.size(), shape, dtype, seed=i))
        for i, (shape, dtype) in enumerate(shapes_and_dtypes)
    ]
    for result, right in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), expected, strict=True):
        require_equal(result, right)
    hvd.grouped_allreduce_(mine, op=hvd.Sum)
    for result, right in zip(mine, expected, strict=True):
        require_equal(result, right)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32"])
def test_compression_gives_back_the_dtype(compression, dtype):
    compressor = getattr(hvd.Compression, compression)
    expected = reference("sum", data_of_ranks(hvd.size(), (50,), dtype))
    mine = data(hvd.rank(), (50,), dtype)
    require_equal(hvd.allreduce(mine, op=hvd.Sum, compression=compressor), expected)
    require_equal(hvd.allreduce_(mine, op=hvd.Sum, compression=compressor), expected)


@pytest.mark.ranks(2)
def test_all_ranks_hold_the_same_bits_on_inexact_data():
    random = np.random.default_rng(hvd.rank())
    for dtype in FLOATS:
        mine = random.standard_normal(100_003).astype(dtype)
        result = hvd.allreduce(mine, name=f"inexact {dtype}")
        copies = hvd.allgather(result.view("uint8"), name=f"copies {dtype}").reshape(hvd.size(), -1)
        assert (copies == copies[0]).all()


@pytest.mark.ranks(3, env=RING)
@pytest.mark.parametrize("count", [10, 1_000_003])
def test_float16_is_summed_in_float32_on_the_ring(count):
    mine = np.full(count, 2048 if hvd.rank() == 0 else 1.5, "float16")
    require_equal(hvd.allreduce(mine, op=hvd.Sum), np.full(count, 2052, "float16"))  # 2051 is none


@pytest.mark.ranks(3, 5, env=DOUBLING)
@pytest.mark.parametrize("count", [10, 100_003])
def test_all_ranks_hold_the_same_bits_by_doubling(count):
    random = np.random.default_rng(hvd.rank())
    for dtype in FLOATS:
        result = hvd.allreduce(random.standard_normal(count).astype(dtype), name=f"inexact {dtype}")
        copies = hvd.allgather(result.view("uint8"), name=f"copies {dtype}").reshape(hvd.size(), -1)
        assert (copies == copies[0]).all()


@pytest.mark.ranks(3, initialised=False)
def test_ranks_with_different_instruction_sets_hold_the_same_bits():
    from ringtrain import _core

    simd = ["scalar", "avx2", "avx512", "neon"]
    hvd.init()
    hvd.shutdown()
    available = []
    for name in simd:
        try:
            hvd.init(simd=name)
        except ValueError:
            continue  # this CPU has no such instructions
        available.append(name)
        assert _core.simd_in_use() == name
        random = np.random.default_rng(hvd.rank())
        results = [hvd.allreduce(random.standard_normal(5003).astype(dtype)) for dtype in FLOATS]
        hvd.shutdown()
        if name == "scalar":
            expected = results
        for result, right in zip(results, expected, strict=True):
            require_equal(result.view("uint8"), right.view("uint8"))
    assert available[0] == "scalar"


@pytest.mark.ranks(2, isolated=True)
def test_a_library_that_flushes_denormals_on_one_rank_changes_nothing(tmp_path):
    import ctypes
    import subprocess

    from mpi4py import MPI

    denormal = np.full(1000, np.finfo("float32").smallest_subnormal * 4, "float32")
    if MPI.COMM_WORLD.Get_rank() == 1:
        library = tmp_path / "fast.so"
        subprocess.run(["gcc", "-shared", "-Ofast", "-x", "c", "/dev/null", "-o", library], check=True, timeout=30)
        ctypes.CDLL(str(library))
    is_flushing = MPI.COMM_WORLD.allgather(not (denormal * np.float32(1)).any())
    if not any(is_flushing):
        pytest.skip("this gcc links nothing into a shared library that flushes denormals")
    hvd.init()
    result = hvd.allreduce(denormal, op=hvd.Sum)
    require_equal(result.view("int32"), np.full(1000, 8, "int32"))
    hvd.shutdown()


# in one job, since getting so much memory takes longer than reducing it
@pytest.mark.slow
@pytest.mark.ranks(2, timeout=300, initialised=False)
def test_more_than_two_gigabytes():
    count = 2**31 + 5
    mine = np.zeros(count, "uint8")
    for algorithm in ("auto", "ring", "mpi"):
        hvd.init(allreduce_algorithm=algorithm)
        mine[[0, 2**30, 2**31, count - 1]] = [1, 2, 3, 4 + hvd.rank()]
        hvd.allreduce_(mine, op=hvd.Max, name=algorithm)
        assert mine[[0, 2**30, 2**31, count - 1]].tolist() == [1, 2, 3, 3 + hvd.size()]
        assert np.count_nonzero(mine) == 4
        mine[-1] = hvd.rank()
        hvd.broadcast_(mine, 1, name=algorithm)
        assert mine[-1] == 1
        hvd.shutdown()
