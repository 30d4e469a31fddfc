"""Gradients are averaged before the wrapped optimizer sees them; compression on the way."""

import copy

import ml_dtypes
import numpy as np
import pytest

import ringtrain as hvd
from ringtrain import _core as core
from ringtrain.engine.compression import Compression
from ringtrain.optim import Adam
from ringtrain.training.gradient_batch import GradientBatch
from ringtrain.training.optimizer import split_evenly


class StepRecorder:
    """An optimizer with the face of ringtrain.optim."""

    def __init__(self):
        self.lr = 0.1
        self.seen = []

    def step(self, params, grads):
        self.seen.append(grads)
        for param, gradient in zip(params, grads, strict=True):
            param -= gradient
        return "stepped"


class UpdateRecorder:
    """An optimizer with the face of MXNet's."""

    def __init__(self):
        self.learning_rate = 0.1
        self.seen = []

    def set_learning_rate(self, learning_rate):
        self.learning_rate = learning_rate

    def create_state_multi_precision(self, index, weight):
        return f"state of {index}"

    def update(self, index, weight, grad, state):
        self.seen.append(("update", index, copy.deepcopy(grad), state))

    def update_multi_precision(self, index, weight, grad, state):
        self.seen.append(("update_multi_precision", index, copy.deepcopy(grad), state))


# Every gradient is a multiple of size, so that averages are exact.
def gradient_of(rank, position=0, dtype=np.float32):
    return np.asarray(hvd.size() * (np.arange(5) + rank + position), dtype)


def average_of(position=0, dtype=np.float32):
    return np.asarray(sum(gradient_of(rank, position, np.float64) for rank in range(hvd.size())) / hvd.size(), dtype)


def is_average(gradient, position=0):
    return np.array_equal(gradient, average_of(position, gradient.dtype))


# ringtrain.optim's face: step(params, grads)


@pytest.mark.ranks(1, 2, 3, 4)
def test_step_sees_the_averages_in_the_same_arrays():
    optimizer = hvd.DistributedOptimizer(StepRecorder())
    params = [np.zeros(5, np.float32) for _ in range(3)]
    gradients = [gradient_of(hvd.rank(), position) for position in range(3)]
    assert optimizer.step(params, gradients) == "stepped"
    for position, seen in enumerate(optimizer.seen[0]):
        assert seen is gradients[position]
        assert is_average(seen, position)
        assert np.array_equal(params[position], -average_of(position))


@pytest.mark.ranks(1, 2, 3)
def test_step_hands_out_new_arrays_for_what_it_cannot_overwrite():
    optimizer = hvd.DistributedOptimizer(StepRecorder())
    read_only = gradient_of(hvd.rank())
    read_only.flags.writeable = False
    strided = np.repeat(gradient_of(hvd.rank(), 1), 2)[::2]
    scalar = np.float64(hvd.size() * hvd.rank())
    optimizer.step([np.zeros(5), np.zeros(5), np.zeros(())], [read_only, strided, scalar])
    first, second, third = optimizer.seen[0]
    assert is_average(first)
    assert np.array_equal(read_only, gradient_of(hvd.rank()))
    assert second is strided
    assert is_average(second, 1)
    assert third == sum(range(hvd.size()))


@pytest.mark.ranks(1, 2, 3, 4)
def test_all_ranks_train_the_same_parameters():
    params = [np.full((3, 2), 10.0 * hvd.rank()), np.full(2, 1.0 * hvd.rank())]
    hvd.broadcast_parameters(params)
    optimizer = hvd.DistributedOptimizer(Adam(lr=0.1))
    for step in range(3):
        optimizer.step(params, [param - hvd.rank() - step for param in params])
    everywhere = hvd.allgather_object(params)
    assert all(np.array_equal(theirs, mine) for other in everywhere for theirs, mine in zip(other, params, strict=True))


# MXNet's face: update(index, weight, grad, state)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("method", ["update", "update_multi_precision"])
def test_update_sees_the_average_of_one_gradient(method):
    optimizer = hvd.DistributedOptimizer(UpdateRecorder())
    for index in (0, 1, 0):
        gradient = gradient_of(hvd.rank(), index)
        getattr(optimizer, method)(index, None, gradient, f"state {index}")
        called, seen_index, seen, state = optimizer.seen[-1]
        assert (called, seen_index, state) == (method, index, f"state {index}")
        assert is_average(seen, index)
        assert is_average(gradient, index)


