"""Which way arrays on GPUs take, by where the ranks are: NCCL, host memory, or both in a hierarchy. On fakes."""

import os
from pathlib import Path

import numpy as np
import pytest
from exact_cupy import on_gpu, require_on_gpu, use_own_gpu
from harness import gpu_double
from harness.exact import DTYPE_OF_EACH_SIZE, DTYPES, OPS, data, data_of_ranks, reference
from harness.gpu_arrays import GPU, STAGED, cupy, environment

import ringtrain as hvd
from ringtrain import _core

HVD_OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}
SHAPES = [(), (0,), (33, 17)]
LARGE = (300_007,)
HIERARCHICAL = {**GPU, "RINGTRAIN_GPU_ALGORITHM": "hierarchical"}
CROSS = [{**HIERARCHICAL, "RINGTRAIN_GPU_CROSS_ALGORITHM": name} for name in ("nccl", "mpi", "cuda_aware_mpi")]
# The host cannot touch guarded memory, and MPI is the host.
CROSS[2] |= {"RINGTRAIN_GPU_DOUBLE_GUARD": "0", "RINGTRAIN_NETWORK": "mpi"}


def way_taken():
    """Returns what carried out the last operation."""
    return _core.last_operations()[-1]["group"]


NCCL_CALLS = ("ncclAllReduce", "ncclReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast", "ncclSend")


def check_all_ops(dtype, shapes=()):
    for op in OPS:
        if op == "average" and dtype.kind == "b":
            continue
        for shape in shapes or [*SHAPES, *([LARGE] if op == "sum" else [])]:
            arrays = data_of_ranks(hvd.size(), shape, dtype, op=op)
            mine = on_gpu(arrays[hvd.rank()])
            require_on_gpu(hvd.allreduce(mine, op=HVD_OPS[op], name=f"{op}{shape}"), reference(op, arrays))
            hvd.allreduce_(mine, op=HVD_OPS[op], name=f"{op}{shape} in place")
            require_on_gpu(mine, reference(op, arrays))


def check_everything_else():
    size, rank = hvd.size(), hvd.rank()
    parts = [data(r, (r + 1, 3), "float32") for r in range(size)]
    require_on_gpu(hvd.allgather(on_gpu(parts[rank])), np.concatenate(parts))
    require_on_gpu(hvd.broadcast(on_gpu(parts[-1] + rank), size - 1), parts[-1] + size - 1)
    rows = data_of_ranks(size, (2 * size + 1, 5), "int16")
    scattered = hvd.reducescatter(on_gpu(rows[rank]), op=hvd.Sum)
    require_on_gpu(scattered, np.array_split(reference("sum", rows), size)[rank])
    sent = np.arange(2 * size) + 100 * rank
    expected = np.concatenate([np.arange(2 * rank, 2 * rank + 2) + 100 * r for r in range(size)])
    require_on_gpu(hvd.alltoall(on_gpu(sent)), expected)


@pytest.mark.ranks(4, env=CROSS[0], hosts=(2, 2), dtypes=DTYPES, way="nccl between hosts")
@pytest.mark.ranks(4, env=CROSS[1], hosts=(2, 2), dtypes=DTYPE_OF_EACH_SIZE, way="mpi between hosts")
@pytest.mark.ranks(4, env=CROSS[2], hosts=(2, 2), dtypes=DTYPE_OF_EACH_SIZE, way="mpi between GPUs")
def test_nccl_on_the_hosts_and_between_them(dtype):
    check_all_ops(dtype)


@pytest.mark.ranks(3, env=CROSS[1], hosts=(2, 1))
def test_a_hierarchy_of_hosts_with_different_numbers_of_ranks():
    check_all_ops(np.dtype("float32"))
    assert way_taken() == "nccl on nodes"
    check_everything_else()


