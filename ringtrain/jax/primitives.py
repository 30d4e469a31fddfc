"""The operations as primitives of JAX, each of any number of arrays, and their rules under grad and vmap.

Outside of a trace they run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

import ringtrain._core as _core
from ringtrain import ops
from ringtrain._core import OpKind, ReduceOp
from ringtrain.engine.compression import Compression, QuantizingCompressor
from ringtrain.engine.handles import Handle, wait_for_all
from ringtrain.engine.process_sets import ProcessSet
from ringtrain.engine.requirements import require_weight
from ringtrain.engine.submission import Operation, Reduction, start
from ringtrain.errors import NonFiniteError
from ringtrain.ops.objects import part_of


class Names(NamedTuple):
    """The names by which ranks match the arrays: `given`, or the place of the call, and a part for each."""

    given: str | None
    place: str
    parts: tuple[str, ...]

    def of_gradients(self, places: Sequence[int] | None = None) -> Names:
        """Returns the names of the gradients, or of some of them."""
        parts = self.parts if places is None else tuple(self.parts[place] for place in places)
        return Names(part_of(self.given, "gradient"), self.place, parts)


class How(NamedTuple):
    """The arguments that all arrays of an operation share, except their priorities."""

    process_set: ProcessSet
    op: ReduceOp = ReduceOp.Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    priorities: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()  # alltoall: the rows for each rank, and from each
    received: tuple[int, ...] = ()
    quantization: QuantizingCompressor | None = None
    is_weighted: bool = False  # of an average: after the arrays comes the weight of this rank, one float

    @property
    def size(self) -> int:
        return self.process_set.size() or 1

    @property
    def is_alone(self) -> bool:
        """Whether the result is what was given, since there is no other rank."""
        return self.size == 1 and self.prescale * self.postscale == 1 and self.quantization is None

    def of_gradients(self) -> How:
        """Whose codes would say little: they are not those of the values."""
        return self._replace(quantization=None)

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The arrays, and the weight or nothing."""
        count = len(operands) - self.is_weighted
        return list(operands[:count]), list(operands[count:])

    def of(self, places: Sequence[int]) -> How:
        """For some of the arrays."""
        return self._replace(priorities=tuple(self.priorities[place] for place in places) if self.priorities else ())


# Called whenever an operation becomes part of a program.
at_trace: list[Callable[[], None]] = []

_OperationOf = Callable[[Any, str | None, How, int], Operation]
_Rows = Callable[[int, How], int]


def _primitive(kind: OpKind, operation_of: _OperationOf, rows: _Rows | None = None) -> Primitive:
    """An operation whose result has the shape of its array, but for the number of rows where that is another one.

    Args:
        operation_of: makes the operation of one array, by its name and its place among the arrays.
        rows: the rows of the result for those of the array.
    """
    primitive = Primitive(f"ringtrain_{kind.name.lower()}")
    primitive.multiple_results = True

    def carry_out(*operands: Any, names: Names, how: How) -> list[Any]:
        arrays, weight = how.split(operands)
        handles: list[Handle[Any]] = []
        for place, (array, part) in enumerate(zip(arrays, names.parts, strict=True)):
            name = None if names.given is None else names.given + part
            operation = operation_of(array, name, how, place)
            if weight:
                checked = require_weight(weight[0], how.op, operation.title)
                operation = operation._replace(reduction=operation.reduction._replace(weight=checked))
            is_last = place == len(arrays) - 1
            handles.append(start(operation, is_awaited=is_last))
        # With splits the result of an alltoall is a pair.
        return [one[0] if isinstance(one, tuple) else one for one in wait_for_all(handles)]

    def abstract(*operands: Any, names: Names, how: How) -> list[Any]:
        _note_trace()
        arrays, _ = how.split(operands)
        if rows is None:
            return [_like(array) for array in arrays]
        return [jax.core.ShapedArray((rows(array.shape[0], how), *array.shape[1:]), array.dtype) for array in arrays]

    primitive.def_impl(carry_out)
    primitive.def_abstract_eval(abstract)
    return primitive


