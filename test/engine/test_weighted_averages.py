"""allreduce(weight=) and reducescatter(weight=): the average over the ranks is the mean over all samples."""

import math

import numpy as np
import pytest
from exact_cupy import on_gpu, require_on_gpu
from harness.exact import require_equal
from harness.gpu_arrays import GPU
from quantization import QuantizedSum

import ringtrain as hvd

FLOATS = ["float16", "float32", "float64"]


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_average_is_sum_of_weight_times_tensor_by_sum_of_weights(dtype):
    # Weights 1, 2, 4, ... and a rest: they add up to a power of two, and all products are exact.
    size, rank = hvd.size(), hvd.rank()
    weights = [2**r for r in range(size - 1)] + [2**size - (2 ** (size - 1) - 1)]
    for count in (1, 1000, 100_000):
        tensors = [(np.arange(count) % 16 + r).astype(dtype) for r in range(size)]
        expected = sum(w * t.astype("f8") for w, t in zip(weights, tensors, strict=True)) / sum(weights)
        result = hvd.allreduce(tensors[rank], weight=weights[rank], name=f"{dtype}.{count}")
        require_equal(result, expected.astype(dtype))
        assert result.dtype == dtype


@pytest.mark.ranks(2, 3)
def test_each_step_has_its_own_weights_also_in_cached_plans():
    size, rank = hvd.size(), hvd.rank()
    for step in range(20):
        weights = [(r + step) % 3 * 4 for r in range(size)]
        weights[step % size] += 16 - sum(weights) % 16
        value = np.full(64, float(rank + step))
        expected = sum(w * (r + step) for r, w in enumerate(weights)) / sum(weights)
        hvd.allreduce_(value, weight=weights[rank], name="again")
        np.testing.assert_allclose(value, np.full(64, expected), rtol=1e-15)
        if sum(weights) & (sum(weights) - 1) == 0:
            require_equal(value, np.full(64, expected))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("weight", [1, 7, 0.3, 1e300, 1e-300])
