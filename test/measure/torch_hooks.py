"""The hooks of a DistributedOptimizer of torch, called as backward() calls them, without a backward()."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from harness.backward import backward_pass

import ringtrain.torch as hvd


def step_of_hooks(names: list[str], elements: int) -> Callable[[], float]:
    """A step of so many parameters; it returns the seconds in which all gradients were submitted."""
    parameters = [torch.nn.Parameter(torch.zeros(elements)) for _ in names]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1), named_parameters=list(zip(names, parameters, strict=True))
    )
    for parameter in parameters:
        parameter.grad = torch.zeros(elements)
    hooks = [next(iter(parameter._post_accumulate_grad_hooks.values())) for parameter in parameters]

    def step() -> float:
        with backward_pass():
            begin = time.perf_counter()
            for hook, parameter in zip(hooks, parameters, strict=True):
                hook(parameter)
            seconds = time.perf_counter() - begin
        optimizer.step()
        return seconds

    return step
