"""The backend "ringtrain" of torch.distributed on tensors on GPUs: exact, in the order of torch's streams. On fakes.

The PyTorch here is one for CPUs; harness/gpu_tensors.py says what its tensors "on CUDA" cannot show. Training by
DistributedDataParallel, which needs backward(), is in test/gpu/real/.
"""

import c10d_gpu_checks
import numpy as np
import pytest
from c10d_gpu_checks import CALLS, REPEATS, default_group
from exact_torch_gpu import on_gpu, require_on_gpu
from harness import gpu_arrays
from harness.frameworks import need_torch_of_backend, on_demand
from harness.gpu_arrays import GPU, STAGED

need_torch_of_backend()

torch = on_demand("torch")
dist = on_demand("torch.distributed")
hvd = on_demand("ringtrain.torch")
gpu_tensors = on_demand("harness.gpu_tensors")


@pytest.mark.ranks(2, 3, env=GPU)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_reductions_are_exact(dtype):
    c10d_gpu_checks.check_reductions(dtype)


@pytest.mark.ranks(1, 2, 3, env=GPU)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_values_are_moved(dtype):
    c10d_gpu_checks.check_moving(dtype)


@pytest.mark.ranks(2, env=STAGED)
def test_reductions_and_moves_through_host_memory():
    c10d_gpu_checks.check_reductions("float32")
    c10d_gpu_checks.check_moving("float32")


@pytest.mark.ranks(2, env=GPU)
def test_reductions_that_the_engine_does_not_have():
    c10d_gpu_checks.check_bitwise_and_complex_reductions()


@pytest.mark.ranks(2, 3, env=GPU)
def test_messages_go_through_host_memory():
    c10d_gpu_checks.check_messages()


@pytest.mark.ranks(1, 2, env=GPU)
def test_an_operation_lies_between_the_kernels_of_its_stream():
    c10d_gpu_checks.check_an_operation_lies_between_the_kernels_of_its_stream()


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("call", CALLS)
def test_the_host_does_not_wait_for_the_gpu(call):
    c10d_gpu_checks.check_the_host_does_not_wait(call)


@pytest.mark.ranks(1, 2, env=GPU)
@pytest.mark.parametrize("way", ["work", "future"])
def test_the_stream_that_waits_is_the_one_that_is_current_then(way):
    c10d_gpu_checks.check_the_stream_that_waits_is_the_one_that_is_current_then(way)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("way", REPEATS)
def test_repeated_allreduces_are_prepared(way):
    c10d_gpu_checks.check_repeats_are_prepared(way)
    c10d_gpu_checks.check_a_repeat_lies_between_the_kernels_of_its_stream(way)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("way", ["work", "future", "group"])
def test_the_stream_that_waits_for_a_repeat_is_the_one_that_is_current_then(way):
    c10d_gpu_checks.check_the_stream_that_waits_for_a_repeat_is_the_one_that_is_current_then(way)


@pytest.mark.ranks(2, env=GPU)
def test_memory_of_a_repeat_stays_while_another_stream_reads_it():
    c10d_gpu_checks.check_memory_of_a_repeat_stays_while_another_stream_reads_it()


@pytest.mark.ranks(2, env=GPU)
def test_a_callback_of_a_future_sees_the_result():
    c10d_gpu_checks.check_a_callback_of_a_future_sees_the_result()


@pytest.mark.ranks(2, env=GPU)
def test_a_work_is_complete_when_the_gpu_is():
    c10d_gpu_checks.check_a_work_is_complete_when_the_gpu_is()


@pytest.mark.ranks(2, env=GPU)
def test_memory_stays_while_another_stream_makes_the_result():
    c10d_gpu_checks.check_memory_stays_while_another_stream_makes_the_result()


@pytest.mark.ranks(2, env=gpu_arrays.environment(gpus=2, guard=1))
def test_a_tensor_in_the_wrong_place_is_refused():
    with default_group() as (rank, size):
        dist.all_reduce(mine := on_gpu(np.ones(4)))
        with pytest.raises(
            ValueError, match=r"all_gather_into_tensor of group .* its tensors are in host memory and on"
        ):
            dist.all_gather_into_tensor(torch.empty(4 * size, dtype=torch.float64), mine)
        with pytest.raises(ValueError, match=r"all_reduce: the tensor is on meta; .* use \.cpu\(\)"):
            dist.all_reduce(torch.empty(4, device="meta"))
        with pytest.raises(hvd.MismatchError, match=r"sent tensors on a GPU.*Put the tensors on a GPU on all ranks"):
            dist.all_reduce(mine if rank == 0 else torch.ones(4, dtype=torch.float64))
        elsewhere = torch.ones(4).to(f"cuda:{1 - rank}")
        with pytest.raises(ValueError, match=f"an array is on GPU {1 - rank}, but this rank works on GPU {rank}"):
            dist.all_reduce(elsewhere)
        dist.all_reduce(mine)
        require_on_gpu(mine, np.full(4, 4.0))
