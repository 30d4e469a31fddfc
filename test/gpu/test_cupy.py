"""Operations on CuPy arrays beside those of test_gpu_operations.py, and a sentence for what cannot be. On fakes."""

import numpy as np
import pytest
from exact_cupy import arrays_of_ranks, on_gpu, require_on_gpu, use_own_gpu
from harness.exact import COMPLEX, complex_data_of_ranks, data, reference
from harness.foreign_arrays import OnlyDlpack, OnlyInterface
from harness.gpu_arrays import GPU, cupy

import ringtrain as hvd


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
    with pytest.raises(ValueError, match="its tensors are on GPU 0 and on GPU 1"):
        hvd.grouped_allreduce([here, there])
    with pytest.raises(ValueError, match="its tensors are on GPU 0 and in host memory"):
        hvd.grouped_allreduce([here, np.ones(3)])
    with pytest.raises(ValueError, match="on GPU 1, but this rank works on GPU 0"):
        hvd.allreduce(there)
    require_on_gpu(hvd.allreduce(here), np.ones(3))


@pytest.mark.ranks(1, 2, env=GPU)
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_numbers(dtype):
    size, rank = hvd.size(), hvd.rank()
    for shape in ((), (5,), (2 * size, 3)):
        everybody = complex_data_of_ranks(size, shape, dtype, "average")
        mine, total = on_gpu(everybody[rank]), np.asarray(sum(everybody), dtype)
        require_on_gpu(hvd.allreduce(mine), np.asarray(total / size, dtype))
        require_on_gpu(hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.5), np.asarray(total / 2, dtype))
        require_on_gpu(hvd.broadcast(mine, size - 1), everybody[-1])
        require_on_gpu(hvd.allgather(mine), np.concatenate([np.atleast_1d(one) for one in everybody]))
        require_on_gpu(hvd.allgather(OnlyDlpack(mine)), np.concatenate([np.atleast_1d(one) for one in everybody]))
        assert hvd.grouped_allreduce_([mine], op=hvd.Sum)[0] is mine
        require_on_gpu(mine, total)
    mine = on_gpu(everybody[rank])
    require_on_gpu(hvd.reducescatter(mine, op=hvd.Sum), np.split(total, size)[rank])
    require_on_gpu(hvd.alltoall(mine), np.concatenate([np.split(one, size)[rank] for one in everybody]))
    foreign = OnlyInterface(mine)
    assert hvd.allreduce_(foreign, op=hvd.Sum) is foreign
    require_on_gpu(mine, total)


@pytest.mark.ranks(1, env=GPU)
def test_arrays_that_cannot_be_sent_or_overwritten_are_refused():
    use_own_gpu()
    with pytest.raises(ValueError, match="op=Max is for real numbers, not for complex64"):
        hvd.allreduce(cupy.ones(3, "complex64"), op=hvd.Max)
    with pytest.raises(ValueError, match="places of their own"):
        hvd.allreduce_(cupy.broadcast_to(cupy.ones(()), (3,)))
    with pytest.raises(ValueError, match="Average is for numbers, not for bool"):
        hvd.allreduce(cupy.ones(3, "bool"))
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
