"""The hooks of a DistributedOptimizer of torch, called as backward() calls them, without a backward()."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

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
        with mock.patch.object(torch.autograd.Variable, "_execution_engine", _Engine()) as engine:
            begin = time.perf_counter()
            for hook, parameter in zip(hooks, parameters, strict=True):
                hook(parameter)
            seconds = time.perf_counter() - begin
        for callback in engine.callbacks:
            callback()
        optimizer.step()
        return seconds

    return step


class _Engine:
    """Calls what torch's engine calls at the end of a backward pass."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], Any]] = []

    def queue_callback(self, callback: Callable[[], Any]) -> None:
        self.callbacks.append(callback)