def test_equal_weights_give_the_bits_of_the_plain_average(weight):
    tensor = np.random.default_rng(hvd.rank()).standard_normal(10_000).astype("f4")
    plain = hvd.allreduce(tensor, name="plain")
    weighted = hvd.allreduce(tensor, weight=weight, name="weighted")
    if weight == int(weight) and weight < 1e6:
        require_equal(weighted, plain)
    else:
        np.testing.assert_allclose(weighted, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.ranks(1)
def test_one_rank_keeps_its_tensor():
    tensor = np.random.default_rng(1).standard_normal(1000)
    require_equal(hvd.allreduce(tensor, weight=0.3), tensor)


@pytest.mark.ranks(2, 3, env={"RINGTRAIN_FUSION_THRESHOLD_MB": "1"})
def test_operations_of_one_plan_have_weights_of_their_own():
    size, rank = hvd.size(), hvd.rank()
    for _ in range(3):
        handles, expected = [], []
        for number in range(30):
            weights = [1] * (size - 1) + [2 ** (number % 5 + 2) - (size - 1)]
            tensors = [np.full(100 + number, float(r + number), "f4") for r in range(size)]
            handles.append(hvd.allreduce_async(tensors[rank], weight=weights[rank], name=f"part{number}"))
            expected.append(sum(w * t for w, t in zip(weights, tensors, strict=True)) / sum(weights))
        for handle, value in zip(handles, expected, strict=True):
            require_equal(hvd.synchronize(handle), value)


@pytest.mark.ranks(2)
def test_grouped_and_in_place():
    rank, weight = hvd.rank(), [6, 2][hvd.rank()]
    arrays = [np.full(3, rank * 4.0), np.full((2, 2), rank * 8.0, "f4"), np.full(2, rank * 8j)]
    for result in (
        hvd.grouped_allreduce(arrays, weight=weight, name="new"),
        hvd.synchronize(hvd.grouped_allreduce_async(arrays, weight=weight, name="later")),
        hvd.grouped_allreduce_([array.copy() for array in arrays], weight=weight, name="same"),
        hvd.synchronize(hvd.grouped_allreduce_async_([one.copy() for one in arrays], weight=weight, name="both")),
    ):
        require_equal(result[0], np.full(3, 1.0))
        require_equal(result[1], np.full((2, 2), 2.0, "f4"))
        require_equal(result[2], np.full(2, 2j))
    one = np.full(5, rank * 4.0)
    assert hvd.synchronize(hvd.allreduce_async_(one, weight=weight, name="one")) is one
    require_equal(one, np.full(5, 1.0))


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
def test_factors_and_compression_work_with_weights():
    tensor, weight = np.full(10, 4.0 * hvd.rank(), "f4"), [3, 1][hvd.rank()]
    require_equal(hvd.allreduce(tensor, weight=weight, prescale_factor=0.5, postscale_factor=8.0), np.full(10, 4, "f4"))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        require_equal(hvd.allreduce(tensor, weight=weight, compression=compression), np.full(10, 1, "f4"))


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
@pytest.mark.parametrize("kind", ["allreduce", "reducescatter"])
def test_a_weight_on_some_ranks_only_fails_on_all(kind, again):
    average = getattr(hvd, kind)
    first, last = ("rank 0", f"ranks 1-{hvd.size() - 1}" if hvd.size() > 2 else "rank 1")
    if again:
        average(np.ones(4), name="some", weight=1)
    with pytest.raises(hvd.MismatchError, match=rf'{kind} "some": .*gave') as caught:
        average(np.ones(4), name="some", weight=None if hvd.rank() == 0 else 2)
    assert f"{first} gave no weight" in str(caught.value)
    assert f"{last} gave a weight" in str(caught.value)
    result, expected = average(np.full(4, 2.0), name="some", weight=2), np.full(4, 2.0)
    require_equal(result, expected if kind == "allreduce" else rows_of(hvd.rank(), expected))


@pytest.mark.ranks(2, 3)
def test_weights_that_are_all_0_fail_on_all_and_leave_the_others_of_the_plan_alone():
    for _ in range(3):
        tensors = [np.full(10, 7.0) for _ in range(3)]
        handles = [
            hvd.allreduce_async_(tensor, name=f"one{number}", weight=0 if number == 1 else 4)
            for number, tensor in enumerate(tensors)
        ]
        with pytest.raises(hvd.MismatchError, match=r'allreduce "one1": the weights of all ranks are 0'):
            hvd.synchronize(handles[1])
        for number in (0, 2):
            require_equal(hvd.synchronize(handles[number]), np.full(10, 7.0))
        require_equal(tensors[1], np.full(10, 7.0))


@pytest.mark.fast
@pytest.mark.ranks(1)
@pytest.mark.parametrize("call", [hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_])
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


@pytest.mark.ranks(2, env={"RINGTRAIN_SHARED_MEMORY": "off"})
def test_between_hosts():
    for count in (1, 1000, 500_000):
        tensor = np.full(count, hvd.rank() * 4.0, "f4")
        require_equal(hvd.allreduce(tensor, weight=[6, 2][hvd.rank()]), np.full(count, 1.0, "f4"))


@pytest.mark.ranks(2, 3, env=GPU)
@pytest.mark.parametrize("dtype", FLOATS)
def test_on_gpus(dtype):
    weights = [6, 2] if hvd.size() == 2 else [4, 3, 1]
    for count in (1, 5000):
        tensor = on_gpu(np.full(count, 8.0 * hvd.rank(), dtype))
        expected = sum(w * 8.0 * rank for rank, w in enumerate(weights)) / 8
        result = hvd.allreduce(tensor, weight=weights[hvd.rank()], name=f"new.{count}")
        require_on_gpu(result, np.full(count, expected, dtype))
        hvd.allreduce_(tensor, weight=weights[hvd.rank()] if hvd.rank() else 0, name=f"same.{count}")
        rest = sum(weights[1:])
        np.testing.assert_allclose(
            tensor.get(), sum(w * 8.0 * rank for rank, w in enumerate(weights)) / rest, rtol=1e-3
        )


# --- reducescatter


def rows_of(rank, whole):
    """The rows that a reducescatter gives to a rank."""
    return np.array_split(whole, hvd.size())[rank]


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_scattered_average_is_sum_of_weight_times_tensor_by_sum_of_weights(dtype):
    size, rank = hvd.size(), hvd.rank()
    weights = [2**r for r in range(size - 1)] + [2**size - (2 ** (size - 1) - 1)]
    for rows in (1, 7, 1000, 30_000):
        tensors = [((np.arange(rows * 3) % 16 + r).reshape(rows, 3)).astype(dtype) for r in range(size)]
        expected = sum(w * t.astype("f8") for w, t in zip(weights, tensors, strict=True)) / sum(weights)
        given = tensors[rank].copy()
        for _ in range(2):  # the second time from the cache
            result = hvd.reducescatter(given, weight=weights[rank], name=f"{dtype}.{rows}")
            require_equal(result, rows_of(rank, expected.astype(dtype)))
            require_equal(given, tensors[rank])


@pytest.mark.ranks(2, 3, 4)
def test_equal_weights_give_the_bits_of_the_plain_scattered_average():
    tensor = np.random.default_rng(hvd.rank()).standard_normal((1000, 10)).astype("f4")
    plain = hvd.reducescatter(tensor, name="plain")
    for weight in (1, 7):
        require_equal(hvd.reducescatter(tensor, weight=weight, name="weighted"), plain)


@pytest.mark.ranks(2, 3)
def test_scattered_operations_of_one_plan_have_weights_of_their_own():
    size, rank = hvd.size(), hvd.rank()
    for step in range(3):
        handles, expected = [], []
        for number in range(30):
            weights = [(number + step) % 2] * (size - 1) + [2 ** (number % 5 + 2)]
            weights[-1] -= sum(weights[:-1])
            tensors = [np.full((10 + number, 2), float(r + number), "f4") for r in range(size)]
            handles.append(hvd.reducescatter_async(tensors[rank], weight=weights[rank], name=f"part{number}"))
            expected.append(sum(w * t for w, t in zip(weights, tensors, strict=True)) / sum(weights))
        for handle, value in zip(handles, expected, strict=True):
            require_equal(hvd.synchronize(handle), rows_of(rank, value))


@pytest.mark.ranks(2, 3)
def test_grouped_scattered_averages():
    rank, weight = hvd.rank(), [6, 1, 1][hvd.rank()] if hvd.size() == 3 else [6, 2][hvd.rank()]
    arrays = [np.full((7, 2), 8.0 * (rank > 0)), np.full(2, 16.0 * (rank > 0), "f4"), np.full((5, 1), 8j * (rank > 0))]
    whole = [np.full((7, 2), 2.0), np.full(2, 4.0, "f4"), np.full((5, 1), 2j)]
    for result in (
        hvd.grouped_reducescatter(arrays, weight=weight, name="new"),
        hvd.synchronize(hvd.grouped_reducescatter_async(arrays, weight=weight, name="later")),
    ):
        for one, expected in zip(result, whole, strict=True):
            require_equal(one, rows_of(rank, expected))


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


@pytest.mark.ranks(2)
def test_factors_and_compression_work_with_weights_of_reducescatter():
    tensor, weight = np.full((4, 2), 4.0 * hvd.rank(), "f4"), [3, 1][hvd.rank()]
    result = hvd.reducescatter(tensor, weight=weight, prescale_factor=0.5, postscale_factor=8.0)
    require_equal(result, np.full((2, 2), 4, "f4"))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        require_equal(hvd.reducescatter(tensor, weight=weight, compression=compression), np.full((2, 2), 1, "f4"))


@pytest.mark.ranks(2, 3)
def test_weights_of_reducescatter_that_are_all_0_fail_on_all_and_leave_the_others_of_the_plan_alone():
    for _ in range(3):
        handles = [
            hvd.reducescatter_async(np.full(10, 7.0), name=f"one{number}", weight=0 if number == 1 else 4)
            for number in range(3)
        ]
        with pytest.raises(hvd.MismatchError, match=r'reducescatter "one1": the weights of all ranks are 0'):
            hvd.synchronize(handles[1])
        for number in (0, 2):
            require_equal(hvd.synchronize(handles[number]), rows_of(hvd.rank(), np.full(10, 7.0)))


@pytest.mark.fast
@pytest.mark.ranks(1)
@pytest.mark.parametrize("call", [hvd.reducescatter, hvd.reducescatter_async])
def test_wrong_weights_of_reducescatter_are_refused_on_the_line_of_the_caller(call):
    for weight in (-1, math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="reducescatter: weight must be a finite number that is not negative, not"):
            call(np.ones(2), weight=weight, name="wrong")
    with pytest.raises(TypeError, match="reducescatter: weight must be a number"):
        call(np.ones(2), weight="3", name="wrong")
    with pytest.raises(ValueError, match="reducescatter: weight is for op=Average, not for op=Sum"):
        call(np.ones(2), weight=1, op=hvd.Sum, name="wrong")
    with pytest.raises(ValueError, match="weight is for floats, not for int64; convert to float"):
        call(np.ones(2, "i8"), weight=1, name="wrong")


@pytest.mark.ranks(2, 3, env={"RINGTRAIN_SHARED_MEMORY": "off"})
def test_scattered_averages_between_hosts():
    weights = [6, 2] if hvd.size() == 2 else [4, 3, 1]
    for rows in (1, 1000, 100_000):
        tensor = np.full((rows, 4), hvd.rank() * 8.0, "f4")
        result = hvd.reducescatter(tensor, weight=weights[hvd.rank()])
        expected = sum(w * 8.0 * rank for rank, w in enumerate(weights)) / 8
        require_equal(result, rows_of(hvd.rank(), np.full((rows, 4), expected, "f4")))


@pytest.mark.ranks(2, 3, env=GPU)
@pytest.mark.parametrize("dtype", FLOATS)
def test_scattered_averages_on_gpus(dtype):
    weights = [6, 2] if hvd.size() == 2 else [4, 3, 1]
    for rows in (1, 700):
        tensor = on_gpu(np.full((rows, 2), 8.0 * hvd.rank(), dtype))
        expected = sum(w * 8.0 * rank for rank, w in enumerate(weights)) / 8
        result = hvd.reducescatter(tensor, weight=weights[hvd.rank()], name=f"new.{rows}")
        require_on_gpu(result, rows_of(hvd.rank(), np.full((rows, 2), expected, dtype)))
        nan = on_gpu(np.full((rows, 2), math.nan if hvd.rank() == 0 else 2.0, dtype))
        result = hvd.reducescatter(nan, weight=hvd.rank(), name=f"partly.{rows}")
        require_on_gpu(result, rows_of(hvd.rank(), np.full((rows, 2), 2.0, dtype)))
