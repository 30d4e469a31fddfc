"""Derivatives of the operations: by the convention of Horovod, as those of ringtrain.torch.

Where an operation hands a value to all ranks its gradient is averaged over them, so the losses of the ranks count as
one loss that is their average. Derivatives go through the same operations, so they can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

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

_LINEAR = (ReduceOp.Sum, ReduceOp.Average)
_Transpose = Callable[[Sequence[Any], Names, How], Sequence[Any]]


def register() -> None:
    transposes: dict[Primitive, _Transpose] = {
        allreduce_p: _of_allreduce,
        broadcast_p: _of_broadcast,
        allgather_p: _of_allgather,
        reducescatter_p: _of_reducescatter,
        alltoall_p: _of_alltoall,
        barrier_p: _of_barrier,
    }
    for primitive, transpose in transposes.items():
        ad.primitive_jvps[primitive] = _jvp_of(primitive)
        ad.primitive_transposes[primitive] = _transpose_of(transpose)


def _jvp_of(primitive: Primitive) -> Callable[..., Any]:
    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, names: Names, how: How) -> Any:
        results = primitive.bind(*primals, names=names, how=how)
        live = [place for place, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
        of_results: list[Any] = [
            ad.Zero(jax.core.ShapedArray(result.shape, _dtype_of(tangent))) if type(tangent) is ad.Zero else None
            for result, tangent in zip(results, tangents, strict=True)
        ]
        if live:
            _require_linear(primitive, how)
            sent = [tangents[place] for place in live]
            derivatives = primitive.bind(*sent, names=names.of_gradients(live), how=how.of_gradients().of(live))
            for place, derivative in zip(live, derivatives, strict=True):
                of_results[place] = derivative
        return results, of_results

    return jvp


def _dtype_of(tangent: Any) -> Any:
    return tangent.aval.dtype


def _require_linear(primitive: Primitive, how: How) -> None:
    if how.op not in _LINEAR:
        name = primitive.name.removeprefix("ringtrain_")
        raise TypeError(f"{name} with op={how.op.name} has no gradient; use jax.lax.stop_gradient on what it takes")


def _transpose_of(transpose: _Transpose) -> Callable[..., Any]:
    def backward(cotangents: Sequence[Any], *arrays: Any, names: Names, how: How) -> Any:
        # All of them on all ranks: one that was zero on this rank alone would be missing on the others.
        whole = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
        return transpose(whole, names.of_gradients(), how.of_gradients())

    return backward


def _of_allreduce(cotangents: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    return list(allreduce_p.bind(*cotangents, names=names, how=how))


def _of_broadcast(cotangents: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    averages = allreduce_p.bind(*cotangents, names=names, how=_averaging(how))
    is_root = (how.process_set.ranks or []).index(how.root) == how.process_set.rank()
    # A choice that JAX does not see through: it would leave the operation out on the other ranks.
    return [jnp.where(jnp.full((), is_root), average, jnp.zeros_like(average)) for average in averages]


def _of_allgather(cotangents: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    return list(reducescatter_p.bind(*cotangents, names=names, how=_averaging(how)))


def _of_reducescatter(cotangents: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    factor = how.prescale * how.postscale * (how.size if how.op == ReduceOp.Sum else 1)
    scaled = [cotangent * jnp.asarray(factor, cotangent.dtype) for cotangent in cotangents]
    return list(allgather_p.bind(*scaled, names=names, how=how._replace(op=ReduceOp.Sum)))


def _of_alltoall(cotangents: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    back = how._replace(sent=how.received, received=how.sent)
    return list(alltoall_p.bind(*cotangents, names=names, how=back))


def _of_barrier(cotangents: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    """What comes after a barrier forwards comes before it backwards."""
    return list(barrier_p.bind(*cotangents, names=names, how=how))


def _averaging(how: How) -> How:
    return how._replace(op=ReduceOp.Average, prescale=1.0, postscale=1.0)