@pytest.mark.ranks(1, 2, 3)
def test_update_sees_the_averages_of_a_list():
    optimizer = hvd.DistributedOptimizer(UpdateRecorder())
    indices = [4, 2, "bias"]
    gradients = [gradient_of(hvd.rank(), position) for position in range(3)]
    optimizer.update(indices, [None] * 3, gradients, ["a", "b", "c"])
    _, seen_indices, seen, states = optimizer.seen[0]
    assert (seen_indices, states) == (indices, ["a", "b", "c"])
    assert all(is_average(gradient, position) for position, gradient in enumerate(seen))
    assert all(is_average(gradient, position) for position, gradient in enumerate(gradients))


# Options


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "options",
    [{"num_groups": 2}, {"num_groups": 9}, {"groups": 1}, {"groups": [[0, 2], [3]]}, {"num_groups": 9, "groups": 1}],
    ids=str,
)
def test_groups_change_nothing_but_the_way(options):
    optimizer = hvd.DistributedOptimizer(StepRecorder(), **options)
    for _ in range(2):
        dtypes = [np.float32, np.float64, np.float32, np.float16, np.float32]
        gradients = [gradient_of(hvd.rank(), position, dtype) for position, dtype in enumerate(dtypes)]
        optimizer.step([np.zeros(5)] * 5, gradients)
        assert all(is_average(gradient, position) for position, gradient in enumerate(gradients))
        assert [gradient.dtype for gradient in optimizer.seen[-1]] == dtypes


@pytest.mark.ranks(1, 2, 3)
def test_groups_may_hold_names():
    names = [("a", None), ("b", None), ("c", None)]
    optimizer = hvd.DistributedOptimizer(StepRecorder(), named_parameters=names, groups=[["c", "a"]])
    gradients = [gradient_of(hvd.rank(), position) for position in range(3)]
    optimizer.step([np.zeros(5)] * 3, gradients)
    assert all(is_average(gradient, position) for position, gradient in enumerate(gradients))


@pytest.mark.ranks(1, 2, 4)
def test_predividing_gives_the_same_average():
    optimizer = hvd.DistributedOptimizer(StepRecorder(), gradient_predivide_factor=4.0)
    gradient = gradient_of(hvd.rank())
    optimizer.step([np.zeros(5)], [gradient])
    assert is_average(gradient)


@pytest.mark.ranks(1, 2, 3)
def test_a_sum_is_not_divided():
    optimizer = hvd.DistributedOptimizer(StepRecorder(), op=hvd.Sum)
    gradient = gradient_of(hvd.rank())
    optimizer.step([np.zeros(5)], [gradient])
    assert np.array_equal(gradient, hvd.size() * average_of())


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("compression", [Compression.fp16, Compression.bf16])
@pytest.mark.parametrize("num_groups", [0, 1])
def test_compressed_gradients_come_back_in_their_dtype(compression, num_groups):
    optimizer = hvd.DistributedOptimizer(StepRecorder(), compression=compression, num_groups=num_groups)
    dtypes = [np.float32, np.float64, np.float16]
    gradients = [gradient_of(hvd.rank(), position, dtype) for position, dtype in enumerate(dtypes)]
    optimizer.step([np.zeros(5)] * 3, gradients)
    assert [gradient.dtype for gradient in optimizer.seen[0]] == dtypes
    assert all(is_average(gradient, position) for position, gradient in enumerate(gradients))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("averaged", [False, True])
def test_several_backward_passes_make_one_update_with_their_sum(averaged):
    optimizer = hvd.DistributedOptimizer(
        StepRecorder(), backward_passes_per_step=2, average_aggregated_gradients=averaged
    )
    params = [np.zeros(5), np.zeros(())]
    for step in range(2):
        gradient = gradient_of(hvd.rank(), dtype=np.float64)
        assert optimizer.step(params, [gradient, np.float64(hvd.size())]) is None
        gradient[:] = 2 * gradient  # as the next backward pass would
        assert optimizer.step(params, [gradient, np.float64(hvd.size())]) == "stepped"
        assert len(optimizer.seen) == step + 1
        passes = 2 if averaged else 1
        assert np.array_equal(optimizer.seen[-1][0], 3 * average_of() / passes)
        assert optimizer.seen[-1][1] == 2 * hvd.size() / passes


@pytest.mark.ranks(1, 2)
def test_backward_passes_are_counted_for_each_index():
    optimizer = hvd.DistributedOptimizer(UpdateRecorder(), backward_passes_per_step=2)
    for index in (0, 1, 0, 1):
        optimizer.update(index, None, gradient_of(hvd.rank(), index), None)
    assert [index for _, index, _, _ in optimizer.seen] == [0, 1]
    assert all(np.array_equal(seen, 2 * average_of(index)) for _, index, seen, _ in optimizer.seen)


