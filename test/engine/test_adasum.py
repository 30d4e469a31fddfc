"""Adaptive summation, op=Adasum: against the naive tree, on every Group and for any number of ranks."""

import ml_dtypes
import numpy as np
import pytest
from harness.exact import DTYPES, FLOATS, require_equal

import ringtrain as hvd
from ringtrain.optim import SGD

RING = {"RINGTRAIN_ALLREDUCE_ALGORITHM": "ring"}
MPI = {"RINGTRAIN_NETWORK": "mpi", "RINGTRAIN_ALLREDUCE_ALGORITHM": "mpi"}
DOUBLING = {"RINGTRAIN_ALLREDUCE_ALGORITHM": "doubling"}
TINY_CHUNKS = {"RINGTRAIN_MAILBOX_KB": "4", "RINGTRAIN_ALLREDUCE_ALGORITHM": "auto"}

SHAPES = [(), (0,), (1,), (7,), (33, 17), (1021,), (70_001,)]
# For other ways to send than shared memory, whose own tests have the rest: small, odd, and more than one message.
FEW_SHAPES = [(7,), (1021,), (70_001,)]

# The result is rounded once, by half a unit in the last place: this share of it, and a little of the largest element
# for what is computed before.
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
BEFORE = {"float16": 1e-6, "bfloat16": 1e-6, "float32": 1e-6, "float64": 1e-14}


def pair_sum(a, b):
    """Two float64 arrays of one shape as one."""
    dot, of_a, of_b = np.sum(a * b), np.sum(a * a), np.sum(b * b)
    smallest = np.sqrt(np.finfo("float64").tiny)
    return (1 if of_a < smallest else 1 - dot / (2 * of_a)) * a + (1 if of_b < smallest else 1 - dot / (2 * of_b)) * b


