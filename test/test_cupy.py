"""Every operation on CuPy arrays: exact, on the GPU, and with a sentence for what cannot be. On the doubles."""

import numpy as np
import pytest
from exact import DTYPE_OF_EACH_SIZE, DTYPES, FLOATS, OPS, SHAPES, data, data_of_ranks, reference
from exact_cupy import arrays_of_ranks, on_gpu, require_on_gpu, use_own_gpu
from harness.gpu_arrays import GPU, STAGED, cupy

import ringtrain as hvd

HVD_OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


def check_all_ops_and_shapes(dtype):
    for op in OPS:
        if op == "average" and dtype not in FLOATS:
            continue
        for shape in SHAPES:
            arrays = data_of_ranks(hvd.size(), shape, dtype, op=op)
            expected, before = reference(op, arrays), arrays[hvd.rank()]
            mine = on_gpu(before)
            result = hvd.allreduce(mine, op=HVD_OPS[op], name=f"{op}{shape}")
            require_on_gpu(result, expected)
            require_on_gpu(mine, before)
            assert hvd.allreduce_(mine, op=HVD_OPS[op], name=f"{op}{shape} in place") is mine
            require_on_gpu(mine, expected)


@pytest.mark.ranks(3, env=GPU)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op_and_shape(dtype):
    check_all_ops_and_shapes(dtype)


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 4, env=GPU)
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_SIZE, ids=str)
def test_every_op_and_shape_on_more_or_fewer_ranks(dtype):
    check_all_ops_and_shapes(dtype)


@pytest.mark.ranks(2, 3, env=STAGED)
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_SIZE, ids=str)
def test_every_op_and_shape_through_host_memory(dtype):
    check_all_ops_and_shapes(dtype)


# Operations along the first dimension


def check_allgather(dtype):
    for rows in ([2, 0, 3, 1], [0, 0, 0, 0], [700, 1, 300, 5]):
        parts = [data(rank, (rows[rank], 3), dtype) for rank in range(hvd.size())]
        require_on_gpu(hvd.allgather(on_gpu(parts[hvd.rank()]), name=f"{rows}"), np.concatenate(parts))


def check_broadcast(dtype):
    for root in range(hvd.size()):
        for shape in ((), (0,), (33,), (300_001,)):
            everybody = data_of_ranks(hvd.size(), shape, dtype, seed=root)
            mine = on_gpu(everybody[hvd.rank()])
            require_on_gpu(hvd.broadcast(mine, root, name=f"{root}{shape}"), everybody[root])
            require_on_gpu(mine, everybody[hvd.rank()])
            assert hvd.broadcast_(mine, root, name=f"{root}{shape} in place") is mine
            require_on_gpu(mine, everybody[root])


def check_alltoall(dtype):
    size, rank = hvd.size(), hvd.rank()
    splits = [[(sender + 2 * receiver) % 3 for receiver in range(size)] for sender in range(size)]
    sent = [data(r, (sum(splits[r]), 2), dtype) for r in range(size)]
    parts = [np.split(sent[r], np.cumsum(splits[r])[:-1]) for r in range(size)]
    expected = np.concatenate([parts[r][rank] for r in range(size)])
    result, received = hvd.alltoall(on_gpu(sent[rank]), splits=splits[rank], name="a list of splits")
    require_on_gpu(result, expected)
    assert type(received) is np.ndarray and received.tolist() == [len(parts[r][rank]) for r in range(size)]
    result, received = hvd.alltoall(on_gpu(sent[rank]), splits=on_gpu(splits[rank]), name="splits on the GPU")
    require_on_gpu(result, expected)
    require_on_gpu(received, [len(parts[r][rank]) for r in range(size)])


def check_reducescatter(dtype):
    size, rank = hvd.size(), hvd.rank()
    for rows in (0, 1, size, 7, 50_001):
        everybody = data_of_ranks(size, (rows, 3), dtype)
        expected = np.array_split(reference("sum", everybody), size)[rank]
        require_on_gpu(hvd.reducescatter(on_gpu(everybody[rank]), op=hvd.Sum, name=f"{rows}"), expected)


CHECKS = [check_allgather, check_broadcast, check_alltoall, check_reducescatter]
NAMES = [check.__name__.removeprefix("check_") for check in CHECKS]


