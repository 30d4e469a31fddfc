"""Gradients on their way: each by itself, in groups, in fewer bits, or as rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ringtrain import ops
from ringtrain._core import OpKind
from ringtrain.compression import AnyCompressor, Compression, QuantizingCompressor
from ringtrain.handles import synchronize
from ringtrain.mxnet.engine import averaging, push, raise_failure, takes
from ringtrain.mxnet.sparse import average_rows
from ringtrain.process_sets import ProcessSet, global_process_set
from ringtrain.training.optimizer import split_evenly


class Gradient(NamedTuple):
    """`array` is on this rank, and becomes the average."""

    name: str
    array: Any
    priority: int


class Averaging:
    """How the gradients of one optimizer become averages over the ranks, in place.

    Args:
        gradient_predivide_factor: f divides by f before the sum and multiplies by f / size after it.
        num_groups: reduce in that many groups, each all at once; 0 leaves that to the core.
        compression: how gradients travel, such as Compression.fp16.
        sparse_as_dense: reduce row_sparse gradients as dense ones.
        process_set: the ranks that take part; the others keep their own gradients.

    Raises:
        ValueError: a factor that is not positive, or a negative number of groups.
    """

    def __init__(
        self,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        compression: AnyCompressor = Compression.none,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if num_groups < 0:
            raise ValueError(f"num_groups must not be negative, but is {num_groups}")
        self._reduction = averaging(gradient_predivide_factor)
        self._num_groups = num_groups
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set

    def average(self, gradients: Sequence[Gradient]) -> None:
        """Begin it for all of a step; whoever reads a gradient waits.

        Raises RingtrainError where the engine has ended, as when another rank is lost.
        """
        raise_failure()
        if not self._process_set.included() or self._process_set.size() == 1:
            return
        dense = [one for one in gradients if one.array.stype == "default"]
        rows = [one for one in gradients if one.array.stype != "default"]
        if isinstance(self._compression, QuantizingCompressor) or not takes([one.array for one in dense]):
            self._wait_for_all(dense)
        elif self._num_groups:
            for group in _groups_of(dense, self._num_groups):
                self._push(f"{group[0].name}:{group[-1].name}", group)
        else:
            for one in dense:
                self._push(one.name, [one])
        for one in rows:
            self._average_rows(one)

    def _push(self, name: str, group: Sequence[Gradient]) -> None:
        sent = [self._compression.compress(one.array) for one in group]
        priority = max(one.priority for one in group)
        arrays = [array for array, _ in sent]
        push(OpKind.ALLREDUCE, (), arrays, name, self._process_set, priority, self._reduction)
        for one, (array, context) in zip(group, sent, strict=True):
            if array is not one.array:
                self._compression.decompress(array, context).copyto(one.array)

    def _wait_for_all(self, gradients: Sequence[Gradient]) -> None:
        how = self._reduction
        handles = [
            ops.allreduce_async_(
                *(one.array, None, one.name, how.op, how.prescale, how.postscale, self._process_set),
                compression=self._compression,
                priority=one.priority,
            )
            for one in gradients
        ]
        for handle in handles:
            synchronize(handle)

    def _average_rows(self, one: Gradient) -> None:
        if not self._sparse_as_dense:
            average_rows(one.array, one.name, self._process_set)
            return
        dense = one.array.tostype("default")
        self._push(one.name, [one._replace(array=dense)])
        dense.tostype(one.array.stype).copyto(one.array)


def _groups_of(gradients: Sequence[Gradient], count: int) -> Iterator[list[Gradient]]:
    """As many as are wanted, with one dtype each, so that what is alike is joined."""
    for part in split_evenly(gradients, count):
        by_dtype: dict[Any, list[Gradient]] = {}
        for one in part:
            by_dtype.setdefault(one.array.dtype, []).append(one)
        yield from by_dtype.values()
