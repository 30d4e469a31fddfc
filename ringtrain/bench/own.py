"""ringtrain as a competitor, through its public API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ringtrain as hvd
from ringtrain.bench.rounds import Array, Competitor

NAME = "ringtrain"


def collective(kind: str) -> Competitor:
    """A collective on one array, under a name that is cached."""
    return Competitor(NAME, lambda tensors: _collective(kind, tensors[0]))


def _collective(kind: str, array: Array) -> Callable[[], Any]:
    name = f"{kind}.{array.nbytes}"
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: hvd.allreduce_(array, op=hvd.Sum, name=name),
        "allgather": lambda: hvd.allgather(array, name=name),
        "broadcast": lambda: hvd.broadcast_(array, 0, name=name),
        "alltoall": lambda: hvd.alltoall(array, name=name),
        "reducescatter": lambda: hvd.reducescatter(array, op=hvd.Sum, name=name),
    }
    return calls[kind]


def step() -> Competitor:
    """A training step's communication: all gradients averaged in place, from the last to the first."""
    return Competitor(NAME, lambda tensors: _step(tensors, "gradient"))


def step_in_shared_arrays() -> Competitor:
    """The same in arrays that ringtrain has made."""

    def prepare(tensors: Sequence[Array]) -> Callable[[], Any]:
        shared = [hvd.empty(tensor.shape, tensor.dtype) for tensor in tensors]
        for own, tensor in zip(shared, tensors, strict=True):
            own[...] = tensor
        return _step(shared, "shared")

    return Competitor("ringtrain.empty", prepare)


def _step(tensors: Sequence[Array], prefix: str) -> Callable[[], Sequence[Array]]:
    backward = [(f"{prefix}{index}", tensor) for index, tensor in reversed(list(enumerate(tensors)))]

    def run() -> Sequence[Array]:
        handles = [hvd.allreduce_async_(tensor, name=name) for name, tensor in backward]
        for handle in handles:
            hvd.synchronize(handle)
        return tensors

    return run


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of that name, bfloat16 included."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