@pytest.mark.ranks(4, env=CROSS[1], hosts=(2, 2))
def test_a_group_of_odd_lengths_is_one_scatter_and_one_gather_on_its_host(tmp_path):
    use_own_gpu()
    arrays = [data_of_ranks(hvd.size(), (length,), "float32", seed=length) for length in (1, 33, 70_001)]
    mine = [on_gpu(one[hvd.rank()]) for one in arrays]
    hvd.allreduce(mine[0])
    gpu_double.control().set_log(tmp_path)
    results = hvd.grouped_allreduce(mine, op=hvd.Sum)
    gpu_double.control().set_log("")
    for result, one in zip(results, arrays, strict=True):
        require_on_gpu(result, reference("sum", one))
    calls = [line.split()[0] for line in (Path(tmp_path) / str(os.getpid())).read_text().splitlines()]
    assert [call for call in calls if call in NCCL_CALLS] == ["ncclReduceScatter", "ncclAllGather"]


SEALED = {"RINGTRAIN_SOCKET_ENCRYPTION": "on"}
SHARED = environment(guard=1, gpus=1, nccl_version=23000)
SHARED_BY_NCCL = {**SHARED, "RINGTRAIN_GPU_ALGORITHM": "nccl"}


def require_way(way):
    """The first word is what carries out the operations."""
    check_all_ops(np.dtype("float32"))
    assert way_taken() == way.partition(":")[0]
    check_everything_else()


@pytest.mark.ranks(2, env=environment(guard=1, gpus=1), way="staged: ranks share a GPU")
@pytest.mark.ranks(2, env=environment(guard=1, nccl_version=21700), way="staged: an old NCCL is left alone")
def test_the_way_that_is_taken(way):
    require_way(way)


@pytest.mark.ranks(4, env=GPU, hosts=(2, 2), way="nccl: reaches all hosts alone")
@pytest.mark.ranks(4, env=STAGED, hosts=(2, 2), way="staged: reaches all hosts")
@pytest.mark.ranks(4, env=GPU | SEALED, hosts=(2, 2), way="staged: NCCL encrypts nothing between hosts")
@pytest.mark.ranks(4, env=CROSS[0] | SEALED, hosts=(2, 2), way="staged: nor in a hierarchy")
@pytest.mark.ranks(4, env=CROSS[1] | SEALED, hosts=(2, 2), way="nccl on nodes: the hosts' network encrypts")
@pytest.mark.ranks(2, env=GPU | SEALED, way="nccl: on one host")
@pytest.mark.ranks(2, env=SHARED, way="staged: they do so with a newer NCCL")
@pytest.mark.ranks(2, 3, env=SHARED_BY_NCCL, way="nccl: a newer one lets them where it is asked for")
@pytest.mark.ranks(2, env=environment(guard=1, slices=2), way="staged: slices of one GPU")
@pytest.mark.ranks(
    2, env=environment(guard=1, left_out=["ncclMemAlloc", "ncclCommRegister"]), way="nccl: one without registration"
)
def test_the_way_that_is_taken_elsewhere(way):
    require_way(way)


@pytest.mark.ranks(2, env={**SHARED_BY_NCCL, "NCCL_MULTI_RANK_GPU_ENABLE": "0"}, isolated=True)
def test_a_job_that_forbids_nccl_to_share_is_obeyed():
    hvd.init()
    with pytest.raises(
        hvd.RingtrainError, match=r"ranks 0 and 1 share the GPU of GPU-.*, which NCCL allows from 2\.30"
    ):
        hvd.allreduce(on_gpu(np.ones(3)), name="x")
    hvd.shutdown()


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("dtype", ["int16", "uint16"])
def test_dtypes_that_nccl_lacks_pass_through_host_memory(dtype):
    check_all_ops(np.dtype(dtype))


