"""Checks of training on tensors of PyTorch on GPUs, on the fakes and on real GPUs. On the CPU it does the same.

All arithmetic here is exact, so that nothing depends on who does it in which order.
"""

from __future__ import annotations

from typing import Any

import exact_torch_gpu
import numpy as np
from exact_torch import tensor_of
from exact_torch_gpu import backward, keep_busy, new_stream, on_gpu, require_on_gpu, synchronize
from gpu_checks import SLOW_S, Stopwatch, first_operation
from harness.exact import data, data_of_ranks, reference
from harness.frameworks import on_demand

from ringtrain import Compression

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")

SGD = {"lr": 0.5, "momentum": 0.5}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed": {"compression": Compression.bf16},
    "grouped": {"num_groups": 2},
    "shared": {"gradient_as_shared_view": True},
    "checked": {"check_every": 1, "nan_check": True},
}


def new_parameters() -> list[torch.Tensor]:
    """Other ones on each rank, of which one is in memory as channels-last does."""
    shapes: tuple[tuple[int, ...], ...] = ((3, 2), (5,), ())
    parameters = [on_gpu(data(hvd.rank(), shape, "float32", seed=len(shape))) for shape in shapes]
    parameters.append(on_gpu(data(hvd.rank(), (4, 3), "float32")).t())
    return [parameter.requires_grad_() for parameter in parameters]


def gradients_for(parameters: list[torch.Tensor], step: int) -> tuple[list[torch.Tensor], list[np.ndarray]]:
    """Of this rank; and the averages over all ranks."""
    of_ranks = [
        data_of_ranks(hvd.size(), tuple(one.shape), "float32", seed=10 * step + place, op="average")
        for place, one in enumerate(parameters)
    ]
    return [on_gpu(arrays[hvd.rank()]) for arrays in of_ranks], [reference("average", arrays) for arrays in of_ranks]


def check_all_ranks_train_as_the_cpu(way: str) -> None:
    parameters = new_parameters()
    hvd.broadcast_parameters(parameters)
    on_cpu = [parameter.detach().cpu().requires_grad_() for parameter in parameters]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, **SGD), **WAYS[way])
    alone = torch.optim.SGD(on_cpu, **SGD)
    for step in range(3):
        mine, averages = gradients_for(parameters, step)
        optimizer.zero_grad()
        backward(parameters, mine)
        optimizer.step()
        for parameter, average in zip(on_cpu, averages, strict=True):
            parameter.grad = tensor_of(np.asarray(average))
        alone.step()
        for parameter, average, expected in zip(parameters, averages, on_cpu, strict=True):
            require_on_gpu(parameter.grad, average)
            require_on_gpu(parameter, expected.detach().numpy())
    hvd.check_replicas(parameters)


def check_a_step_does_not_let_the_host_wait(way: str) -> None:
    first_operation(exact_torch_gpu)
    parameters = new_parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, **SGD), **WAYS[way])
    for step in range(3):
        mine, _ = gradients_for(parameters, step)
        synchronize()
        if step == 2:  # what is made in the first steps is there
            keep_busy(SLOW_S)
        with Stopwatch() as host:
            optimizer.zero_grad()
            backward(parameters, mine)
            optimizer.step()
    assert host.seconds < SLOW_S / 2
    assert not exact_torch_gpu.is_done()


def check_gradients_of_another_stream() -> None:
    first_operation(exact_torch_gpu)
    parameters = new_parameters()
    hvd.broadcast_parameters(parameters)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, **SGD), nan_check=True)
    of_backward = new_stream()
    for step in range(3):
        with of_backward:
            mine, averages = gradients_for(parameters, step)
            keep_busy(SLOW_S / 8)
            mine = [gradient * 1 for gradient in mine]
            optimizer.zero_grad()
            backward(parameters, mine)
        exact_torch_gpu.wait_for(of_backward)
        optimizer.step()
        for parameter, average in zip(parameters, averages, strict=True):
            require_on_gpu(parameter.grad, average)


def check_the_state_of_an_optimizer_goes_where_each_rank_has_its_own() -> None:
    rate = on_gpu(np.float32(0.5 + hvd.rank()))
    parameters = [on_gpu(np.ones(3, "float32")).requires_grad_()]
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.5)
    if hvd.rank() == 0:
        optimizer.state[parameters[0]]["momentum_buffer"] = on_gpu(np.arange(3, dtype="float32"))
        optimizer.state[parameters[0]]["step"] = torch.tensor(7.0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state[parameters[0]]
    require_on_gpu(state["momentum_buffer"], np.arange(3, dtype="float32"))
    require_on_gpu(optimizer.param_groups[0]["lr"], np.float32(0.5))
    assert state["step"].is_cpu and state["step"] == 7
