"""The operations as primitives of JAX, each of any number of arrays. Outside of a trace they run at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive

from ringtrain import ops
from ringtrain._core import OpKind, ReduceOp
from ringtrain.compression import Compression, QuantizingCompressor
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


_Start = Callable[[Any, str | None, How, int], Handle[Any]]
_Rows = Callable[[int, How], int]


def _primitive(kind: OpKind, start: _Start, rows: _Rows | None = None) -> Primitive:
    """An operation whose result has the shape of its array, but for the number of rows where that is another one.

    Args:
        start: submits one array, whose place it is told, by its name.
        rows: the rows of the result for those of the array.
    """
    primitive = Primitive(f"ringtrain_{kind.name.lower()}")
    primitive.multiple_results = True

    def carry_out(*arrays: Any, names: Names, how: How) -> list[Any]:
        handles: list[Handle[Any]] = []
        for place, (array, part) in enumerate(zip(arrays, names.parts, strict=True)):
            name = None if names.given is None else names.given + part
            handles.append(start(array, name, how, place))
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


def _allreduce(array: Any, name: str | None, how: How, place: int) -> Handle[Any]:
    factors = (how.prescale, how.postscale)
    return ops.allreduce_async(
        *(array, None, name, how.op, *factors, how.process_set),
        compression=how.quantization or Compression.none,
        priority=how.priorities[place] if how.priorities else 0,
    )


def _reducescatter(array: Any, name: str | None, how: How, place: int) -> Handle[Any]:
    return ops.reducescatter_async(array, name, how.op, how.process_set, how.prescale, how.postscale)


def _allgather(array: Any, name: str | None, how: How, place: int) -> Handle[Any]:
    return ops.allgather_async(array, name, how.process_set)


def _broadcast(array: Any, name: str | None, how: How, place: int) -> Handle[Any]:
    return ops.broadcast_async(array, how.root, name, how.process_set)


def _alltoall(array: Any, name: str | None, how: How, place: int) -> Handle[Any]:
    return ops.alltoall_async(array, list(how.sent), name, how.process_set)


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