@pytest.mark.ranks(2, 3, env=GPU)
def test_factors_that_nccl_does_not_know():
    numbers = data_of_ranks(hvd.size(), (1000,), "int32")
    result = hvd.allreduce(on_gpu(numbers[hvd.rank()]), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    require_on_gpu(result, reference("sum", numbers))
    floats = data_of_ranks(hvd.size(), (1000,), "float32")
    largest = hvd.allreduce(on_gpu(floats[hvd.rank()]), op=hvd.Max, prescale_factor=2.0, postscale_factor=0.25)
    require_on_gpu(largest, reference("max", floats) / 2)
    tiny = hvd.allreduce(on_gpu(np.full(8, 1024, "float16")), op=hvd.Sum, postscale_factor=2.0**-20)
    require_on_gpu(tiny, np.full(8, hvd.size() * 2.0**-10, "float16"))


@pytest.mark.ranks(2, 3, env=GPU)
def test_gradients_near_the_largest_float16_do_not_overflow():
    near = np.full(5000, 60_000, "float16")
    require_on_gpu(hvd.allreduce(on_gpu(near)), near)
    halved = hvd.allreduce(on_gpu(near), prescale_factor=1 / 4, postscale_factor=4.0)
    require_on_gpu(halved, near)


@pytest.mark.ranks(2, 3, env=GPU)
def test_adasum_of_arrays_on_gpus_is_that_of_host_arrays():
    values = [data(hvd.rank(), (1000 + i,), "float32", seed=i) for i in range(3)]
    right = hvd.grouped_allreduce(values, op=hvd.Adasum, name="host")
    for one, expected in zip(hvd.grouped_allreduce([on_gpu(v) for v in values], op=hvd.Adasum), right, strict=True):
        require_on_gpu(one, expected)


@pytest.mark.ranks(1, 2, 3, env=GPU, slow=[2])
def test_more_than_the_relay_holds_at_a_time():
    for dtype in ("int16", "float32"):
        arrays = data_of_ranks(hvd.size(), (5_000_003,), dtype)
        require_on_gpu(hvd.allreduce(on_gpu(arrays[hvd.rank()]), op=hvd.Sum), reference("sum", arrays))


@pytest.mark.ranks(2, 3, env=STAGED, slow=[2])
def test_large_arrays_pass_through_host_memory_in_parts():
    before = gpu_double.control().count("pinned bytes")
    arrays = data_of_ranks(hvd.size(), (6_000_001,), "float32")
    require_on_gpu(hvd.allreduce(on_gpu(arrays[hvd.rank()]), op=hvd.Sum), reference("sum", arrays))
    require_on_gpu(hvd.allgather(on_gpu(arrays[hvd.rank()])), np.concatenate(arrays))
    require_on_gpu(hvd.broadcast(on_gpu(arrays[hvd.rank()]), 1), arrays[1])
    parts = np.array_split(reference("sum", arrays), hvd.size())
    require_on_gpu(hvd.reducescatter(on_gpu(arrays[hvd.rank()]), op=hvd.Sum), parts[hvd.rank()])
    assert gpu_double.control().count("most pinned bytes") - before < 24_000_000


# Process sets


@pytest.mark.ranks(3, env=GPU, initialised=False)
def test_process_sets_are_split_from_the_communicator_of_all(tmp_path):
    hvd.init()
    use_own_gpu()
    gpu_double.control().set_log(tmp_path)
    hvd.allreduce(cupy.ones(3), name="all")
    pair = hvd.add_process_set([0, 2])
    if pair.included():
        mine = data(hvd.rank(), (1000,), "float32")
        expected = reference("sum", [data(rank, (1000,), "float32") for rank in pair.ranks])
        require_on_gpu(hvd.allreduce(on_gpu(mine), op=hvd.Sum, process_set=pair), expected)
    hvd.barrier()
    gpu_double.control().set_log("")
    calls = (Path(tmp_path) / str(os.getpid())).read_text()
    assert calls.count("ncclCommInitRankConfig ") == 1
    assert calls.count("ncclCommSplit ") == 1
    hvd.remove_process_set(pair)
    hvd.barrier()
    assert gpu_double.control().count("communicators") == 1
    hvd.barrier()
    hvd.shutdown()
    assert gpu_double.control().count("communicators") == 0


@pytest.mark.ranks(3, env=GPU)
def test_a_set_is_removed_while_what_was_agreed_for_it_waits_for_more_urgent_operations():
    for _ in range(3):
        pair = hvd.add_process_set([0, 1])
        before = hvd.allreduce_async_(np.ones(4_000_000), name="before")  # all else is agreed on behind it
        late = []
        if pair.included():
            late = [hvd.allreduce_async(on_gpu(np.ones(5)), name="late", process_set=pair, priority=-1)]
        urgent = [hvd.broadcast_async(np.ones(5), 0, name=f"urgent {i}", priority=1) for i in range(200)]
        for handle in (before, urgent[0]):
            hvd.synchronize(handle)
        hvd.remove_process_set(pair)
        for handle in late:
            try:
                require_on_gpu(hvd.synchronize(handle), np.ones(5))
            except hvd.RingtrainError as error:
                assert "was removed" in str(error)
        for handle in urgent:
            hvd.synchronize(handle)
        require_on_gpu(hvd.allreduce(on_gpu(np.ones(5)), name="after"), np.ones(5))


@pytest.mark.ranks(3, env=GPU, initialised=False)
def test_a_process_set_may_come_to_gpus_before_the_world_does():
    hvd.init()
    chosen = hvd.add_process_set([1, 2])
    if chosen.included():
        require_on_gpu(hvd.allreduce(on_gpu(np.ones(5)), op=hvd.Sum, process_set=chosen), np.full(5, 2.0))
    require_on_gpu(hvd.allreduce(on_gpu(np.ones(5)), op=hvd.Sum), np.full(5, 3.0))
    hvd.shutdown()


@pytest.mark.ranks(3, env=GPU)
def test_a_joined_rank_adds_zeros_without_an_array_of_its_own():
    if hvd.rank() == 1:
        hvd.join()
    else:
        for number in range(3):
            array = on_gpu(np.full(1000, hvd.rank() + 1, "float32"))
            require_on_gpu(hvd.allreduce(array, op=hvd.Sum, name=f"uneven {number}"), np.full(1000, 4, "float32"))
        hvd.join()


# Many at a time


@pytest.mark.ranks(2, 3, env=GPU)
def test_hundreds_of_gradients_are_a_few_calls(tmp_path):
    use_own_gpu()
    arrays = [data_of_ranks(hvd.size(), (100 + i,), "float32", seed=i) for i in range(200)]
    for step in range(2):
        mine = [on_gpu(one[hvd.rank()]) for one in arrays]
        hvd.barrier()
        if step == 1:
            gpu_double.control().set_log(tmp_path)
        handles = [hvd.allreduce_async_(one, op=hvd.Sum, name=f"gradient {i}") for i, one in enumerate(mine)]
        for handle in handles:
            hvd.synchronize(handle)
        gpu_double.control().set_log("")
        for one, right in zip(mine, arrays, strict=True):
            require_on_gpu(one, reference("sum", right))
    calls = (Path(tmp_path) / str(os.getpid())).read_text()
    assert calls.count("ncclGroupEnd") < 100
    assert "DtoH" not in calls and "cuStreamSynchronize" not in calls and "cuEventSynchronize" not in calls


@pytest.mark.ranks(2, env=GPU, initialised=False)
def test_nothing_is_left_after_shutdown_and_all_works_again():
    for _ in range(2):
        hvd.init()
        use_own_gpu()
        for number in range(20):
            require_on_gpu(hvd.allreduce(on_gpu(np.ones(50)), op=hvd.Sum, name=f"{number}"), np.full(50, 2.0))
        hvd.shutdown()
        control = gpu_double.control()
        assert control.count("communicators") == 0 and control.count("registrations") == 0
        assert control.count("nccl allocations") == 0
