"""PyTorch tensors on GPUs, beside what test_gpu_operations.py does with them: streams, training. On fakes.

The PyTorch here is one for CPUs; harness/gpu_tensors.py says what its tensors "on CUDA" cannot show.
"""

import os

import exact_torch_gpu
import gpu_checks
import numpy as np
import pytest
import torch_gpu_checks
from exact_torch_gpu import backward, new_stream, on_gpu, require_on_gpu, synchronize
from gpu_checks import first_operation
from harness import gpu_double
from harness.frameworks import on_demand
from harness.gpu_arrays import GPU
from torch_gpu_checks import SGD, WAYS, new_parameters

from ringtrain import Compression

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")


# Operations


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("how", [{}, {"compression": Compression.bf16}], ids=["plain", "compressed"])
def test_nothing_passes_through_the_host(how, tmp_path):
    mine = on_gpu(np.ones(1000, "float32"))
    first_operation(exact_torch_gpu)
    gpu_double.control().set_log(tmp_path)
    hvd.allreduce_(mine, op=hvd.Sum, **how)
    hvd.allreduce(mine.view(10, 100).t(), **how)
    synchronize()
    gpu_double.control().set_log("")
    calls = (tmp_path / f"{os.getpid()}").read_text().splitlines()
    assert any(call.startswith("ncclAllReduce") for call in calls)
    assert not [call for call in calls if call.startswith(("cuMemcpyDtoH", "cuMemcpyHtoD", "cuMemcpyAsync"))]


@pytest.mark.ranks(2, env=GPU)
def test_a_tensor_on_a_gpu_here_and_on_the_cpu_there_is_a_mismatch():
    mine = on_gpu(np.ones(4)) if hvd.rank() == 0 else torch.ones(4, dtype=torch.float64)
    with pytest.raises(hvd.MismatchError, match='allreduce "weight"'):
        hvd.allreduce(mine, name="weight")
    with pytest.raises(ValueError, match=f"its tensors are on GPU {hvd.rank()} and in host memory"):
        hvd.grouped_allreduce([on_gpu(np.ones(4)), torch.ones(4)])


# Streams


@pytest.mark.ranks(1, 2, env=GPU)
@pytest.mark.parametrize("in_stream_of_its_own", [False, True], ids=["default", "own"])
def test_an_operation_lies_between_the_kernels_of_its_stream(in_stream_of_its_own):
    first_operation(exact_torch_gpu)
    if not in_stream_of_its_own:
        gpu_checks.check_an_operation_lies_between_the_kernels_of_its_stream(exact_torch_gpu)
        return
    with new_stream():
        gpu_checks.check_an_operation_lies_between_the_kernels_of_its_stream(exact_torch_gpu)


@pytest.mark.ranks(1, 2, env=GPU)
def test_a_result_may_be_dropped_while_another_stream_than_its_own_reads_it():
    gpu_checks.check_memory_stays_while_another_stream_reads_the_result(exact_torch_gpu)


# Training


@pytest.mark.ranks(1, 2, 3, env=GPU, slow=[3])
@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_train_the_same_parameters_as_the_cpu(way):
    torch_gpu_checks.check_all_ranks_train_as_the_cpu(way)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("way", ["plain", "compressed", "grouped"])
def test_a_step_does_not_let_the_host_wait(way):
    torch_gpu_checks.check_a_step_does_not_let_the_host_wait(way)


@pytest.mark.ranks(2, env=GPU)
def test_gradients_of_another_stream_are_averaged_in_order():
    torch_gpu_checks.check_gradients_of_another_stream()


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_named_without_a_wait_for_each(value, tmp_path):
    parameters = new_parameters()
    names = zip("abcd", parameters, strict=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, **SGD), names, nan_check=True)
    before = [parameter.detach().clone() for parameter in parameters]
    mine = [on_gpu(np.zeros(parameter.shape, "float32")) for parameter in parameters]
    if hvd.rank() == 1:
        mine[1] = on_gpu(np.array([0, 1, value, 0, value], "float32"))
    backward(parameters, mine)
    synchronize()
    gpu_double.control().set_log(tmp_path)
    with pytest.raises(hvd.NonFiniteError, match='gradient of "b" is NaN or infinite on rank 1 in step 1'):
        optimizer.step()
    gpu_double.control().set_log("")
    calls = (tmp_path / f"{os.getpid()}").read_text().splitlines()
    assert len([call for call in calls if call.startswith("cuStreamSynchronize")]) <= 1
    for parameter, expected in zip(parameters, before, strict=True):
        require_on_gpu(parameter, expected.cpu().numpy())


@pytest.mark.ranks(2, env=GPU)
def test_parameters_that_differ_are_named():
    same, weight = on_gpu(np.arange(5.0)), on_gpu(np.arange(12.0).reshape(3, 4) + hvd.rank())
    with pytest.raises(
        hvd.ReplicaError, match=r'parameter "weight" .* on rank 1 first at \[0, 0\]: 1.0 instead of 0.0'
    ):
        hvd.check_replicas({"same": same, "weight": weight})


@pytest.mark.ranks(2, env=GPU)
def test_the_state_of_an_optimizer_goes_where_each_rank_has_its_own():
    torch_gpu_checks.check_the_state_of_an_optimizer_goes_where_each_rank_has_its_own()


@pytest.mark.ranks(2, env=GPU)
def test_updates_are_combined_adaptively_on_the_gpu():
    parameters = [on_gpu(np.zeros(4, "float32")).requires_grad_()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Adasum)
    backward(parameters, [on_gpu(np.arange(4) == hvd.rank()).to(torch.float32)])
    optimizer.step()
    require_on_gpu(parameters[0], np.array([-1, -1, 0, 0], "float32"))  # updates at right angles add up


@pytest.mark.ranks(2, env=GPU)
def test_the_shorter_epoch_contributes_nothing():
    parameters = [on_gpu(np.zeros(4, "float32")).requires_grad_()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    with hvd.Join(optimizer):
        for _ in range(1 + hvd.rank()):
            backward(parameters, [on_gpu(np.full(4, 1.0 + hvd.rank(), "float32"))])
            optimizer.step()
    require_on_gpu(parameters[0], np.full(4, -1.5 - 2.0, "float32"))