@pytest.mark.ranks(3, env=GPU)
@pytest.mark.parametrize("which", range(len(CHECKS)), ids=NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collectives_of_every_dtype(dtype, which):
    CHECKS[which](dtype)


@pytest.mark.ranks(1, 2, 4, env=GPU)
@pytest.mark.parametrize("which", range(len(CHECKS)), ids=NAMES)
def test_collectives_on_more_or_fewer_ranks(which):
    CHECKS[which](np.dtype("float32"))


@pytest.mark.ranks(3, env=STAGED)
@pytest.mark.parametrize("which", range(len(CHECKS)), ids=NAMES)
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_SIZE, ids=str)
def test_collectives_through_host_memory(dtype, which):
    CHECKS[which](dtype)


# Ways to call them


@pytest.mark.ranks(1, 2, 3, env=GPU)
def test_groups_of_different_dtypes():
    kinds = [((5, 2), "float32"), ((0,), "int64"), ((), "float16"), ((300, 40), "float32")]
    of_ranks = [data_of_ranks(hvd.size(), shape, dtype, seed=i) for i, (shape, dtype) in enumerate(kinds)]
    mine = [on_gpu(arrays[hvd.rank()]) for arrays in of_ranks]
    expected = [reference("sum", arrays) for arrays in of_ranks]
    for result, right in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), expected, strict=True):
        require_on_gpu(result, right)
    hvd.grouped_allreduce_(mine, op=hvd.Sum)
    for result, right in zip(mine, expected, strict=True):
        require_on_gpu(result, right)
    gathered = hvd.grouped_allgather([on_gpu(np.full(2, hvd.rank())), on_gpu(np.int32(hvd.rank()))])
    require_on_gpu(gathered[0], np.repeat(np.arange(hvd.size()), 2))
    require_on_gpu(gathered[1], np.arange(hvd.size(), dtype="int32"))
    scattered = hvd.grouped_reducescatter([on_gpu(np.ones((hvd.size(), 4)))], op=hvd.Sum)
    require_on_gpu(scattered[0], np.full((1, 4), float(hvd.size())))


@pytest.mark.ranks(2, 3, env=GPU)
def test_many_at_once_in_another_order_on_each_rank():
    count = 20
    of_ranks = [data_of_ranks(hvd.size(), (50 + number,), "float32", seed=number) for number in range(count)]
    mine = [on_gpu(arrays[hvd.rank()]) for arrays in of_ranks]
    order = range(count) if hvd.rank() % 2 else reversed(range(count))
    handles = {number: hvd.allreduce_async_(mine[number], op=hvd.Sum, name=f"{number}") for number in order}
    for number in range(count):
        assert hvd.synchronize(handles[number]) is mine[number]
        require_on_gpu(mine[number], reference("sum", of_ranks[number]))
    assert all(map(hvd.poll, handles.values()))


@pytest.mark.ranks(3, env=GPU)
def test_process_sets_work_apart():
    pair, all_but_first = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 2])
    for chosen in (pair, all_but_first):
        if chosen.included():
            arrays = [data(rank, (1000,), "float32") for rank in chosen.ranks]
            mine = on_gpu(data(hvd.rank(), (1000,), "float32"))
            require_on_gpu(hvd.allreduce(mine, op=hvd.Sum, process_set=chosen), reference("sum", arrays))
            require_on_gpu(hvd.allgather(mine, process_set=chosen), np.concatenate(arrays))
    hvd.remove_process_set(pair)
    hvd.remove_process_set(all_but_first)


@pytest.mark.ranks(1, 2, 3, env=GPU)
def test_scale_factors():
    mine = on_gpu(data(hvd.rank(), (100,), "float32"))
    total = reference("sum", data_of_ranks(hvd.size(), (100,), "float32"))
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    require_on_gpu(scaled, total * np.float32(2))
    large = np.full(70_000, 60_000, "float16")
    require_on_gpu(hvd.allreduce(on_gpu(large), prescale_factor=0.125, postscale_factor=8.0), large)


@pytest.mark.ranks(1, 2, 3, env=GPU)
def test_arrays_that_are_not_contiguous():
    before = np.arange(24.0).reshape(4, 6)
    array = on_gpu(before)
    require_on_gpu(hvd.allreduce(array.T, op=hvd.Sum), before.T * hvd.size())
    require_on_gpu(hvd.allreduce(array[::2, ::-3], op=hvd.Sum), before[::2, ::-3] * hvd.size())
    view = array[:, 1:4]
    assert hvd.allreduce_(view, op=hvd.Sum) is view
    before[:, 1:4] *= hvd.size()
    require_on_gpu(array, before)
    hvd.broadcast_(array.T, 0)
    require_on_gpu(array, before)


