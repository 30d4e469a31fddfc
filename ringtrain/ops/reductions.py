"""allreduce and reducescatter: one value is made of those of all ranks. See `ringtrain.ops`, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from ringtrain._core import OpKind, ReduceOp, run_repeated
from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.compression import AnyCompressor, Compression
from ringtrain.engine.handles import Handle
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.submission import Key, Operation, PreparedAllreduces, Reduction, run_in_place, start
from ringtrain.failure import RepeatedSite
from ringtrain.ops import docstrings

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
Adasum = ReduceOp.Adasum

Array = TypeVar("Array")

_tensors = PreparedAllreduces()
_copies = PreparedAllreduces()  # of tensors that stay as they are, each with the line of its last call
_known = _tensors.known
_site = RepeatedSite()


def allreduce(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
    weight: float | None = None,
) -> Array:
    """Reduce a tensor over the ranks. Mirrors `horovod.allreduce`.

    Args:
        tensor: same shape and dtype on all ranks.
        average: older spelling of `op`: True for Average, False for Sum.
        name: the ranks match operations by it, in any order; operations without a name by their order.
        compression: how it travels, such as Compression.fp16.
        op: Average (the default; not for bool), Sum, Min, Max, Product or Adasum. An average of integers is the sum in
            their dtype, which may wrap around, divided and truncated towards zero. Of complex numbers Average and Sum
            only. On bool Sum and Max are "or", Product and Min are "and". Adasum, for floats only, averages what the
            ranks' tensors have in common and sums what is orthogonal (Maleki et al., arXiv 2006.02924), for any
            number of ranks; each tensor of a group is a vector of its own.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result. Integers are truncated.
        process_set: the ranks that take part, all of which call it.
        priority: operations that are ready at the same time begin in descending order of it.
        weight: how much the tensor of this rank counts in an average of floats, such as its number of samples: the
            result is sum(weight * tensor) / sum(weight) over the ranks. Finite and not negative, and above 0 on some
            rank; given on all ranks or on none. With 0 the tensor is not read, so it may be NaN. A rank that has called
            `join` weighs 0.

    Returns:
        A new array of the same shape and dtype, bit for bit the same on all ranks.

    Raises:
        NotInitializedError: before init().
        ValueError: the name is in flight, this rank is not in the process set, or an argument is out of its range.
        TypeError: an unsupported object or dtype.
        RingtrainError: the ranks disagree (MismatchError), or one of them is lost, fails or does not arrive.

    Examples:
        On two ranks:

        >>> hvd.allreduce(np.full(2, hvd.rank() + 1.0), name="loss")
        array([1.5, 1.5])
        >>> hvd.allreduce(np.full(2, hvd.rank() + 1.0), op=hvd.Sum)
        array([3., 3.])
        >>> hvd.allreduce(np.full(2, hvd.rank() + 1.0), weight=[30, 10][hvd.rank()])  # (30 * 1 + 10 * 2) / 40
        array([1.25, 1.25])
    """
    key = name, op, average, prescale_factor, postscale_factor, compression, process_set, priority
    copied = _copied(tensor, compression)
    if copied is None:
        return start(_operation(tensor, key, weight), is_awaited=True).wait()
    result: Array = _copies.run(copied, key, weight, _site.get())
    return result


def allreduce_async(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: AnyCompressor = Compression.none,
    priority: int = 0,
    weight: float | None = None,
) -> Handle[Array]:
    """As `allreduce`, at once: give the Handle to `synchronize`. Mirrors `horovod.allreduce_async`.

    Examples:
        The ranks compute something else until `synchronize`:

        >>> handle = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="gradient")
        >>> hvd.synchronize(handle) / hvd.size()
        array([1., 1., 1.])
    """
    key = name, op, average, prescale_factor, postscale_factor, compression, process_set, priority
    copied = _copied(tensor, compression)
    if copied is None:
        return start(_operation(tensor, key, weight))
    return _copies.submit(copied, key, weight, _site.get())


def _copied(tensor: Any, compression: AnyCompressor) -> Any:
    """A copy of a small tensor, or None: to work in place there is faster than to leave the tensor as it is."""
    return adapter_for(tensor).copy_of_small(tensor) if compression is Compression.none else None


def _operation(tensor: Any, key: Key, weight: float | None) -> Operation:
    name, op, average, prescale, postscale, compression, process_set, priority = key
    reduction = Reduction.of(op, average, prescale, postscale, compression, weight)
    return Operation(OpKind.ALLREDUCE, [tensor], name, process_set, reduction, priority=priority)


def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: AnyCompressor = Compression.none,
    priority: int = 0,
    weight: float | None = None,
) -> Array:
    """Reduce a tensor over the ranks in place, as `allreduce`. Mirrors `horovod.allreduce_`.

    Args:
        tensor: same shape and dtype on all ranks; gets the result.

    Returns:
        The tensor itself.

    Raises:
        ValueError: the name is in flight, this rank is not in the process set, or the tensor cannot be written to.

    Examples:
        >>> weights = np.full(2, hvd.rank() + 1.0)
        >>> result = hvd.allreduce_(weights)  # on two ranks
        >>> result is weights, weights.tolist()
        (True, [1.5, 1.5])
    """
    site = _site.get() if name is None else None
    is_usual = type(tensor) is np.ndarray  # then this is _tensors.run() without its calls
    again: Any = is_usual and run_repeated(
        _known,
        tensor,
        weight,
        name,
        op,
        average,
        prescale_factor,
        postscale_factor,
        compression,
        process_set,
        priority,
        site,
    )
    if again is tensor:
        return tensor
    key = name, op, average, prescale_factor, postscale_factor, compression, process_set, priority
    if is_usual:
        return _tensors.result_of(again, tensor, key, weight, site)
    return run_in_place(_tensors, tensor, key, weight, site)


def allreduce_async_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: AnyCompressor = Compression.none,
    priority: int = 0,
    weight: float | None = None,
) -> Handle[Array]:
    """As `allreduce_`, at once: give the Handle to `synchronize`. Mirrors `horovod.allreduce_async_`."""
    key = name, op, average, prescale_factor, postscale_factor, compression, process_set, priority
    handle: Any = _tensors.submit(tensor, key, weight, _site.get() if name is None else None)
    if type(tensor) is not np.ndarray:
        adapter_for(tensor).note_change(tensor)
    return handle


def grouped_allreduce(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
    weight: float | None = None,
) -> list[Array]:
    """Reduce a list of tensors as one operation, each as `allreduce`. Mirrors `horovod.grouped_allreduce`.

    Args:
        tensors: at least one; each has the same shape and dtype on all ranks.

    Returns:
        New arrays of the same shapes and dtypes, bit for bit the same on all ranks.

    Raises:
        ValueError: the name is in flight, this rank is not in the process set, or the list is empty.

    Examples:
        >>> sums = hvd.grouped_allreduce([np.ones(2), np.ones((1, 3))], op=hvd.Sum, name="both")  # on two ranks
        >>> [array.tolist() for array in sums]
        [[2.0, 2.0], [[2.0, 2.0, 2.0]]]
    """
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, compression, weight)
    operation = Operation(OpKind.ALLREDUCE, tensors, name, process_set, reduction, priority=priority, is_group=True)
    return start(operation, is_awaited=True).wait()


def grouped_allreduce_async(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: AnyCompressor = Compression.none,
    priority: int = 0,
    weight: float | None = None,
) -> Handle[list[Array]]:
    """As `grouped_allreduce`, at once. Mirrors `horovod.grouped_allreduce_async`."""
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, compression, weight)
    return start(Operation(OpKind.ALLREDUCE, tensors, name, process_set, reduction, priority=priority, is_group=True))


def grouped_allreduce_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: AnyCompressor = Compression.none,
    priority: int = 0,
    weight: float | None = None,
) -> list[Array]:
    """Reduce a list of tensors in place, as `grouped_allreduce`. Mirrors `horovod.grouped_allreduce_`.

    Args:
        tensors: at least one; each has the same shape and dtype on all ranks, and gets its result.

    Returns:
        The tensors themselves.
    """
    how = (op, average, prescale_factor, postscale_factor, compression, weight)
    return _start_group_in_place(tensors, name, Reduction.of(*how), process_set, priority, True).wait()


def grouped_allreduce_async_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: AnyCompressor = Compression.none,
    priority: int = 0,
    weight: float | None = None,
) -> Handle[list[Array]]:
    """As `grouped_allreduce_`, at once. Mirrors `horovod.grouped_allreduce_async_`."""
    how = (op, average, prescale_factor, postscale_factor, compression, weight)
    return _start_group_in_place(tensors, name, Reduction.of(*how), process_set, priority, False)


def _start_group_in_place(
    tensors: Sequence[Array],
    name: str | None,
    reduction: Reduction,
    process_set: ProcessSet,
    priority: int,
    is_awaited: bool,
) -> Handle[list[Array]]:
    handle: Handle[list[Array]] = start(
        Operation(
            OpKind.ALLREDUCE, tensors, name, process_set, reduction, priority=priority, is_group=True, in_place=True
        ),
        is_awaited,
    )
    for tensor in tensors:
        adapter_for(tensor).note_change(tensor)
    return handle


# ------------------------------------------------------------------------------------------------------ reducescatter


def reducescatter(
    tensor: Array,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    weight: float | None = None,
) -> Array:
    """Reduce a tensor over the ranks and give each some of its rows. Mirrors `horovod.reducescatter`.

    Args:
        tensor: same shape and dtype on all ranks, at least 1-d. Its first dimension is split as evenly as possible; the
            first ranks get one row more.
        name: the ranks match operations by it, in any order; operations without a name by their order.
        compression: how it travels, such as Compression.fp16.
        op: as for `allreduce`, but without Adasum.
        process_set: the ranks that take part, all of which call it.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result. Integers are truncated.
        weight: of this rank in an average of floats, such as its number of samples, as for `allreduce`.

    Returns:
        A new array of the rows of this rank, with the other dimensions and the dtype of `tensor`.

    Raises:
        NotInitializedError: before init().
        ValueError: the name is in flight, this rank is not in the process set, or an argument is out of its range.
        TypeError: an unsupported object or dtype.
        RingtrainError: the ranks disagree (MismatchError), or one of them is lost, fails or does not arrive.

    Examples:
        On two ranks, rank 0 gets the first two of four rows, rank 1 the others:

        >>> rows = hvd.reducescatter(np.arange(4.0), op=hvd.Sum)
        >>> rows.tolist() == ([0, 2] if hvd.rank() == 0 else [4, 6])
        True
    """
    reduction = _scattered_by(op, prescale_factor, postscale_factor, compression, weight)
    operation = Operation(OpKind.REDUCESCATTER, [tensor], name, process_set, reduction)
    return start(operation, is_awaited=True).wait()


def reducescatter_async(
    tensor: Array,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: AnyCompressor = Compression.none,
    weight: float | None = None,
) -> Handle[Array]:
    """As `reducescatter`, at once: give the Handle to `synchronize`. Mirrors `horovod.reducescatter_async`."""
    reduction = _scattered_by(op, prescale_factor, postscale_factor, compression, weight)
    return start(Operation(OpKind.REDUCESCATTER, [tensor], name, process_set, reduction))


def grouped_reducescatter(
    tensors: Sequence[Array],
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    weight: float | None = None,
) -> list[Array]:
    """Reduce a list of tensors as one operation, each as `reducescatter`. Mirrors `horovod.grouped_reducescatter`.

    Args:
        tensors: at least one, each as for `reducescatter`.

    Returns:
        New arrays: of each tensor the rows of this rank.
    """
    reduction = _scattered_by(op, prescale_factor, postscale_factor, compression, weight)
    operation = Operation(OpKind.REDUCESCATTER, tensors, name, process_set, reduction, is_group=True)
    return start(operation, is_awaited=True).wait()


def grouped_reducescatter_async(
    tensors: Sequence[Array],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: AnyCompressor = Compression.none,
    weight: float | None = None,
) -> Handle[list[Array]]:
    """As `grouped_reducescatter`, at once. Mirrors `horovod.grouped_reducescatter_async`."""
    reduction = _scattered_by(op, prescale_factor, postscale_factor, compression, weight)
    return start(Operation(OpKind.REDUCESCATTER, tensors, name, process_set, reduction, is_group=True))


def _scattered_by(
    op: ReduceOp, prescale_factor: float, postscale_factor: float, compression: AnyCompressor, weight: Any
) -> Reduction:
    return Reduction.of(op, None, prescale_factor, postscale_factor, compression, weight, "reducescatter")


docstrings.complete(globals(), globals())
