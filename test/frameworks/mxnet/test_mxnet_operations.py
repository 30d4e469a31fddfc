"""The operations of ringtrain.mxnet: right for every dtype and order, lazy, and with errors that all ranks are told."""

import os
import time

import numpy as np
import pytest
from harness.exact import data_of_ranks, require_equal

mx = pytest.importorskip("mxnet", reason="MXNet is not installed in this environment: see `make test-mxnet`")

import ringtrain  # noqa: E402
import ringtrain.mxnet as hvd  # noqa: E402

DTYPES = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64"]
SHAPES = [(1021,), (33, 17), (3, 5, 7)]
OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


def reduced(op, arrays):
    """Returns what all ranks should get."""
    stacked = np.stack(arrays)
    of_op = {"sum": np.add, "average": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    result = of_op.reduce(stacked, dtype=stacked.dtype)
    return result // len(arrays) if op == "average" else result


def own_and_expected(op, shape, dtype):
    arrays = data_of_ranks(hvd.size(), shape, dtype, op=op)
    return mx.nd.array(arrays[hvd.rank()], dtype=dtype), reduced(op, arrays)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_reduction_is_exact(dtype):
    for op, word in OPS.items():
        for shape in SHAPES:
            own, expected = own_and_expected(op, shape, dtype)
            result = hvd.allreduce(own, op=word)
            hvd.allreduce_(own, op=word)
            for array in (result, own):
                require_equal(array.asnumpy(), expected)


@pytest.mark.ranks(2)
def test_a_group_is_reduced_in_place_or_not():
    own, expected = own_and_expected("sum", (7,), "float32")
    more, of_more = own_and_expected("sum", (3, 4), "float32")
    for results in (hvd.grouped_allreduce([own, more], op=hvd.Sum), hvd.grouped_allreduce_([own, more], op=hvd.Sum)):
        require_equal(results[0].asnumpy(), expected)
        require_equal(results[1].asnumpy(), of_more)
    assert results[0] is own
    assert hvd.grouped_allreduce([]) == hvd.grouped_allreduce_([]) == []
    with pytest.raises(ValueError, match="takes each tensor once"):
        hvd.grouped_allreduce_([own, own])


@pytest.mark.ranks(2)
def test_ringtrain_itself_takes_ndarrays():
    for made in (mx.nd.array, mx.np.array):
        own = made(np.arange(6, dtype=np.float32).reshape(2, 3) * (hvd.rank() + 1))
        result = ringtrain.allreduce(own, op=ringtrain.Sum)
        assert type(result) is type(own)
        require_equal(result.asnumpy(), 3 * np.arange(6, dtype=np.float32).reshape(2, 3))
    with pytest.raises(TypeError, match="storage type row_sparse"):
        ringtrain.allreduce(own.as_nd_ndarray().tostype("row_sparse"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_and_gathers_are_exact(dtype):
    arrays = data_of_ranks(2, (4, 3), dtype)
    own = mx.nd.array(arrays[hvd.rank()], dtype=dtype)
    require_equal(hvd.broadcast(own, 1).asnumpy(), arrays[1])
    require_equal(hvd.allgather(own[: hvd.rank() + 1]).asnumpy(), np.concatenate([arrays[0][:1], arrays[1][:2]]))
    first, second = hvd.grouped_allgather([own, own + 1])
    require_equal(first.asnumpy(), np.concatenate(arrays))
    require_equal(second.asnumpy(), np.concatenate(arrays) + np.asarray(1, dtype))
    received, splits = hvd.alltoall(own, splits=[1, 3])
    require_equal(received.asnumpy(), np.concatenate([one[:1] if hvd.rank() == 0 else one[1:] for one in arrays]))
    assert splits.asnumpy().tolist() == ([1, 1] if hvd.rank() == 0 else [3, 3])
    half = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
    require_equal(hvd.reducescatter(own, op=hvd.Sum).asnumpy(), sum(arrays)[half])
    require_equal(hvd.grouped_reducescatter([own], op=hvd.Sum)[0].asnumpy(), sum(arrays)[half])
    require_equal(hvd.broadcast_(own, 1).asnumpy(), arrays[1])


@pytest.mark.ranks(2)
def test_reducescatter_has_horovods_order_of_arguments():
    alone = hvd.add_process_set([hvd.size() - 1])
    own = mx.nd.ones((4, 3)) * (hvd.rank() + 1)
    if alone.included():
        result = hvd.reducescatter(own, hvd.Sum, "rows", 0, alone, 0.5, 4.0)
        require_equal(result.asnumpy(), 2 * own.asnumpy())
        (result,) = hvd.grouped_reducescatter([own], hvd.Sum, "group", 0, alone, 0.5, 4.0)
        require_equal(result.asnumpy(), 2 * own.asnumpy())
    for call, array in ((hvd.reducescatter, own), (hvd.grouped_reducescatter, [own])):
        with pytest.raises(TypeError, match=r"process_set must be a ProcessSet, not 0\.5; give factors by name"):
            call(array, hvd.Sum, "rows", 0, 0.5)
    hvd.barrier()
    hvd.remove_process_set(alone)


@pytest.mark.ranks(2)
def test_rows_that_cannot_be_split_are_an_error_of_mxnet_as_in_horovod():
    for rows, splits in ((3, None), (1, [1, 1])):
        with pytest.raises(mx.MXNetError, match="split") as seen:
            hvd.alltoall(mx.nd.ones((rows,)), splits)
        assert isinstance(seen.value, ValueError)


@pytest.mark.ranks(2)
def test_a_scalar_and_an_array_without_elements_travel():
    with mx.util.np_shape(True), mx.util.np_array(True):
        require_equal(hvd.allreduce(mx.np.array(3.0), op=hvd.Sum).asnumpy(), np.array(6, np.float32))
        assert hvd.allreduce(mx.np.zeros((0, 3))).shape == (0, 3)
        assert hvd.allgather(mx.np.zeros((0, 3))).shape == (0, 3)


@pytest.mark.ranks(2)
def test_ranks_may_come_in_any_order():
    arrays = {name: mx.nd.ones((1000,)) * (hvd.rank() + 1) * place for place, name in enumerate("abcdef", 1)}
    for name in arrays if hvd.rank() == 0 else reversed(arrays):
        hvd.allreduce_(arrays[name], op=hvd.Sum, name=name)
    for place, name in enumerate("abcdef", 1):
        assert (arrays[name].asnumpy() == 3 * place).all()


@pytest.mark.ranks(2)
def test_an_operation_waits_for_what_is_computed_before_and_is_waited_for_by_what_reads_it():
    square = mx.nd.ones((300, 300)) * (hvd.rank() + 1)
    begun = time.perf_counter()
    for _ in range(8):
        square = mx.nd.dot(square, square) / 300
    producer = square.copy()
    hvd.allreduce_(square, op=hvd.Sum)
    enqueued = time.perf_counter() - begun
    after = square + 1
    mx.nd.waitall()
    computed = time.perf_counter() - begun
    assert enqueued < computed
    both = hvd.allgather(producer.reshape((1, 300, 300))).asnumpy()
    require_equal(after.asnumpy(), both[0] + both[1] + 1)


@pytest.mark.ranks(2)
def test_two_hundred_operations_follow_each_other():
    array = mx.nd.ones((5,)) * (1 + hvd.rank())
    for step in range(200):
        hvd.allreduce_(array, op=hvd.Average, name="chain" if step % 2 else None)
        array += 1
    assert array.asnumpy().tolist() == [201.5] * 5


@pytest.mark.ranks(2)
def test_operations_of_one_name_are_taken_in_the_order_of_the_script():
    """Their arrays have nothing to do with each other, so MXNet may run the second first."""
    slow = mx.nd.ones((400, 400))
    for _ in range(5 + 20 * hvd.rank()):
        slow = mx.nd.dot(slow, slow) / 400
    results = [hvd.allreduce(slow[0] * 0 + place, op=hvd.Sum, name="same") for place in range(1)]
    results += [hvd.allreduce(mx.nd.ones((400,)) * place, op=hvd.Sum, name="same") for place in range(1, 20)]
    assert [one.asnumpy()[0] for one in results] == [2 * place for place in range(20)]


@pytest.mark.ranks(2)
def test_unnamed_operations_are_numbered_by_the_script():
    slow = mx.nd.ones((300, 300))
    for _ in range(10 * hvd.rank()):
        slow = mx.nd.dot(slow, slow) / 300
    results = [hvd.allreduce(slow[0] * 0 + 7, op=hvd.Sum), *(hvd.allreduce(mx.nd.ones((300,)), op=hvd.Sum),) * 2]
    assert [one.asnumpy()[0] for one in results] == [14, 2, 2]


@pytest.mark.ranks(2)
def test_arrays_may_be_freed_before_they_are_reduced():
    results = []
    for place in range(50):
        results.append(hvd.allreduce(mx.nd.ones((1000,)) * place, op=hvd.Sum))
        hvd.allreduce_(mx.nd.ones((1000,)))
    assert [one.asnumpy()[0] for one in results] == [2 * place for place in range(50)]


@pytest.mark.ranks(2)
def test_ranks_that_disagree_are_told_both_shapes_and_go_on():
    array = mx.nd.ones((17 + hvd.rank(), 3))
    hvd.allreduce_(array, name="odd")
    with pytest.raises(hvd.MismatchError, match=r"odd.*\[17, 3\].*\[18, 3\]"):
        array.asnumpy()
    hvd.allreduce_(array, name="odd")
    with pytest.raises(mx.MXNetError, match="odd"):  # which is what Horovod raises
        array.wait_to_read()
    with pytest.raises(mx.MXNetError, match="ranks"):
        hvd.allgather(mx.nd.ones((2, 2 + hvd.rank())), name="odd")
    result = hvd.allreduce(mx.nd.ones((2,)), name="odd", op=hvd.Sum)
    assert hvd.synchronize(result) is result
    assert result.asnumpy().tolist() == [2, 2]
    wrong = hvd.broadcast(mx.nd.ones((2,)), hvd.rank())
    with pytest.raises(RuntimeError, match="root_rank"):
        wrong.wait_to_read()


@pytest.mark.ranks(2)
def test_errors_that_this_rank_alone_can_see_are_raised_by_the_call():
    one = mx.nd.ones((2,))
    with pytest.raises(ValueError, match="op or average"):
        hvd.allreduce(one, average=True, op=hvd.Sum)
    with pytest.raises(TypeError, match=r"second argument.*; write op=Sum"):
        hvd.allreduce_(one, hvd.Sum)
    with pytest.raises(TypeError, match=r"root_rank must be an integer in 0-1, not 0\.0"):
        hvd.broadcast_(one, 0.0)
    with pytest.raises(TypeError, match="takes NDArrays, not a ndarray"):
        hvd.allreduce(np.ones(2))
    with pytest.raises(TypeError, match="storage type row_sparse"):
        hvd.allreduce(one.tostype("row_sparse"))
    with pytest.raises(mx.MXNetError, match="Adasum is for floats, not for int32"):
        hvd.allreduce(one.astype("int32"), op=hvd.Adasum)
    with pytest.raises(ValueError, match="root_rank 2 is not one of the ranks"):
        hvd.broadcast_(one, 2)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(one, process_set=hvd.ProcessSet([0]))
    with pytest.raises(ValueError, match='names that begin with "<"'):
        hvd.allreduce(one, name="<mine>")


@pytest.mark.ranks(3)
def test_a_process_set_reduces_by_itself():
    some = hvd.add_process_set([0, 2])
    if some.included():
        result = hvd.allreduce(mx.nd.ones((3,)) * hvd.rank(), op=hvd.Sum, process_set=some)
        assert result.asnumpy().tolist() == [2, 2, 2]
    else:
        with pytest.raises(ValueError, match="does not belong"):
            hvd.allreduce(mx.nd.ones((3,)), process_set=some)
    assert hvd.remove_process_set(some)


@pytest.mark.ranks(2)
def test_an_average_of_float16_does_not_overflow():
    large = mx.nd.array(np.full(8, 60000.0), dtype="float16")
    assert hvd.allreduce(large).asnumpy().tolist() == [60000.0] * 8


@pytest.mark.ranks(2)
def test_bfloat16_travels():
    bfloat16 = np.dtype([("bfloat16", np.uint16)])
    array = (mx.nd.ones((4,)) * (hvd.rank() + 1)).astype(bfloat16)
    hvd.allreduce_(array, op=hvd.Sum)
    assert array.astype("float32").asnumpy().tolist() == [3.0] * 4


@pytest.mark.ranks(2)
def test_a_weight_in_the_layout_of_mkldnn_is_broadcast():
    net = mx.gluon.nn.Conv2D(16, 3, in_channels=16)
    net.initialize(mx.init.Constant(hvd.rank() + 1.0))
    net.hybridize(static_alloc=True)
    net(mx.nd.ones((1, 16, 8, 8))).wait_to_read()
    assert (hvd.broadcast_(net.weight.data(), 1).asnumpy() == 2).all()


@pytest.mark.ranks(2)
def test_a_data_loader_forks_meanwhile():
    data = mx.gluon.data.ArrayDataset(np.arange(64, dtype=np.float32))
    result = mx.nd.ones((10,))
    seen = 0.0
    for batch in mx.gluon.data.DataLoader(data, batch_size=16, num_workers=2):
        hvd.allreduce_(result, op=hvd.Sum)
        seen += batch.sum().asscalar()
    assert seen == 2016 and result.asnumpy()[0] == 16


@pytest.mark.ranks(2)
def test_a_forked_child_is_no_rank():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            hvd.rank()
        except hvd.NotInitializedError:
            os.write(write, b"!")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"!"
    assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum).asnumpy()[0] == 2


@pytest.mark.ranks(2, env={"MXNET_ENGINE_TYPE": "NaiveEngine"})
def test_the_naive_engine_waits_for_each_operation():
    own, expected = own_and_expected("sum", (33, 17), "float32")
    require_equal(hvd.allreduce(own, op=hvd.Sum).asnumpy(), expected)
    require_equal(hvd.allreduce_(own, op=hvd.Sum).asnumpy(), expected)
    require_equal(hvd.broadcast(mx.nd.ones((2,)) * hvd.rank(), 1).asnumpy(), np.ones(2, np.float32))