@pytest.mark.ranks(1, 2, 3, env=GPU)
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32"])
def test_compression_gives_back_the_dtype(compression, dtype):
    compressor = getattr(hvd.Compression, compression)
    expected = reference("sum", data_of_ranks(hvd.size(), (50,), dtype))
    mine = on_gpu(data(hvd.rank(), (50,), dtype))
    require_on_gpu(hvd.allreduce(mine, op=hvd.Sum, compression=compressor), expected)
    require_on_gpu(hvd.allreduce_(mine, op=hvd.Sum, compression=compressor), expected)


@pytest.mark.ranks(2, env=GPU)
def test_arrays_in_host_memory_go_their_own_way_beside():
    for number in range(3):
        require_on_gpu(hvd.allreduce(on_gpu(np.ones(5)), op=hvd.Sum, name=f"gpu {number}"), np.full(5, 2.0))
        assert hvd.allreduce(np.ones(5), op=hvd.Sum, name=f"host {number}").tolist() == [2] * 5


# Bad input


@pytest.mark.ranks(2, 3, env=GPU)
def test_an_array_on_a_gpu_here_and_in_host_memory_there_is_a_mismatch():
    mine = on_gpu(np.ones(4)) if hvd.rank() == 0 else np.ones(4)
    with pytest.raises(hvd.MismatchError, match='allreduce "weight"'):
        hvd.allreduce(mine, name="weight")
    require_on_gpu(hvd.allreduce(on_gpu(np.ones(4)), name="weight"), np.ones(4))


@pytest.mark.ranks(1, env=GPU)
def test_arrays_on_different_devices_in_one_call_are_refused():
    here = on_gpu(np.ones(3))
    hvd.allreduce(here)
    with cupy.cuda.Device(1):
        there = cupy.ones(3)
    with pytest.raises(ValueError, match="its tensors lie on GPU 0 and on GPU 1"):
        hvd.grouped_allreduce([here, there])
    with pytest.raises(ValueError, match="its tensors lie on GPU 0 and in host memory"):
        hvd.grouped_allreduce([here, np.ones(3)])
    with pytest.raises(ValueError, match="on GPU 1, but this rank works on GPU 0"):
        hvd.allreduce(there)
    require_on_gpu(hvd.allreduce(here), np.ones(3))


@pytest.mark.ranks(1, env=GPU)
def test_what_cannot_be_sent_or_overwritten_is_refused():
    use_own_gpu()
    with pytest.raises(TypeError, match="cannot send dtype complex64"):
        hvd.allreduce(cupy.ones(3, "complex64"))
    with pytest.raises(ValueError, match="places of their own"):
        hvd.allreduce_(cupy.broadcast_to(cupy.ones(()), (3,)))
    with pytest.raises(ValueError, match="an average of int32"):
        hvd.allreduce(cupy.ones(3, "int32"))
    require_on_gpu(hvd.allreduce(cupy.broadcast_to(cupy.ones(()), (3,))), np.ones(3))


@pytest.mark.ranks(1, env=GPU)
def test_a_freed_array_is_told():
    use_own_gpu()
    address = cupy.cuda.runtime.malloc(512)
    memory = cupy.cuda.UnownedMemory(address, 512, None, 0)
    freed = cupy.ndarray((8,), "float32", cupy.cuda.MemoryPointer(memory, 0))
    cupy.cuda.runtime.free(address)
    with pytest.raises(ValueError, match="freed"):
        hvd.allreduce_(freed)
    require_on_gpu(hvd.allreduce(cupy.ones(3)), np.ones(3))


@pytest.mark.ranks(1, env={**GPU, "RINGTRAIN_GPU_DOUBLE_MEMORY": str(1 << 20)})
def test_a_full_gpu_loses_nothing():
    use_own_gpu()
    mine = cupy.ones(100_000, "float32")
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.ones(1 << 20)
    require_on_gpu(hvd.allreduce_(mine, op=hvd.Sum), np.ones(100_000, "float32"))


@pytest.mark.ranks(1, 2, env=GPU)
def test_all_arrays_of_the_exact_data_lie_on_the_own_gpu():
    assert {array.device.id for array in arrays_of_ranks(hvd.size(), (3,))} == {hvd.local_rank()}
