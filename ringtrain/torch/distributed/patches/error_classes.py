"""backward() raises the class of an error of an operation, and begins to count buckets.

Replaces `_engine_run_backward` of torch.autograd and torch.autograd.graph, by which torch's backward() and grad() enter
its engine. The C++ of DistributedDataParallel keeps the text of an error alone, so without this patch backward() raises
a RuntimeError with that text, and messages do not say which bucket an all_reduce is.

Since PyTorch 2.3, which has that function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.autograd
import torch.autograd.graph

from ringtrain.torch.distributed import backward, buckets


def restore_classes() -> None:
    """Replaces the function in both modules."""
    modules: list[Any] = [torch.autograd, torch.autograd.graph]
    for module in modules:
        module._engine_run_backward = _restoring(module._engine_run_backward)


def _restoring(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_backward(*arguments: Any, **options: Any) -> Any:
        buckets.begin_backward()
        try:
            return run(*arguments, **options)
        except RuntimeError as raised:
            error = backward.with_class(raised)
            if error is None or type(error) is type(raised):
                raise
            raise error from raised

    return run_backward
