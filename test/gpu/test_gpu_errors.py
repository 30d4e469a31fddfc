"""Errors of a driver, of NCCL or of an array on a GPU are one sentence. On the fakes."""

import ctypes
import os

import numpy as np
import pytest
from exact_cupy import on_gpu, require_on_gpu, use_own_gpu
from harness import gpu_double
from harness.gpu_arrays import GPU, cupy, environment

import ringtrain as hvd
from ringtrain import _core


class OnSomeGpu:
    """An array as another library describes it."""

    def __init__(self):
        address = 0x7F0000000000
        self.__cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (address, False), "version": 3}


def there_is_a_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(there_is_a_driver(), reason="this machine has a CUDA driver")
@pytest.mark.ranks(1)
def test_without_a_driver_an_array_on_a_gpu_is_refused():
    with pytest.raises(hvd.RingtrainError, match=r"no CUDA driver: .*libcuda\.so\.1.* nvidia-smi"):
        hvd.allreduce_(OnSomeGpu())
    assert _core.gpu_count() == 0 and not hvd.cuda_built()
    assert hvd.allreduce(np.ones(3)).tolist() == [1, 1, 1]


BROKEN_DRIVERS = {
    "old": r"speaks CUDA 11\.3, which is too old: ringtrain needs 11\.4",
    "incomplete": r"libcuda\.so\.1 has no function cuDeviceGetUuid_v2",
    "broken": r"cannot be used: cuInit: .*999",
}


@pytest.mark.ranks(1, env=environment(driver_version=11030), way="old")
@pytest.mark.ranks(1, env=environment(left_out=["cuDeviceGetUuid_v2"]), way="incomplete")
@pytest.mark.ranks(1, env=environment(fail="cuInit:*:999"), way="broken")
def test_a_driver_that_cannot_be_used_says_why(way):
    for _ in range(2):
        with pytest.raises(hvd.RingtrainError, match=BROKEN_DRIVERS[way]):
            hvd.allreduce_(OnSomeGpu())
    assert hvd.allreduce(np.ones(3)).tolist() == [1, 1, 1]


@pytest.mark.ranks(1, env=GPU)
def test_memory_that_is_not_on_a_gpu_is_refused():
    with pytest.raises(ValueError, match="not on a GPU: was it freed"):
        hvd.allreduce_(OnSomeGpu())


NO_NCCL = environment(guard=1, left_out=["ncclCommSplit"])


@pytest.mark.ranks(2, env={**NO_NCCL, "RINGTRAIN_GPU_ALGORITHM": "nccl"})
def test_a_job_that_insists_on_nccl_is_told_on_all_ranks_why_there_is_none():
    mine = on_gpu(np.ones(3))
    for name in ("first", "second"):
        with pytest.raises(hvd.RingtrainError, match=f'allreduce "{name}": rank 0 has no NCCL .*ncclCommSplit'):
            hvd.allreduce_(mine, name=name)
    assert hvd.allreduce(np.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]


@pytest.mark.ranks(2, env=NO_NCCL)
def test_without_nccl_arrays_pass_through_host_memory():
    require_on_gpu(hvd.allreduce(on_gpu(np.ones(3)), op=hvd.Sum), np.full(3, 2.0))


@pytest.mark.ranks(2, env=GPU, isolated=True)
def test_ranks_with_different_versions_of_nccl_do_not_meet_in_it():
    if int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0"))) == 1:
        os.environ["RINGTRAIN_GPU_DOUBLE_NCCL_VERSION"] = "22800"
    hvd.init()
    for number in range(2):
        require_on_gpu(hvd.allreduce(on_gpu(np.ones(3)), op=hvd.Sum, name=f"{number}"), np.full(3, 2.0))
    assert _core.last_operations()[-1]["group"] == "staged"
    hvd.shutdown()


@pytest.mark.ranks(2, env=GPU, isolated=True)
def test_a_rank_that_has_joined_without_a_gpu_is_named():
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    if rank == 1:
        os.environ["RINGTRAIN_GPU_DOUBLE_GPUS"] = "0"
    hvd.init()
    if rank == 0:
        mine = on_gpu(np.ones(3))
        with pytest.raises(hvd.RingtrainError, match='allreduce "alone": rank 1 has no GPU'):
            hvd.allreduce_(mine, name="alone")
    hvd.join()
    hvd.shutdown()


@pytest.mark.ranks(1, env=GPU)
def test_a_stream_that_is_captured_is_refused():
    use_own_gpu()
    mine = cupy.ones(3)
    hvd.allreduce_(mine)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        gpu_double.control().mark_capturing(stream.ptr, True)
        with pytest.raises(ValueError, match="captured into a CUDA graph"):
            hvd.allreduce_(mine)
        gpu_double.control().mark_capturing(stream.ptr, False)
    require_on_gpu(hvd.allreduce_(mine), np.ones(3))


NOTHING_PINNED = environment(guard=1, fail="cuMemHostAlloc:*:2:rank=1,cuMemHostRegister_v2:*:2:rank=1")


@pytest.mark.ranks(2, env={**NOTHING_PINNED, "RINGTRAIN_GPU_ALGORITHM": "staged"}, isolated=True)
def test_no_memory_to_pass_through_reaches_all_ranks():
    hvd.init()
    mine = on_gpu(np.ones(3, "int16"))
    with pytest.raises(hvd.RingtrainError, match=r"cuMemHostAlloc: .*memory"):
        for number in range(10):
            hvd.allreduce_(mine, op=hvd.Sum, name=f"{number}")
    hvd.shutdown()
