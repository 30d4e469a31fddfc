"""Errors that leave backward() by way of torch's C++, which keeps their text alone: they get their class back."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.autograd
import torch.autograd.graph

from ringtrain.torch.distributed import buckets

_KEPT = 16
# Class and text of errors of operations of groups, the newest first. The error itself would keep the frames that it was
# raised in, and their tensors.
_last: deque[tuple[type[Exception], str]] = deque(maxlen=_KEPT)


def note(error: Exception) -> None:
    """Keep class and text of the error of an operation, in case torch raises its text."""
    _last.appendleft((type(error), str(error)))


def _with_class(raised: RuntimeError) -> Exception | None:
    """Returns an error like that of the operation whose text torch has raised, or None."""
    text = str(raised)
    for kind, message in list(_last):
        if f"{kind.__name__}: {message}" in text:
            return kind(message)
    return None


def _restoring(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_backward(*arguments: Any, **options: Any) -> Any:
        buckets.begin_backward()
        try:
            return run(*arguments, **options)
        except RuntimeError as raised:
            error = _with_class(raised)
            if error is None or type(error) is type(raised):
                raise
            raise error from raised

    return run_backward


def restore_classes() -> None:
    """Replaces the function by which torch's backward() and grad() enter its engine, where this torch has it."""
    modules: list[Any] = [torch.autograd, torch.autograd.graph]
    for module in modules:
        run = getattr(module, "_engine_run_backward", None)
        if run is not None:
            module._engine_run_backward = _restoring(run)
