"""The operations as primitives of JAX, each of any number of arrays. Outside of a trace they run at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive

from ringtrain import ops
from ringtrain._core import OpKind, ReduceOp
from ringtrain.compression import Compression, QuantizingCompressor
from ringtrain.engine.submission import Operation, Reduction, start
from ringtrain.errors import NonFiniteError
from ringtrain.handles import Handle
from ringtrain.objects import part_of
from ringtrain.process_sets import ProcessSet


class Names(NamedTuple):
    """What the ranks match the arrays by: `given`, or where the script calls the operation, and a part for each."""

    given: str | None
    place: str
    parts: tuple[str, ...]

    def of_gradients(self, places: Sequence[int] | None = None) -> Names:
        """Those of the gradients, or of some of them."""
        parts = self.parts if places is None else tuple(self.parts[place] for place in places)
        return Names(part_of(self.given, "gradient"), self.place, parts)


class How(NamedTuple):
    """What all arrays of an operation have in common, but for their priorities."""

    process_set: ProcessSet
    op: ReduceOp = ReduceOp.Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    priorities: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()  # alltoall: the rows for each rank, and from each
    received: tuple[int, ...] = ()
    quantization: QuantizingCompressor | None = None

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

    def of(self, places: Sequence[int]) -> How:
        """For some of the arrays."""
        return self._replace(priorities=tuple(self.priorities[place] for place in places) if self.priorities else ())


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

    def carry_out(*arrays: Any, names: Names, how: How) -> list[Any]:
        handles: list[Handle[Any]] = []
        for place, (array, part) in enumerate(zip(arrays, names.parts, strict=True)):
            name = None if names.given is None else names.given + part
            is_last = place == len(arrays) - 1
            handles.append(start(operation_of(array, name, how, place), is_awaited=is_last))
        # With splits the result of an alltoall is a pair.
        return [one[0] if isinstance(one, tuple) else one for one in wait_for(handles)]

    def abstract(*arrays: Any, names: Names, how: How) -> list[Any]:
        if rows is None:
            return [jax.core.ShapedArray(array.shape, array.dtype) for array in arrays]
        return [jax.core.ShapedArray((rows(array.shape[0], how), *array.shape[1:]), array.dtype) for array in arrays]

    primitive.def_impl(carry_out)
    primitive.def_abstract_eval(abstract)
    return primitive


def wait_for(handles: Sequence[Handle[Any]]) -> list[Any]:
    """The results of all. Raises the first error, after all have ended, so that their names are free again."""
    results, first_error = [], None
    for handle in handles:
        try:
            results.append(handle.wait())
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
    return results


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
    return [jax.core.ShapedArray(array.shape, array.dtype) for array in arrays]


# An array, once it is certain that no rank has found NaN or infinity: see `lowering.require_finite`.
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
    return jax.core.ShapedArray(array.shape, array.dtype)