def _note_trace() -> None:
    for function in at_trace:
        function()


def _like(array: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray(array.shape, array.dtype)


def _reduction(how: How) -> Reduction:
    return Reduction(how.op, how.prescale, how.postscale, how.quantization or Compression.none)


def _allreduce(array: Any, name: str | None, how: How, place: int) -> Operation:
    priority = how.priorities[place] if how.priorities else 0
    return Operation(OpKind.ALLREDUCE, [array], name, how.process_set, _reduction(how), priority=priority)


def _reducescatter(array: Any, name: str | None, how: How, place: int) -> Operation:
    return Operation(OpKind.REDUCESCATTER, [array], name, how.process_set, _reduction(how))


def _allgather(array: Any, name: str | None, how: How, place: int) -> Operation:
    return Operation(OpKind.ALLGATHER, [array], name, how.process_set)


def _broadcast(array: Any, name: str | None, how: How, place: int) -> Operation:
    return Operation(OpKind.BROADCAST, [array], name, how.process_set, root=how.root)


def _alltoall(array: Any, name: str | None, how: How, place: int) -> Operation:
    return Operation(OpKind.ALLTOALL, [array], name, how.process_set, splits=[list(how.sent)])


allreduce_p = _primitive(OpKind.ALLREDUCE, _allreduce)
broadcast_p = _primitive(OpKind.BROADCAST, _broadcast)
allgather_p = _primitive(OpKind.ALLGATHER, _allgather, lambda rows, how: rows * how.size)
reducescatter_p = _primitive(OpKind.REDUCESCATTER, _reducescatter, lambda rows, how: rows // how.size)
alltoall_p = _primitive(OpKind.ALLTOALL, _alltoall, lambda rows, how: sum(how.received))
KINDS = {
    allreduce_p: OpKind.ALLREDUCE,
    broadcast_p: OpKind.BROADCAST,
    allgather_p: OpKind.ALLGATHER,
    reducescatter_p: OpKind.REDUCESCATTER,
    alltoall_p: OpKind.ALLTOALL,
}

# Arrays, once all ranks have come so far.
barrier_p = Primitive("ringtrain_barrier")
barrier_p.multiple_results = True


@barrier_p.def_impl
def _barrier(*arrays: Any, names: Names, how: How) -> list[Any]:
    jax.block_until_ready(arrays)
    ops.barrier(how.process_set)
    return list(arrays)


@barrier_p.def_abstract_eval
def _abstract_barrier(*arrays: Any, names: Names, how: How) -> list[Any]:
    _note_trace()
    return [_like(array) for array in arrays]


# An array, once it is certain that no rank has found NaN or infinity: see `_lower_require_finite` in lowering.py.
require_finite_p = Primitive("ringtrain_require_finite")


@require_finite_p.def_impl
def _require_finite(array: Any, flags: Any, *, names: tuple[str, ...], ranks: tuple[int, ...]) -> Any:
    for flag, name in zip(flags.tolist(), names, strict=True):
        if flag:
            raise NonFiniteError(
                f'the gradient of "{name}" is NaN or infinite on rank {ranks[len(ranks) - flag]}; no rank has updated '
                "its parameters with it"
            )
    return array


@require_finite_p.def_abstract_eval
def _abstract_require_finite(array: Any, flags: Any, *, names: tuple[str, ...], ranks: tuple[int, ...]) -> Any:
    return _like(array)


# An array; says once, on a rank of the world, which of the named arrays are flagged: see `replicas.compared`.
report_differences_p = Primitive("ringtrain_report_differences")


@report_differences_p.def_impl
def _report_differences(array: Any, flags: Any, *, names: tuple[str, ...], before: str, after: str, rank: int) -> Any:
    if np.any(flags):
        _core.report_differences(np.asarray(flags).tolist(), list(names), before, after, rank)
    return array


@report_differences_p.def_abstract_eval
def _abstract_report_differences(array: Any, flags: Any, **how: Any) -> Any:
    return _like(array)


# Arrays that all ranks have: their gradients are averaged. A function of one rank is differentiated by them.
replicated_p = Primitive("ringtrain_replicated")
replicated_p.multiple_results = True
replicated_p.def_impl(lambda *arrays, names, how: list(arrays))
replicated_p.def_abstract_eval(lambda *arrays, names, how: [_like(array) for array in arrays])


# ----------------------------------------------------------------------------------------------------------- under grad
# Derivatives follow Horovod's convention, as those of ringtrain.torch do. Where an operation hands a value to all
# ranks, its gradient is averaged over them, so the losses of the ranks count as one loss that is their average.
# Derivatives go through the same operations, so they can be differentiated again.

_LINEAR = (ReduceOp.Sum, ReduceOp.Average)
_Transpose = Callable[[Sequence[Any], Sequence[Any], Names, How], Sequence[Any]]


def register() -> None:
    _register_derivatives()
    _register_batchers()


def _register_derivatives() -> None:
    transposes: dict[Primitive, _Transpose] = {
        allreduce_p: _of_allreduce,
        broadcast_p: _of_broadcast,
        allgather_p: _of_allgather,
        reducescatter_p: _of_reducescatter,
        alltoall_p: _of_alltoall,
        barrier_p: _of_barrier,
        replicated_p: _of_replicated,
    }
    for primitive, transpose in transposes.items():
        ad.primitive_jvps[primitive] = _jvp_of(primitive)
        ad.primitive_transposes[primitive] = _transpose_of(transpose)
    ad.primitive_jvps[report_differences_p] = _jvp_of_report


def _jvp_of(primitive: Primitive) -> Callable[..., Any]:
    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, names: Names, how: How) -> Any:
        results = primitive.bind(*primals, names=names, how=how)
        _, weight = how.split(primals)
        tangents, _ = how.split(tangents)  # a weight is a constant
        live = [place for place, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
        of_results: list[Any] = [
            ad.Zero(jax.core.ShapedArray(result.shape, _dtype_of(tangent))) if type(tangent) is ad.Zero else None
            for result, tangent in zip(results, tangents, strict=True)
        ]
        if live:
            _require_linear(primitive, how)
            sent = [tangents[place] for place in live]
            how_live = how.of_gradients().of(live)
            derivatives = primitive.bind(*sent, *weight, names=names.of_gradients(live), how=how_live)
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
        _, weight = how.split(arrays)
        gradients = transpose(whole, weight, names.of_gradients(), how.of_gradients())
        return [*gradients, *(None for _ in weight)]

    return backward


def _of_allreduce(cotangents: Sequence[Any], weight: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    if not weight:
        return list(allreduce_p.bind(*cotangents, names=names, how=how))
    # Their sums, times the share of this rank in the weights.
    sums = allreduce_p.bind(*cotangents, names=names, how=how._replace(op=ReduceOp.Sum, is_weighted=False))
    share = _share_of(weight[0], names, how)
    return [one * share.astype(one.dtype) for one in sums]


def _share_of(weight: Any, names: Names, how: How) -> Any:
    """The weight of this rank by those of all ranks."""
    sum_of = How(how.process_set, ReduceOp.Sum)
    (total,) = allreduce_p.bind(weight, names=names._replace(parts=(".weight",)), how=sum_of)
    return weight / total


def _of_broadcast(cotangents: Sequence[Any], _: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    averages = allreduce_p.bind(*cotangents, names=names, how=_averaging(how))
    is_root = (how.process_set.ranks or []).index(how.root) == how.process_set.rank()
    # A choice that JAX does not see through: it would leave the operation out on the other ranks.
    return [jnp.where(jnp.full((), is_root), average, jnp.zeros_like(average)) for average in averages]


def _of_allgather(cotangents: Sequence[Any], _: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    return list(reducescatter_p.bind(*cotangents, names=names, how=_averaging(how)))


def _of_reducescatter(cotangents: Sequence[Any], weight: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    factor: Any = how.prescale * how.postscale * (how.size if how.op == ReduceOp.Sum or weight else 1)
    gathered = allgather_p.bind(*cotangents, names=names, how=how._replace(op=ReduceOp.Sum, is_weighted=False))
    if weight:
        factor = factor * _share_of(weight[0], names, how)
    return [one * jnp.asarray(factor, one.dtype) for one in gathered]


def _of_alltoall(cotangents: Sequence[Any], _: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    back = how._replace(sent=how.received, received=how.sent)
    return list(alltoall_p.bind(*cotangents, names=names, how=back))


def _of_barrier(cotangents: Sequence[Any], _: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    """Work after a barrier forwards is before it backwards."""
    return list(barrier_p.bind(*cotangents, names=names, how=how))


def _of_replicated(cotangents: Sequence[Any], _: Sequence[Any], names: Names, how: How) -> Sequence[Any]:
    return list(allreduce_p.bind(*cotangents, names=names, how=_averaging(how)))


def _jvp_of_report(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> Any:
    return report_differences_p.bind(*primals, **how), tangents[0]


def _averaging(how: How) -> How:
    return how._replace(op=ReduceOp.Average, prescale=1.0, postscale=1.0)


# ----------------------------------------------------------------------------------------------------------- under vmap
# One operation of all that is batched, as long as its rows stay the first dimension.

_Dimensions = Sequence[Any]  # of each array where its batch is, or None


def _register_batchers() -> None:
    for primitive in (allreduce_p, broadcast_p, barrier_p, replicated_p):
        batching.primitive_batchers[primitive] = _elementwise(primitive)
    for primitive in (allgather_p, reducescatter_p, alltoall_p):
        batching.primitive_batchers[primitive] = _by_rows(primitive)
    batching.primitive_batchers[report_differences_p] = _batch_of_report


def _elementwise(primitive: Primitive) -> Callable[..., Any]:
    def batch(operands: Sequence[Any], dimensions: _Dimensions, *, names: Names, how: How) -> Any:
        if how.op == ReduceOp.Adasum:
            raise TypeError("an allreduce with op=Adasum takes each array as a whole, so it cannot be under vmap")
        of_arrays = _of_arrays(dimensions, how)
        return primitive.bind(*operands, names=names, how=how), of_arrays

    return batch


def _of_arrays(dimensions: _Dimensions, how: How) -> list[Any]:
    """Returns the dimensions of the arrays. Raises TypeError for a weight that differs within the batch."""
    of_arrays, of_weight = how.split(dimensions)
    if any(dimension is not None for dimension in of_weight):
        raise TypeError("a weight under vmap is the same for the whole batch; make it outside of the vmap")
    return of_arrays


def _by_rows(primitive: Primitive) -> Callable[..., Any]:
    def batch(operands: Sequence[Any], dimensions: _Dimensions, *, names: Names, how: How) -> Any:
        arrays, weight = how.split(operands)
        of_arrays = _of_arrays(dimensions, how)
        behind = [
            array if dimension is None else jnp.moveaxis(array, dimension, 1)
            for array, dimension in zip(arrays, of_arrays, strict=True)
        ]
        moved = [None if dimension is None else 1 for dimension in of_arrays]
        return primitive.bind(*behind, *weight, names=names, how=how), moved

    return batch


def _batch_of_report(operands: Sequence[Any], dimensions: _Dimensions, **how: Any) -> Any:
    array, flags = operands
    if dimensions[1] is not None:
        flags = flags.max(dimensions[1])
    return report_differences_p.bind(array, flags, **how), dimensions[0]