@pytest.mark.ranks(3, 4)
def test_only_the_ranks_of_a_process_set_average():
    pair = hvd.add_process_set(hvd.ProcessSet([0, 1]))
    optimizer = hvd.DistributedOptimizer(StepRecorder(), process_set=pair)
    gradient = np.full(3, 2.0 * hvd.rank())
    optimizer.step([np.zeros(3)], [gradient])
    assert np.array_equal(gradient, np.full(3, 1.0 if pair.included() else 2.0 * hvd.rank()))
    hvd.remove_process_set(pair)


@pytest.mark.ranks(1, 2, 3)
def test_two_optimizers_do_not_clash():
    batches = [GradientBatch(), GradientBatch(), GradientBatch(prefix="mine")]
    gradients = [gradient_of(hvd.rank(), position) for position in range(3)]
    for batch, gradient in zip(batches, gradients, strict=True):
        batch.ready("weight", gradient)
    for position in (1, 0, 2):
        assert batches[position].wait()["weight"] is gradients[position]
        assert is_average(gradients[position], position)


@pytest.mark.ranks(2)
def test_an_optimizer_that_one_rank_has_more_disturbs_nobody():
    if hvd.rank() == 0:
        GradientBatch()
    batches = [GradientBatch(), GradientBatch()]
    gradients = [gradient_of(hvd.rank(), position) for position in range(2)]
    for batch, gradient in zip(batches, gradients, strict=True):
        batch.ready("weight", gradient)
    for batch in batches:
        batch.wait()
    assert all(is_average(gradient, position) for position, gradient in enumerate(gradients))


# GradientBatch by itself


@pytest.mark.ranks(1, 2, 3)
def test_a_group_travels_when_its_last_gradient_is_ready():
    batch = GradientBatch()
    batch.group([["a", "b"], ["alone"]])
    gradients = {name: gradient_of(hvd.rank(), position) for position, name in enumerate(["a", "b", "alone", "free"])}
    for name in ["b", "free", "alone", "a"] if hvd.rank() % 2 else ["a", "b", "alone", "free"]:
        batch.ready(name, gradients[name])
    averages = batch.wait()
    assert averages.keys() == gradients.keys()
    assert all(is_average(averages[name], position) for position, name in enumerate(gradients))


@pytest.mark.ranks(1, 2, 3)
def test_a_group_may_hold_gradients_that_stay_as_they_are():
    batch = GradientBatch()
    batch.group([["in place", "kept"]])
    in_place, kept = gradient_of(hvd.rank()), gradient_of(hvd.rank(), 1)
    batch.ready("in place", in_place)
    batch.ready("kept", kept, in_place=False)
    averages = batch.wait()
    assert averages["in place"] is in_place
    assert is_average(in_place)
    assert is_average(averages["kept"], 1)
    assert np.array_equal(kept, gradient_of(hvd.rank(), 1))


@pytest.mark.ranks(1, 2)
def test_an_incomplete_group_is_an_error_that_says_what_is_missing():
    batch = GradientBatch()
    batch.group([["a", "b"]])
    batch.ready("a", gradient_of(hvd.rank()))
    with pytest.raises(RuntimeError, match=r"\['a'\] wait for \['b'\]"):
        batch.wait()


@pytest.mark.ranks(2, 3)
def test_after_a_failure_the_names_are_free_again():
    batch = GradientBatch()
    batch.ready("wrong", np.zeros(5 + hvd.rank()))
    batch.ready("right", gradient_of(hvd.rank()))
    with pytest.raises(hvd.MismatchError, match="wrong"):
        batch.wait()
    gradient = gradient_of(hvd.rank())
    batch.ready("right", gradient)
    batch.ready("wrong", np.zeros(5))
    batch.wait()
    assert is_average(gradient)


# Attributes


@pytest.mark.ranks(1)
def test_all_else_goes_through_to_the_wrapped_optimizer():
    wrapped = UpdateRecorder()
    optimizer = hvd.DistributedOptimizer(wrapped)
    optimizer.set_learning_rate(0.5)
    assert optimizer.learning_rate == wrapped.learning_rate == 0.5
    optimizer.learning_rate = 0.25
    assert wrapped.learning_rate == 0.25
    assert optimizer.create_state_multi_precision(3, None) == "state of 3"
    with pytest.raises(AttributeError, match="momentum"):
        optimizer.momentum  # noqa: B018


@pytest.mark.ranks(1)
def test_the_wrapper_can_be_copied():
    optimizer = hvd.DistributedOptimizer(StepRecorder())
    copied = copy.copy(optimizer)
    copied.lr = 0.5
    assert optimizer.lr == 0.5


