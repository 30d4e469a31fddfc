"""A backward pass without autograd, for tests and measurements that call the hooks of parameters themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def backward_pass() -> Iterator[None]:
    """Calls at its end what hooks have queued for the end of a backward pass, as torch's engine does."""
    import torch

    callbacks: list[Callable[[], Any]] = []
    engine = mock.Mock(queue_callback=callbacks.append)
    with mock.patch.object(torch.autograd.Variable, "_execution_engine", engine):
        yield
    for callback in callbacks:
        callback()
