"""What ringtrain and Horovod's PyTorch API both offer under the same names: `api` is the one module or the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def collective(api: Any, kind: str, tensor: Any) -> Callable[[], Any]:
    """A collective on one tensor, under a name that is cached."""
    name = f"{kind}.{tensor.nbytes}"
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: api.allreduce_(tensor, op=api.Sum, name=name),
        "allgather": lambda: api.allgather(tensor, name=name),
        "broadcast": lambda: api.broadcast_(tensor, 0, name=name),
        "alltoall": lambda: api.alltoall(tensor, name=name),
        "reducescatter": lambda: api.reducescatter(tensor, op=api.Sum, name=name),
    }
    return calls[kind]


def step(api: Any, tensors: Sequence[Any], prefix: str = "gradient") -> Callable[[], Sequence[Any]]:
    """All tensors averaged in place, submitted from the last to the first."""
    backward = [(f"{prefix}{index}", tensor) for index, tensor in reversed(list(enumerate(tensors)))]

    def run() -> Sequence[Any]:
        handles = [api.allreduce_async_(tensor, name=name) for name, tensor in backward]
        for handle in handles:
            api.synchronize(handle)
        return tensors

    return run
