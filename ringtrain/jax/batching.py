"""The operations under vmap: one operation of all that is batched, as long as its rows stay the first dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from ringtrain._core import ReduceOp
from ringtrain.jax.primitives import (
    How,
    Names,
    allgather_p,
    allreduce_p,
    alltoall_p,
    barrier_p,
    broadcast_p,
    reducescatter_p,
)

_Dimensions = Sequence[Any]  # of each array where its batch is, or None


def register() -> None:
    for primitive in (allreduce_p, broadcast_p, barrier_p):
        batching.primitive_batchers[primitive] = _elementwise(primitive)
    for primitive in (allgather_p, reducescatter_p, alltoall_p):
        batching.primitive_batchers[primitive] = _by_rows(primitive)


def _elementwise(primitive: Primitive) -> Callable[..., Any]:
    def batch(arrays: Sequence[Any], dimensions: _Dimensions, *, names: Names, how: How) -> Any:
        if how.op == ReduceOp.Adasum:
            raise TypeError("an allreduce with op=Adasum takes each array as a whole, so it cannot be under vmap")
        return primitive.bind(*arrays, names=names, how=how), dimensions

    return batch


def _by_rows(primitive: Primitive) -> Callable[..., Any]:
    def batch(arrays: Sequence[Any], dimensions: _Dimensions, *, names: Names, how: How) -> Any:
        behind = [
            array if dimension is None else jnp.moveaxis(array, dimension, 1)
            for array, dimension in zip(arrays, dimensions, strict=True)
        ]
        moved = [None if dimension is None else 1 for dimension in dimensions]
        return primitive.bind(*behind, names=names, how=how), moved

    return batch
