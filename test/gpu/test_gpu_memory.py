"""Arrays on GPUs in memory that NCCL knows, and who may give it back. On fakes."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from exact_cupy import keep_busy, on_gpu, require_on_gpu, use_own_gpu
from harness import gpu_double
from harness.children import fork, require_good_end
from harness.exact import data_of_ranks, reference
from harness.gpu_arrays import GPU, cupy, environment

import ringtrain as hvd
from ringtrain import _core


def require_soon(is_true):
    """For what depends on streams of which the tests cannot wait for the end."""
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.ranks(3, env=GPU, initialised=False)
def test_arrays_in_memory_of_nccl_are_known_to_every_communicator():
    hvd.init()
    use_own_gpu()
    control = gpu_double.control()
    early = hvd.empty((300, 7), "float32", device=hvd.local_rank())
    for number, array in enumerate([early, hvd.empty(5000, "float16", device=hvd.local_rank())]):
        arrays = data_of_ranks(hvd.size(), array.shape, array.dtype, seed=number)
        array[...] = on_gpu(arrays[hvd.rank()])
        assert hvd.allreduce_(array, op=hvd.Sum, name=f"{number}") is array
        require_on_gpu(array, reference("sum", arrays))
    registered = control.count("registrations")
    assert registered >= 2
    pair = hvd.add_process_set([0, 1])
    if pair.included():
        hvd.allreduce_(early, op=hvd.Sum, process_set=pair)
        assert control.count("registrations") >= registered + 2
    hvd.remove_process_set(pair)
    address = early.data.ptr
    del early, array
    require_soon(lambda: hvd.empty((300, 7), "float32", device=hvd.local_rank()).data.ptr == address)
    again = hvd.empty((300, 7), "float32", device=hvd.local_rank())
    again[...] = 1
    hvd.shutdown()
    assert control.count("registrations") == 0
    assert (again.get() == 1).all()
    del again
    assert control.count("nccl allocations") == 0


def is_reduced_where_it_lies(folder, array=None):
    """Whether NCCL gets the address of an array in its memory, when it has been reduced before."""
    use_own_gpu()
    if array is None:
        array = hvd.empty(300_000, "float32", device=hvd.local_rank())
    arrays = data_of_ranks(hvd.size(), array.shape, array.dtype)
    for step in range(3):
        array[...] = on_gpu(arrays[hvd.rank()])
        if step == 2:
            gpu_double.control().set_log(folder)
        hvd.allreduce_(array, op=hvd.Sum, name="x")
        require_on_gpu(array, reference("sum", arrays))
    gpu_double.control().set_log("")
    calls = (Path(folder) / str(os.getpid())).read_text().splitlines()
    reductions = [line for line in calls if line.startswith("ncclAllReduce ")]
    assert reductions
    return any(hex(array.data.ptr)[2:] in line for line in reductions)


@pytest.mark.ranks(2, env=GPU)
def test_nccl_works_in_the_memory_that_it_knows(tmp_path):
    assert is_reduced_where_it_lies(tmp_path)


@pytest.mark.ranks(2, env=GPU, initialised=False)
def test_nccl_works_in_the_memory_that_was_made_before_another_init(tmp_path):
    hvd.init()
    use_own_gpu()
    array = hvd.empty(300_000, "float32", device=hvd.local_rank())
    hvd.allreduce_(array, op=hvd.Sum, name="first")
    hvd.shutdown()
    hvd.init()
    assert is_reduced_where_it_lies(tmp_path, array)
    hvd.shutdown()
    del array
    assert gpu_double.control().count("nccl allocations") == 0


@pytest.mark.ranks(2, env=environment(guard=1, fail="ncclCommRegister:*:3:rank=1"))
def test_memory_that_nccl_refuses_on_one_rank_is_copied_on_all(tmp_path):
    assert not is_reduced_where_it_lies(tmp_path)


@pytest.mark.ranks(1, env=GPU, initialised=False)
def test_small_arrays_share_memory_of_nccl_that_is_used_again_when_the_gpu_is_done_with_it():
    hvd.init()
    control = gpu_double.control()
    arrays = [hvd.empty(1000, device=0) for _ in range(50)]
    assert control.count("nccl allocations") == 1
    assert len({array.data.ptr // 4096 for array in arrays}) == 50
    large = hvd.empty(10_000_000, device=0)  # more than a slab has
    assert control.count("nccl allocations") == 2
    address = arrays[7].data.ptr
    keep_busy(0.3)
    del arrays[7], large
    assert address not in [hvd.empty(1000, device=0).data.ptr for _ in range(3)]
    require_soon(lambda: hvd.empty(1000, device=0).data.ptr == address)
    del arrays
    time.sleep(0.5)
    whole = [hvd.empty(10_000_000, device=0), hvd.empty(8_000_000, device=0)]  # pieces have become one again
    assert control.count("nccl allocations") == len(whole)
    hvd.shutdown()


@pytest.mark.ranks(1, env=GPU, initialised=False)
def test_memory_that_is_given_back_during_a_capture_is_used_again_after_it():
    hvd.init()
    control, captured = gpu_double.control(), cupy.cuda.Stream()
    array = hvd.empty(1000, device=0)
    address = array.data.ptr
    control.mark_capturing(captured.ptr, True)
    del array
    assert hvd.empty(1000, device=0).data.ptr != address
    control.mark_capturing(captured.ptr, False)
    require_soon(lambda: hvd.empty(1000, device=0).data.ptr == address)
    hvd.shutdown()


@pytest.mark.ranks(1, env=GPU, initialised=False)
def test_a_forked_child_leaves_the_gpu_of_its_parent_alone(tmp_path):
    hvd.init()
    mine = on_gpu(np.ones((4, 3)))
    known = [hvd.empty(1000, device=0)]
    known[0][...] = 1
    result = [hvd.allgather_async(mine, name="result"), _core.gpu_point(0, 0)]

    def let_go():
        gpu_double.control().set_log(tmp_path)
        result.clear()
        known.clear()

    for is_over in (False, True):
        if is_over:
            hvd.shutdown()
        child = fork(let_go)
        require_good_end(child)
        assert not (tmp_path / str(child)).exists(), (tmp_path / str(child)).read_text()
    assert (known[0].get() == 1).all()


@pytest.mark.ranks(1, env=environment(guard=1, left_out=["ncclMemAlloc"]))
def test_arrays_are_ordinary_where_nccl_has_no_memory_of_its_own():
    array = hvd.empty(7, device=0)
    array[...] = 3
    require_on_gpu(hvd.allreduce_(array), np.full(7, 3, "float32"))


@pytest.mark.ranks(3, env=GPU)
def test_memory_of_nccl_on_some_ranks_only_is_not_given_to_it(tmp_path):
    use_own_gpu()
    arrays = data_of_ranks(hvd.size(), (300_000,), "float32")
    known = hvd.empty(300_000, "float32", device=hvd.local_rank())
    known[...] = on_gpu(arrays[hvd.rank()])
    mine = known if hvd.rank() == 0 else on_gpu(arrays[hvd.rank()])
    address = known.data.ptr
    gpu_double.control().set_log(tmp_path)
    hvd.allreduce_(mine, op=hvd.Sum, name="some")
    require_on_gpu(mine, reference("sum", arrays))
    firsts = [reference("sum", arrays)[:1000], *(array[:1000] for array in arrays[1:])]
    require_on_gpu(hvd.allgather(known[:1000]), np.concatenate(firsts))
    require_on_gpu(hvd.broadcast_(known, 1), arrays[1])
    gpu_double.control().set_log("")
    calls = (Path(tmp_path) / str(os.getpid())).read_text()
    assert "ncclAllReduce" in calls and "ncclAllGather" in calls and "ncclBroadcast" in calls
    assert not any(line.startswith("nccl") and hex(address)[2:] in line for line in calls.splitlines())
