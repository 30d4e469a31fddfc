"""ringtrain as a competitor, through its public API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ringtrain as hvd
from ringtrain.bench import horovod_api
from ringtrain.bench.rounds import Array, Competitor

NAME = "ringtrain"


def collective(kind: str) -> Competitor:
    """A collective on one array, under a name that is cached."""
    return Competitor(NAME, lambda tensors: horovod_api.collective(hvd, kind, tensors[0]), is_own=True)


def step() -> Competitor:
    """A training step's communication: all gradients averaged in place, from the last to the first."""
    return Competitor(NAME, lambda tensors: horovod_api.step(hvd, tensors), is_own=True)


def step_in_shared_arrays() -> Competitor:
    """The same in arrays that ringtrain has made."""

    def prepare(tensors: Sequence[Array]) -> Callable[[], Any]:
        shared = [hvd.empty(tensor.shape, tensor.dtype) for tensor in tensors]
        for own, tensor in zip(shared, tensors, strict=True):
            own[...] = tensor
        return horovod_api.step(hvd, shared, "shared")

    return Competitor("ringtrain.empty", prepare, is_own=True)


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of that name, bfloat16 included."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))
