"""allreduce(weight=) and reducescatter(weight=): the average over the ranks is the mean over all samples."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from exact_cupy import on_gpu, require_on_gpu
from harness.exact import require_equal
from harness.gpu_arrays import GPU
from quantization import QuantizedSum

import ringtrain as hvd

FLOATS = ["float16", "float32", "float64"]


def rows_of(rank, whole):
    """The rows that a reducescatter gives to a rank."""
    return np.array_split(whole, hvd.size())[rank]


class Kind(NamedTuple):
    """An operation that averages by weight, in its forms, and what a rank has of the average of all."""

    whole: Callable
    begin: Callable
    grouped: Callable
    grouped_begin: Callable
    part_of: Callable


KINDS = {
    "allreduce": Kind(
        *(hvd.allreduce, hvd.allreduce_async, hvd.grouped_allreduce, hvd.grouped_allreduce_async),
        part_of=lambda rank, whole: whole,
    ),
    "reducescatter": Kind(
        *(hvd.reducescatter, hvd.reducescatter_async, hvd.grouped_reducescatter, hvd.grouped_reducescatter_async),
        part_of=rows_of,
    ),
}
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def few_weights():
    """By rank, which add up to 8."""
    return [6, 2] if hvd.size() == 2 else [4, 3, 1]


def mean(weights, values):
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", FLOATS)
@of_each_kind
def test_the_average_is_sum_of_weight_times_tensor_by_sum_of_weights(kind, dtype):
    # Weights 1, 2, 4, ... and a rest: they add up to a power of two, and all products are exact.
    of, size, rank = KINDS[kind], hvd.size(), hvd.rank()
    weights = [2**r for r in range(size - 1)] + [2**size - (2 ** (size - 1) - 1)]
    for rows in (1, 7, 1000, 30_000):
        tensors = [((np.arange(rows * 3) % 16 + r).reshape(rows, 3)).astype(dtype) for r in range(size)]
        expected = mean(weights, [tensor.astype("f8") for tensor in tensors]).astype(dtype)
        given = tensors[rank].copy()
        for _ in range(2):  # the second time from the cache
            result = of.whole(given, weight=weights[rank], name=f"{dtype}.{rows}")
            require_equal(result, of.part_of(rank, expected))
            require_equal(given, tensors[rank])


@pytest.mark.ranks(2, 3)
def test_each_step_has_its_own_weights_also_in_cached_plans():
    size, rank = hvd.size(), hvd.rank()
    for step in range(20):
        weights = [(r + step) % 3 * 4 for r in range(size)]
        weights[step % size] += 16 - sum(weights) % 16
        value = np.full(64, float(rank + step))
        expected = mean(weights, [r + step for r in range(size)])
        hvd.allreduce_(value, weight=weights[rank], name="again")
        np.testing.assert_allclose(value, np.full(64, expected), rtol=1e-15)
        if sum(weights) & (sum(weights) - 1) == 0:
            require_equal(value, np.full(64, expected))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("weight", [1, 7, 0.3, 1e300, 1e-300])
@of_each_kind
def test_equal_weights_give_the_bits_of_the_plain_average(kind, weight):
    tensor = np.random.default_rng(hvd.rank()).standard_normal((1000, 10)).astype("f4")
    plain = KINDS[kind].whole(tensor, name="plain")
    weighted = KINDS[kind].whole(tensor, weight=weight, name="weighted")
    if weight == int(weight) and weight < 1e6:
        require_equal(weighted, plain)
    else:
        np.testing.assert_allclose(weighted, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.ranks(1)
def test_one_rank_keeps_its_tensor():
    tensor = np.random.default_rng(1).standard_normal(1000)
    require_equal(hvd.allreduce(tensor, weight=0.3), tensor)


@pytest.mark.ranks(2, 3, env={"RINGTRAIN_FUSION_THRESHOLD_MB": "1"})
@of_each_kind
def test_operations_of_one_plan_have_weights_of_their_own(kind):
    of, size, rank = KINDS[kind], hvd.size(), hvd.rank()
    for step in range(3):
        handles, expected = [], []
        for number in range(30):
            weights = [(number + step) % 2] * (size - 1) + [2 ** (number % 5 + 2)]
            weights[-1] -= sum(weights[:-1])
            tensors = [np.full((10 + number, 2), float(r + number), "f4") for r in range(size)]
            handles.append(of.begin(tensors[rank], weight=weights[rank], name=f"part{number}"))
            expected.append(mean(weights, tensors))
        for handle, value in zip(handles, expected, strict=True):
            require_equal(hvd.synchronize(handle), of.part_of(rank, value))


@pytest.mark.ranks(2, 3)
@of_each_kind
def test_groups(kind):
    of, rank = KINDS[kind], hvd.rank()
    weight, value = few_weights()[rank], 8.0 * (rank > 0)
    arrays = [np.full((7, 2), value), np.full(3, 2 * value, "f4"), np.full((5, 1), value * 1j)]
    ones = 8 - few_weights()[0]
    whole = [np.full((7, 2), ones * 1.0), np.full(3, ones * 2.0, "f4"), np.full((5, 1), ones * 1j)]
    results = [
        of.grouped(arrays, weight=weight, name="new"),
        hvd.synchronize(of.grouped_begin(arrays, weight=weight, name="later")),
    ]
    if kind == "allreduce":
        copies = [[array.copy() for array in arrays] for _ in range(2)]
        results.append(hvd.grouped_allreduce_(copies[0], weight=weight, name="same"))
        results.append(hvd.synchronize(hvd.grouped_allreduce_async_(copies[1], weight=weight, name="both")))
        one = arrays[0].copy()
        assert hvd.synchronize(hvd.allreduce_async_(one, weight=weight, name="one")) is one
        results.append([one, *whole[1:]])
    for result in results:
        for one, expected in zip(result, whole, strict=True):
            require_equal(one, of.part_of(rank, expected))


@pytest.mark.ranks(2, 3)
def test_a_rank_with_weight_0_contributes_nothing_not_even_nan():
    rank = hvd.rank()
    for tensor in (np.full(1000, math.nan if rank == 0 else 5.0, "f4"), hvd.empty(1000, "f4")):
        tensor[...] = math.nan if rank == 0 else 5.0
        hvd.allreduce_(tensor, weight=0 if rank == 0 else 8, name="partly")
        require_equal(tensor, np.full(1000, 5.0, "f4"))


@pytest.mark.ranks(2, 3)
def test_large_weights_do_not_take_float16_out_of_its_range():
    tensor = np.full(100, 1000.0 + 8 * hvd.rank(), "f2")
    result = hvd.allreduce(tensor, weight=4096 * (1 if hvd.rank() else 3))
    weights = [3] + [1] * (hvd.size() - 1)
    expected = sum(w * (1000.0 + 8 * r) for r, w in enumerate(weights)) / sum(weights)
    require_equal(result, np.full(100, expected, "f2"))


@pytest.mark.ranks(2)
@of_each_kind
def test_factors_and_compression_work_with_weights(kind):
    of, rank = KINDS[kind], hvd.rank()
    tensor, weight = np.full((4, 2), 4.0 * rank, "f4"), [3, 1][rank]
    result = of.whole(tensor, weight=weight, prescale_factor=0.5, postscale_factor=8.0)
    require_equal(result, of.part_of(rank, np.full((4, 2), 4, "f4")))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = of.whole(tensor, weight=weight, compression=compression)
        require_equal(result, of.part_of(rank, np.full((4, 2), 1, "f4")))


@pytest.mark.ranks(2)
def test_codes_are_of_relative_weights():
    """Thresholds keep their meaning: the mean of the factors is 1."""
    model = QuantizedSum([2], "2bit", 0.5)
    compression = hvd.Compression.two_bit(0.5, force=True)
    for step in range(3):
        arrays = list(np.random.default_rng(step).standard_normal((2, 1000)).astype("f4"))
        weighted = [arrays[0] * np.float32(1.5), arrays[1] * np.float32(0.5)]
        result = hvd.allreduce(arrays[hvd.rank()], name="codes", weight=[48, 16][hvd.rank()], compression=compression)
        require_equal(result, model("codes", weighted, 1.0, 0.5))


@pytest.mark.ranks(3)
def test_a_process_set_has_weights_of_its_own():
    ranks = hvd.add_process_set([0, 2])
    if ranks.included():
        result = hvd.allreduce(np.full(4, hvd.rank() * 4.0), weight=[3, 9, 1][hvd.rank()], process_set=ranks)
        require_equal(result, np.full(4, 2.0))
    hvd.remove_process_set(ranks)


@pytest.mark.ranks(2, 3, 4)
def test_a_joined_rank_weighs_0():
    size, rank = hvd.size(), hvd.rank()
    for batch in range(2 * rank):
        working = [r for r in range(size) if batch < 2 * r]
        weights = {r: 2 ** (r + 1) for r in working}
        result = hvd.allreduce(np.full(50, rank * 15.0), weight=weights[rank], name=f"batch{batch}")
        expected = sum(w * r * 15.0 for r, w in weights.items()) / sum(weights.values())
        np.testing.assert_allclose(result, np.full(50, expected), rtol=1e-15)
        assert len(working) > 1 or (result == rank * 15.0).all()
    hvd.join()


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("again", [False, True], ids=["new", "cached"])
@of_each_kind
def test_a_weight_on_some_ranks_only_fails_on_all(kind, again):
    average = KINDS[kind].whole
    first, last = ("rank 0", f"ranks 1-{hvd.size() - 1}" if hvd.size() > 2 else "rank 1")
    if again:
        average(np.ones(4), name="some", weight=1)
    with pytest.raises(hvd.MismatchError, match=rf'{kind} "some": .*gave') as caught:
        average(np.ones(4), name="some", weight=None if hvd.rank() == 0 else 2)
    assert f"{first} gave no weight" in str(caught.value)
    assert f"{last} gave a weight" in str(caught.value)
    result, expected = average(np.full(4, 2.0), name="some", weight=2), np.full(4, 2.0)
    require_equal(result, KINDS[kind].part_of(hvd.rank(), expected))


@pytest.mark.ranks(2, 3)
@of_each_kind
def test_weights_that_are_all_0_fail_on_all_and_leave_the_others_of_the_plan_alone(kind):
    of, tensors = KINDS[kind], [np.full(10, 7.0) for _ in range(3)]
    begin = hvd.allreduce_async_ if kind == "allreduce" else of.begin
    for _ in range(3):
        handles = [
            begin(tensor, name=f"one{number}", weight=0 if number == 1 else 4) for number, tensor in enumerate(tensors)
        ]
        with pytest.raises(hvd.MismatchError, match=rf'{kind} "one1": the weights of all ranks are 0'):
            hvd.synchronize(handles[1])
        for number in (0, 2):
            require_equal(hvd.synchronize(handles[number]), of.part_of(hvd.rank(), np.full(10, 7.0)))
        require_equal(tensors[1], np.full(10, 7.0))


@pytest.mark.fast
@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "call",
    [
        *(hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_),
        *(hvd.reducescatter, hvd.reducescatter_async),
    ],
)
def test_wrong_weights_are_refused_on_the_line_of_the_caller(call):
    for weight in (-1, math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="weight must be a finite number that is not negative, not"):
            call(np.ones(2), weight=weight, name="wrong")
    for weight in ("3", [1, 2], object()):
        with pytest.raises(TypeError, match="weight must be a number"):
            call(np.ones(2), weight=weight, name="wrong")
    for op in (hvd.Sum, hvd.Max, hvd.Adasum):
        with pytest.raises(ValueError, match=f"weight is for op=Average, not for op={op.name}"):
            call(np.ones(2), weight=1, op=op, name="wrong")
    with pytest.raises(ValueError, match="weight is for floats, not for int64; convert to float"):
        call(np.ones(2, "i8"), weight=1, name="wrong")


@pytest.mark.ranks(2, 3, env={"RINGTRAIN_SHARED_MEMORY": "off"})
@of_each_kind
def test_between_hosts(kind):
    of, rank, weights = KINDS[kind], hvd.rank(), few_weights()
    for rows in (1, 1000, 100_000):
        result = of.whole(np.full((rows, 4), rank * 8.0, "f4"), weight=weights[rank])
        expected = mean(weights, [8.0 * r for r in range(hvd.size())])
        require_equal(result, of.part_of(rank, np.full((rows, 4), expected, "f4")))


@pytest.mark.ranks(2, 3, env=GPU)
@pytest.mark.parametrize("dtype", FLOATS)
@of_each_kind
def test_on_gpus(kind, dtype):
    of, rank, weights = KINDS[kind], hvd.rank(), few_weights()
    for rows in (1, 2500):
        tensor = on_gpu(np.full((rows, 2), 8.0 * rank, dtype))
        expected = mean(weights, [8.0 * r for r in range(hvd.size())])
        result = of.whole(tensor, weight=weights[rank], name=f"new.{rows}")
        require_on_gpu(result, of.part_of(rank, np.full((rows, 2), expected, dtype)))
        nan = on_gpu(np.full((rows, 2), math.nan if rank == 0 else 2.0, dtype))
        result = of.whole(nan, weight=rank, name=f"partly.{rows}")
        require_on_gpu(result, of.part_of(rank, np.full((rows, 2), 2.0, dtype)))
        if kind == "allreduce":
            hvd.allreduce_(tensor, weight=weights[rank] if rank else 0, name=f"same.{rows}")
            partly = mean([0, *weights[1:]], [8.0 * r for r in range(hvd.size())])
            np.testing.assert_allclose(tensor.get(), partly, rtol=1e-3)


@pytest.mark.ranks(2, 3)
def test_a_rank_with_weight_0_scatters_nothing_not_even_nan():
    rank, size = hvd.rank(), hvd.size()
    tensor = np.full((10, 3), math.nan if rank == 0 else 5.0, "f4")
    for _ in range(2):
        result = hvd.reducescatter(tensor, weight=0 if rank == 0 else 8, name="partly")
        require_equal(result, rows_of(rank, np.full((10, 3), 5.0, "f4")))
    if size == 2:  # rank 1 alone has a weight, so its tensor is the average, with its bits
        random = np.random.default_rng(1).standard_normal((10, 3))
        require_equal(hvd.reducescatter(random, weight=4 * rank), rows_of(rank, random))


@pytest.mark.ranks(2)
def test_a_weight_far_below_the_others_counts_nothing():
    tensor = np.full((100_000, 2), 4.0 * hvd.rank() + 1)
    for _ in range(2):
        result = hvd.reducescatter(tensor, weight=[1e-300, 1e300][hvd.rank()], name="far")
        require_equal(result, np.full((50_000, 2), 5.0))