# Errors


class TorchLike(StepRecorder):
    param_groups = ()


@pytest.mark.parametrize(
    "not_wrapped, message", [(object(), "object is not an optimizer"), (TorchLike(), "ringtrain.torch")]
)
def test_objects_that_cannot_be_wrapped_are_refused(not_wrapped, message):
    with pytest.raises(TypeError, match=message):
        hvd.DistributedOptimizer(not_wrapped)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op=Average"),
        ({"gradient_predivide_factor": 0.0}, "must be positive"),
        ({"num_groups": -1}, "num_groups must not be negative"),
        ({"groups": -1}, "groups must not be negative"),
        ({"groups": [[0, 1], [1, 2]]}, "1 must be in one group only"),
        ({"groups": [["b"]], "named_parameters": {"a": None}}, "has no b"),
        ({"groups": [[1]], "named_parameters": {"a": None}}, "there is no parameter 1"),
        ({"named_parameters": [("a", None), ("a", None)]}, "more than one parameter named a"),
        ({"backward_passes_per_step": 0}, "at least 1"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_an_option_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(StepRecorder(), **options)


@pytest.mark.ranks(1)
def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="1 parameters but 2 gradients"):
        hvd.DistributedOptimizer(StepRecorder()).step([np.zeros(1)], [np.zeros(1)] * 2)
    with pytest.raises(ValueError, match="named_parameters names 1"):
        hvd.DistributedOptimizer(StepRecorder(), {"a": None}).step([np.zeros(1)] * 2, [np.zeros(1)] * 2)
    with pytest.raises(ValueError, match="2 indices but 1 gradients"):
        hvd.DistributedOptimizer(UpdateRecorder()).update([0, 1], [None] * 2, [np.zeros(1)], [None] * 2)


# Without ranks


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "compression, narrow", [(Compression.fp16, np.float16), (Compression.bf16, ml_dtypes.bfloat16)]
)
def test_wide_floats_are_compressed(compression, narrow, dtype):
    array = np.array([1.0, -0.5, 3.0], dtype)
    compressed, context = compression.compress(array)
    assert compressed.dtype == narrow
    restored = compression.decompress(compressed, context)
    assert restored.dtype == dtype
    assert np.array_equal(restored, array)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "int32", "uint8", "bool"], ids=str)
@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16, Compression.bf16])
def test_narrow_arrays_and_integers_are_not_compressed(compression, dtype):
    array = np.ones(3, dtype)
    compressed, context = compression.compress(array)
    assert compressed is array
    assert compression.decompress(compressed, context) is array


@pytest.mark.parametrize("count, parts", [(7, 3), (6, 3), (2, 5), (0, 2), (5, 1)])
def test_a_list_is_split_into_even_parts(count, parts):
    split = split_evenly(list(range(count)), parts)
    assert len(split) == parts
    assert [item for part in split for item in part] == list(range(count))
    assert max(map(len, split)) - min(map(len, split)) <= 1


def begun_first(names):
    """The names of these operations, in the order in which they were carried out."""
    begun = {one["name"]: one["begun_s"] for one in core.last_operations()}
    return sorted(names, key=begun.__getitem__)


@pytest.mark.ranks(2, initialised=False)
@pytest.mark.parametrize(
    ("groups", "in_order"),
    [
        (None, ["gradients0.a", "gradients0.b", "gradients0.c", "gradients0.d"]),
        # of a group the most urgent gradient counts: a, in the group that is complete last
        ([["a", "d"], ["b", "c"]], ["gradients0.a:d", "gradients0.b:c"]),
    ],
    ids=["alone", "in groups"],
)
def test_the_gradients_of_early_parameters_are_reduced_first(groups, in_order):
    hvd.init(fusion_threshold_mb=0)
    parameters = {name: np.zeros(1000) for name in "abcd"}
    optimizer = hvd.DistributedOptimizer(UpdateRecorder(), named_parameters=parameters, groups=groups)
    orders = []
    for _ in range(3):
        hvd.barrier()
        # All else is agreed on behind it, unless a rank gets no core for so long.
        before = hvd.allreduce_async_(np.ones(8_000_000), name="before")
        late_first = [np.full(1000, hvd.rank() * 2.0) for _ in parameters]
        optimizer.update([3, 2, 1, 0], None, late_first, None)
        hvd.synchronize(before)
        assert all((gradient == 1).all() for gradient in late_first)
        orders.append(begun_first(in_order[::-1]))
    assert in_order in orders  # without priorities none is
    hvd.barrier()
    hvd.shutdown()
