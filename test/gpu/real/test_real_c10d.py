"""The backend "ringtrain" of torch.distributed on real GPUs: exact, in the order of torch's streams, and under DDP."""

import contextlib

import c10d_gpu_checks
import numpy as np
import pytest
from c10d_gpu_checks import CALLS, REPEATS, default_group
from exact_torch_gpu import on_gpu, require_on_gpu
from harness.frameworks import on_demand
from real_gpus import library, need_gpu, need_nccl

need_gpu()
torch = on_demand("torch")
dist = on_demand("torch.distributed")
hvd = on_demand("ringtrain.torch")


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_reductions_are_exact(dtype):
    library("torch", dtype)
    c10d_gpu_checks.check_reductions(dtype)


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_values_are_moved(dtype):
    library("torch", dtype)
    c10d_gpu_checks.check_moving(dtype)


@pytest.mark.ranks(2, env={"RINGTRAIN_GPU_ALGORITHM": "staged"}, timeout=300)
def test_reductions_and_moves_through_host_memory():
    library("torch")
    c10d_gpu_checks.check_reductions("float32")
    c10d_gpu_checks.check_moving("float32")


@pytest.mark.ranks(2, timeout=300)
def test_reductions_that_the_engine_does_not_have_and_messages():
    library("torch")
    c10d_gpu_checks.check_bitwise_and_complex_reductions()
    c10d_gpu_checks.check_messages()


@pytest.mark.ranks(1, 2, timeout=300)
def test_an_operation_lies_between_the_kernels_of_its_stream():
    library("torch")
    c10d_gpu_checks.check_an_operation_lies_between_the_kernels_of_its_stream()


@pytest.mark.ranks(1, timeout=300)
@pytest.mark.parametrize("call", CALLS)
def test_the_host_does_not_wait_for_the_gpu(call):
    library("torch")
    c10d_gpu_checks.check_the_host_does_not_wait(call)


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("way", ["work", "future"])
def test_the_stream_that_waits_is_the_one_that_is_current_then(way):
    library("torch")
    c10d_gpu_checks.check_the_stream_that_waits_is_the_one_that_is_current_then(way)


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("way", REPEATS)
def test_repeated_allreduces_are_prepared(way):
    library("torch")
    c10d_gpu_checks.check_repeats_are_prepared(way)
    c10d_gpu_checks.check_a_repeat_lies_between_the_kernels_of_its_stream(way)


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("way", ["work", "future", "group"])
def test_the_stream_that_waits_for_a_repeat_is_the_one_that_is_current_then(way):
    library("torch")
    c10d_gpu_checks.check_the_stream_that_waits_for_a_repeat_is_the_one_that_is_current_then(way)


@pytest.mark.ranks(1, 2, timeout=300)
def test_memory_of_a_repeat_stays_while_another_stream_reads_it():
    library("torch")
    c10d_gpu_checks.check_memory_of_a_repeat_stays_while_another_stream_reads_it()


@pytest.mark.ranks(1, 2, env={"RINGTRAIN_GPU_ALGORITHM": "nccl"}, timeout=300)
def test_a_callback_of_a_future_sees_the_result_and_a_work_is_complete_when_the_gpu_is():
    need_nccl(library("torch"))  # through host memory the host waits for the GPU
    c10d_gpu_checks.check_a_callback_of_a_future_sees_the_result()
    c10d_gpu_checks.check_a_work_is_complete_when_the_gpu_is()
    c10d_gpu_checks.check_memory_stays_while_another_stream_makes_the_result()


@pytest.mark.ranks(1, 2, timeout=300)
def test_sparse_gradients_are_summed():
    library("torch")
    with default_group() as (rank, size):
        place = on_gpu(np.array([[rank, rank + 1]]))
        mine = torch.sparse_coo_tensor(place, on_gpu(np.ones((2, 3), "float32")), (size + 1, 3))
        dist.all_reduce(mine)
        expected = np.zeros((size + 1, 3), "float32")
        for one in range(size):
            expected[one : one + 2] += 1
        require_on_gpu(mine.to_dense(), expected)


def by_future(_, bucket):
    """A hook of Python, whose callback makes the result."""
    summed = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return summed.then(lambda future: future.value()[0].div_(dist.get_world_size()))


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("hook", ["none", "allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "by_future"])
@pytest.mark.parametrize("stream", ["default", "own"])
def test_ddp_averages_gradients_in_order(stream, hook):
    of = library("torch")
    with (
        default_group() as (rank, size),
        of.new_stream() if stream == "own" else contextlib.nullcontext(),
    ):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(4))).cuda()
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.eye(256))
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.3)
        if hook != "none":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            ddp.register_comm_hook(None, by_future if hook == "by_future" else getattr(default_hooks, hook))
        for _ in range(3):
            of.keep_busy(0.02)
            inputs = torch.full((1, 256), float(rank + 1), device="cuda")
            ddp.zero_grad()
            ddp(inputs).sum().backward()
            mean = (size + 1) / 2
            for weight in model.parameters():
                require_on_gpu(weight.grad, np.full((256, 256), mean, "float32"))


@pytest.mark.ranks(2, timeout=300)
def test_an_error_names_the_bucket_that_autograds_thread_has_reduced():
    library("torch")
    with default_group() as (rank, _):
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2).cuda())
        for _ in range(3):  # in the second one buckets get an order, on which the ranks agree
            ddp(torch.ones(1, 4, device="cuda")).sum().backward()
        if rank == 0:
            with pytest.raises(hvd.MismatchError, match=r"bucket 0 of DistributedDataParallel \(bias, weight\)"):
                ddp(torch.ones(1, 4, device="cuda")).sum().backward()
        else:
            with pytest.raises(hvd.MismatchError, match="rank 1 sent float32"):
                dist.all_reduce(torch.ones(3, device="cuda"))