def tree_sum(arrays):
    """The naive tree, in float64: neighbours are paired, and an odd one out moves up."""
    level = [np.asarray(array).astype("float64") for array in arrays]
    while len(level) > 1:
        pairs = [pair_sum(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[2 * len(pairs) :]
    return level[0]


def gradient(rank, shape, dtype, seed=0):
    """Returns vectors that ranks have in common, and as much of their own."""
    common = np.random.default_rng([seed]).standard_normal(shape)
    return np.asarray(common + np.random.default_rng([seed, rank + 1]).standard_normal(shape)).astype(dtype)


def require_close(actual, arrays):
    expected = tree_sum(arrays)
    actual = np.asarray(actual)
    assert (actual.dtype, actual.shape) == (arrays[0].dtype, expected.shape)
    largest = float(np.abs(expected).max(initial=0))
    rounding, before = ROUNDING[actual.dtype.name], BEFORE[actual.dtype.name]
    np.testing.assert_allclose(actual.astype("float64"), expected, rtol=rounding, atol=before * largest)


def check_shapes(dtype, shapes=SHAPES):
    for shape in shapes:
        arrays = [gradient(rank, shape, dtype) for rank in range(hvd.size())]
        mine = arrays[hvd.rank()].copy()
        result = hvd.allreduce(mine, op=hvd.Adasum, name=f"{shape}")
        require_close(result, arrays)
        require_equal(mine, arrays[hvd.rank()])
        assert hvd.allreduce_(mine, op=hvd.Adasum, name=f"{shape} in place") is mine
        require_equal(mine, result)
        copies = hvd.allgather(np.atleast_1d(result).view("uint8"), name=f"copies {shape}").reshape(hvd.size(), -1)
        assert (copies == copies[0]).all()


@pytest.mark.ranks(1, 2, 3, 4, 5, 6, fast=[1, 2, 3, 4], slow=[5, 6])
@pytest.mark.ranks(2, 3, env=TINY_CHUNKS, way="small mailboxes")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_shape(dtype):
    check_shapes(dtype)


@pytest.mark.ranks(2, 3, 5, env=RING, slow=True, way="ring")
@pytest.mark.ranks(3, env=MPI, fast=True, way="mpi")
@pytest.mark.ranks(6, env=DOUBLING, way="doubling")
@pytest.mark.ranks(4, hosts=(2, 2), timeout=120)
@pytest.mark.ranks(3, hosts=(2, 1), timeout=120, slow=True)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shapes_on_every_way(dtype):
    check_shapes(dtype, FEW_SHAPES)


@pytest.mark.ranks(2, 3, slow=[2])
def test_a_large_array():
    check_shapes("float32", [(3_000_017,)])


@pytest.mark.ranks(1, 2, 3, 4, 5, fast=[1, 2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_orthogonal_vectors_are_summed(dtype):
    mine = np.zeros(1021, dtype)
    mine[hvd.rank() :: hvd.size()] = hvd.rank() + 3
    expected = np.resize(np.arange(3, hvd.size() + 3), 1021).astype(dtype)
    require_equal(hvd.allreduce(mine, op=hvd.Adasum), expected)


@pytest.mark.ranks(1, 2, 3, 4, 5, fast=[1, 2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equal_inputs_are_the_result(dtype):
    mine = np.random.default_rng(7).standard_normal(1021).astype(dtype)
    require_equal(hvd.allreduce(mine, op=hvd.Adasum), mine)


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zeros_change_nothing(dtype):
    require_equal(hvd.allreduce(np.zeros(100, dtype), op=hvd.Adasum), np.zeros(100, dtype))
    values = np.random.default_rng(8).standard_normal(100).astype(dtype)
    for who in range(hvd.size()):
        mine = values if hvd.rank() == who else np.zeros(100, dtype)
        require_equal(hvd.allreduce(mine, op=hvd.Adasum), values)


@pytest.mark.ranks(2)
def test_values_near_zero_are_summed():
    require_equal(hvd.allreduce(np.full(3, 1e-100), op=hvd.Adasum), np.full(3, 2e-100))


@pytest.mark.ranks(2)
def test_squares_beyond_the_range_of_the_dtype():
    for dtype, large in (("float32", 2.0**100), ("float16", 2.0**15), (ml_dtypes.bfloat16, 2.0**120)):
        mine = np.full(50, large, dtype)
        require_equal(hvd.allreduce(mine, op=hvd.Adasum), mine)


@pytest.mark.ranks(2)
def test_factors_beyond_the_range_of_the_dtype():
    arrays = [np.full(50, 2.0**exponent, "float32") for exponent in (-70, 70)]
    require_equal(hvd.allreduce(arrays[hvd.rank()], op=hvd.Adasum), arrays[1] / 2)


@pytest.mark.ranks(3)
def test_nan_is_never_lost():
    mine = np.ones(500, "float32")
    if hvd.rank() == 1:
        mine[3] = np.nan
    assert np.isnan(hvd.allreduce(mine, op=hvd.Adasum)).all()  # no dot product is known any more


@pytest.mark.fast
@pytest.mark.ranks(2, 3, 4)
def test_each_of_many_tensors_is_a_vector_of_its_own():
    counts = [1, 3000, 0, 7, 64, 20_011, 2, 513]
    for _ in range(3):
        for dtype in FLOATS:
            ranks = [
                [gradient(rank, (count,), dtype, seed) * 10**seed for seed, count in enumerate(counts[:4])]
                + [gradient(rank, (count,), dtype, seed) for seed, count in enumerate(counts[4:])]
                for rank in range(hvd.size())
            ]
            ones = [hvd.allreduce_async(np.ones(9, dtype), op=hvd.Sum, name=f"{dtype} sum {i}") for i in range(3)]
            handles = [
                hvd.allreduce_async_(array.copy(), op=hvd.Adasum, name=f"{dtype} {i}")
                for i, array in enumerate(ranks[hvd.rank()])
            ]
            for i, handle in enumerate(handles):
                require_close(hvd.synchronize(handle), [arrays[i] for arrays in ranks])
            for handle in ones:
                require_equal(hvd.synchronize(handle), np.full(9, hvd.size(), dtype))


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_a_group_of_different_dtypes():
    dtypes = ["float32", "float16", ml_dtypes.bfloat16, "float64", "float32", "float16"]
    ranks = [
        [gradient(rank, (50 + 7 * i, 3), dtype, i) for i, dtype in enumerate(dtypes)] for rank in range(hvd.size())
    ]
    mine = [array.copy() for array in ranks[hvd.rank()]]
    results = hvd.grouped_allreduce(mine, op=hvd.Adasum)
    assert hvd.grouped_allreduce_(mine, op=hvd.Adasum)[0] is mine[0]
    for i, result in enumerate(results):
        require_close(result, [arrays[i] for arrays in ranks])
        require_equal(mine[i], result)


@pytest.mark.ranks(2, 3)
def test_arrays_in_shared_memory():
    for step in range(3):
        arrays = [gradient(rank, (40_000,), "float32", step) for rank in range(hvd.size())]
        mine = hvd.empty(40_000, "float32")
        mine[...] = arrays[hvd.rank()]
        hvd.allreduce_(mine, op=hvd.Adasum, name="shared")
        require_close(mine, arrays)


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scale_factors(dtype):
    mine = gradient(hvd.rank(), (3000,), dtype)
    result = hvd.allreduce(mine, op=hvd.Adasum)
    scaled = hvd.allreduce(mine, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=-4.0)
    require_equal(scaled, result * np.asarray(-2, dtype))


@pytest.mark.ranks(2)
def test_compression_gives_back_the_dtype():
    mine = np.random.default_rng(3).integers(-50, 50, 300).astype("float32")
    result = hvd.allreduce(mine, op=hvd.Adasum, compression=hvd.Compression.fp16)
    require_equal(result, mine)


@pytest.mark.fast
@pytest.mark.ranks(3, 4)
def test_within_a_process_set():
    some = hvd.add_process_set([0, 2])
    if some.included():
        arrays = [gradient(rank, (5000,), "float32") for rank in some.ranks]
        require_close(hvd.allreduce(arrays[some.rank()], op=hvd.Adasum, process_set=some), arrays)
    alone = hvd.add_process_set([1])
    if alone.included():
        mine = gradient(1, (50,), "float32")
        require_equal(hvd.allreduce(mine, op=hvd.Adasum, process_set=alone), mine)
    hvd.remove_process_set(some)
    hvd.remove_process_set(alone)


@pytest.mark.fast
@pytest.mark.ranks(2, 3, 4)
def test_joined_ranks_contribute_zeros():
    for epoch in range(3):
        for batch in range(2 * hvd.rank() + epoch):
            arrays = [gradient(rank, (900,), "float32", batch) for rank in range(hvd.size())]
            mine = arrays[hvd.rank()]
            for rank in range(hvd.size()):
                if batch >= 2 * rank + epoch:
                    arrays[rank] = np.zeros_like(mine)
            require_close(hvd.allreduce(mine, op=hvd.Adasum, name=f"batch{batch}"), arrays)
        assert hvd.join() == hvd.size() - 1


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in FLOATS], ids=str)
def test_integers_are_refused_on_the_callers_line(dtype):
    ones = np.ones(4, dtype)
    for kind in (ValueError, RuntimeError):  # the latter is Horovod's
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async_):
            with pytest.raises(kind, match=f'allreduce "ones": Adasum is for floats, not for {dtype}; use op=Sum, or'):
                call(ones, op=hvd.Adasum, name="ones")
        with pytest.raises(kind, match="Adasum is for floats"):
            hvd.grouped_allreduce([np.ones(3), ones], op=hvd.Adasum)
        with pytest.raises(kind, match="Adasum is for real numbers"):
            hvd.allreduce(np.ones(3, "complex64"), op=hvd.Adasum)


@pytest.mark.ranks(1, 2)
def test_a_part_of_an_adaptive_sum_is_refused_on_the_callers_line():
    for kind in (ValueError, RuntimeError):  # the latter is Horovod's
        with pytest.raises(kind, match="reducescatter does not support Adasum; use allreduce"):
            hvd.reducescatter(np.ones(4), op=hvd.Adasum)
        with pytest.raises(kind, match="reducescatter does not support Adasum; use allreduce"):
            hvd.grouped_reducescatter([np.ones(4)], op=hvd.Adasum)
    with pytest.raises(ValueError, match="op=Average"):
        hvd.DistributedOptimizer(SGD(lr=0.1), op=hvd.Adasum, gradient_predivide_factor=2.0)


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
def test_ranks_that_disagree_about_it():
    last = hvd.size() - 1
    with pytest.raises(hvd.MismatchError, match=f"used op=Sum, rank {last} used op=Adasum"):
        hvd.allreduce(np.ones(4), op=hvd.Adasum if hvd.rank() == last else hvd.Sum, name="bad")
    require_equal(hvd.allreduce(np.ones(4), op=hvd.Adasum, name="bad"), np.ones(4))
