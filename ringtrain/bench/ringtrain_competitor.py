"""ringtrain as a competitor, through its public API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import ringtrain as hvd
from ringtrain.bench.rounds import Array, Competitor
from ringtrain.engine.compression import AnyCompressor

NAME = "ringtrain"


def collective(kind: str) -> Competitor:
    """A collective on one array, under a name that is cached."""
    return Competitor(NAME, lambda tensors: collective_of(hvd, kind, tensors[0]), is_own=True)


# Of what is 1 on each host these send all. force: also on one host, where the user has asked for it.
COMPRESSIONS: dict[str, AnyCompressor] = {
    "fp16": hvd.Compression.fp16,
    "bf16": hvd.Compression.bf16,
    "two_bit": hvd.Compression.two_bit(1.0, force=True),
    "one_bit": hvd.Compression.one_bit(0.5, force=True),
}


def compressed_allreduce(compression: str) -> list[Competitor]:
    """An allreduce of one array with a compression, beside the one without."""

    def prepare(tensors: Sequence[Array]) -> Callable[[], Any]:
        tensor, how = tensors[0], COMPRESSIONS[compression]
        name = f"{compression}.{tensor.nbytes}"
        return lambda: hvd.allreduce_(tensor, op=hvd.Sum, name=name, compression=how)

    plain = collective("allreduce")
    return [Competitor(NAME, prepare, is_own=True), Competitor("uncompressed", plain.prepare, is_own=True)]


def step() -> Competitor:
    """A training step's communication: all gradients averaged in place, from the last to the first."""
    return Competitor(NAME, lambda tensors: step_of(hvd, tensors), is_own=True)


def step_in_shared_arrays() -> Competitor:
    """The same in arrays that ringtrain has made."""

    def prepare(tensors: Sequence[Array]) -> Callable[[], Any]:
        shared = [hvd.empty(tensor.shape, tensor.dtype) for tensor in tensors]
        for own, tensor in zip(shared, tensors, strict=True):
            own[...] = tensor
        return step_of(hvd, shared, "shared")

    return Competitor("ringtrain.empty", prepare, is_own=True)


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of that name, bfloat16 included."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


# --- what ringtrain and the PyTorch API of Horovod offer under the same names: `api` is one module or the other -------


def collective_of(api: Any, kind: str, tensor: Any) -> Callable[[], Any]:
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


def step_of(api: Any, tensors: Sequence[Any], prefix: str = "gradient") -> Callable[[], Sequence[Any]]:
    """All tensors averaged in place, submitted from the last to the first."""
    backward = [(f"{prefix}{index}", tensor) for index, tensor in reversed(list(enumerate(tensors)))]

    def run() -> Sequence[Any]:
        handles = [api.allreduce_async_(tensor, name=name) for name, tensor in backward]
        for handle in handles:
            api.synchronize(handle)
        return tensors

    return run
