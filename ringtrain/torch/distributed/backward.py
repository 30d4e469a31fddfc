"""Errors that leave backward() by way of torch's C++, which keeps their text alone: they get their class back."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.autograd
import torch.autograd.graph

_KEPT = 16
_last: deque[Exception] = deque(maxlen=_KEPT)  # errors of operations of groups, the newest first


def note(error: Exception) -> None:
    """Keep the error of an operation, in case torch raises its text."""
    _last.appendleft(error)


def _with_class(raised: RuntimeError) -> Exception | None:
    """Returns the error of an operation whose text torch has raised, or None."""
    text = str(raised)
    return next((error for error in list(_last) if f"{type(error).__name__}: {error}" in text), None)


def _restoring(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_backward(*arguments: Any, **options: Any) -> Any:
        try:
            return run(*arguments, **options)
        except RuntimeError as raised:
            error = _with_class(raised)
            if error is None or error is raised:
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
