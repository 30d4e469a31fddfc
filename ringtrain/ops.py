"""Every operation over several ranks, once, for any array.

The names, arguments and results are those of Horovod 0.28. Common to all:

- `tensor`: a dense array of any shape, or a number; `tensors`: a list of them, which are carried out together or not
  at all. dtypes: bool, (u)int8, (u)int16, int32, int64, float16, bfloat16, float32, float64, complex64, complex128;
  sums of 16-bit floats are made in float32. Complex numbers travel as pairs of real ones, along a last dimension of 2
  that errors show. An array that is not contiguous is copied on its way.
- `name`: ranks are matched by it, in any order of submission. Operations without a name are matched by their order
  within their process set.
- `process_set`: the ranks that take part; all of them call the operation.
- `..._async` returns a Handle at once, to be given to `synchronize`; the arrays must not be changed until then. `..._`
  writes the result over the input.
- Raised by the call: NotInitializedError; ValueError for a name that is in flight, a process set without this rank, and
  bad arguments; TypeError for an unsupported object or dtype. Raised when waiting: MismatchError if the ranks disagree,
  PeerLostError, RemoteError, StalledError, ShutDownError.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from ringtrain._core import OpKind, ReduceOp
from ringtrain.compression import Compression, Compressor
from ringtrain.engine.submission import Operation, Reduction, start, start_in_place
from ringtrain.handles import Handle
from ringtrain.handles import poll as poll
from ringtrain.handles import synchronize as synchronize
from ringtrain.process_sets import ProcessSet, global_process_set

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
Adasum = ReduceOp.Adasum

P = ParamSpec("P")
R = TypeVar("R")


def _starting(describe: Callable[P, Operation]) -> Callable[P, Handle]:
    """The form of an operation that returns at once, from the function that describes it."""

    def start_async(*args: P.args, **kwargs: P.kwargs) -> Handle:
        return start(describe(*args, **kwargs))

    return _dressed(start_async, describe, "Handle")


def _blocking(start_async: Callable[P, Handle]) -> Callable[P, Any]:
    """The form that waits for its result, of what `_starting` has made."""
    describe: Callable[P, Operation] = inspect.unwrap(start_async)

    def blocking(*args: P.args, **kwargs: P.kwargs) -> Any:
        return start(describe(*args, **kwargs), is_awaited=True).wait()

    _dressed(blocking, describe, "Any")
    blocking.__name__ = blocking.__qualname__ = describe.__name__.replace("_async", "")
    blocking.__doc__ = f"As `{describe.__name__}`, and waits for the result, which it returns."
    return blocking


def _dressed(form: Callable[P, R], describe: Callable[P, Operation], result: str) -> Callable[P, R]:
    """With the name, the docstring and the arguments of `describe`."""
    functools.update_wrapper(form, describe)
    form.__signature__ = inspect.signature(describe).replace(return_annotation=result)  # type: ignore[attr-defined]
    return form


# ---------------------------------------------------------------------------------------------------------- allreduce


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> Any:
    """Reduce a tensor over the ranks. Mirrors `horovod.allreduce`.

    Args:
        tensor: same shape and dtype on all ranks.
        average: older spelling of `op`: True for Average, False for Sum.
        compression: how it travels, such as Compression.fp16.
        op: Average (the default; not for bool), Sum, Min, Max, Product or Adasum. An average of integers is the sum in
            their dtype, which may wrap around, divided and truncated towards zero. Of complex numbers Average and Sum
            only. On bool Sum and Max are "or", Product and Min are "and". Adasum, for floats only, averages what the
            ranks' tensors have in common and sums what is orthogonal (Maleki et al., arXiv 2006.02924), for any
            number of ranks; each tensor of a group is a vector of its own.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result. Integers are truncated.
        priority: what is ready at the same time is done in descending order of it.

    Returns:
        A new array of the same shape and dtype, bit for bit the same on all ranks.
    """
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, compression)
    operation = Operation(OpKind.ALLREDUCE, [tensor], name, process_set, reduction, priority=priority)
    return start(operation, is_awaited=True).wait()


@_starting
def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: type[Compressor] = Compression.none,
    priority: int = 0,
) -> Operation:
    """As `allreduce`, at once. Mirrors `horovod.allreduce_async`."""
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, compression)
    return Operation(OpKind.ALLREDUCE, [tensor], name, process_set, reduction, priority=priority)


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: type[Compressor] = Compression.none,
    priority: int = 0,
) -> Handle:
    """As `allreduce`, at once and in place: the tensor will hold the result. Mirrors `horovod.allreduce_async_`."""
    how = (op, average, prescale_factor, postscale_factor, compression)
    return start_in_place(tensor, name, how, process_set, priority, False)


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: type[Compressor] = Compression.none,
    priority: int = 0,
) -> Any:
    """As `allreduce_async_`, and waits for the result, which it returns. Mirrors `horovod.allreduce_`."""
    how = (op, average, prescale_factor, postscale_factor, compression)
    return start_in_place(tensor, name, how, process_set, priority, True).wait()


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> Any:
    """As `allreduce`, of a list of tensors as one operation; returns a list. Mirrors `horovod.grouped_allreduce`."""
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, compression)
    operation = Operation(OpKind.ALLREDUCE, tensors, name, process_set, reduction, priority=priority, is_group=True)
    return start(operation, is_awaited=True).wait()


@_starting
def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: type[Compressor] = Compression.none,
    priority: int = 0,
) -> Operation:
    """As `grouped_allreduce`, at once. Mirrors `horovod.grouped_allreduce_async`."""
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, compression)
    return Operation(OpKind.ALLREDUCE, tensors, name, process_set, reduction, priority=priority, is_group=True)


@_starting
def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: type[Compressor] = Compression.none,
    priority: int = 0,
) -> Operation:
    """As `grouped_allreduce`, at once and in place. Mirrors `horovod.grouped_allreduce_async_`."""
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, compression)
    return Operation(
        OpKind.ALLREDUCE, tensors, name, process_set, reduction, priority=priority, is_group=True, in_place=True
    )


grouped_allreduce_ = _blocking(grouped_allreduce_async_)

# ------------------------------------------------------------------------------------------------------ reducescatter


@_starting
def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: type[Compressor] = Compression.none,
) -> Operation:
    """Reduce a tensor over the ranks and give each some of its rows. Mirrors `horovod.reducescatter_async`.

    Args:
        tensor: same shape and dtype on all ranks, at least 1-d. Its first dimension is split as evenly as possible; the
            first ranks get one row more.
        op, prescale_factor, postscale_factor: as for `allreduce`, but without Adasum.

    The result has the rows of this rank and the other dimensions of `tensor`.
    """
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, compression)
    return Operation(OpKind.REDUCESCATTER, [tensor], name, process_set, reduction)


@_starting
def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: type[Compressor] = Compression.none,
) -> Operation:
    """As `reducescatter_async`, of a list of tensors. Mirrors `horovod.grouped_reducescatter_async`."""
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, compression)
    return Operation(OpKind.REDUCESCATTER, tensors, name, process_set, reduction, is_group=True)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """As `reducescatter_async`, and waits for the result, which it returns. Mirrors `horovod.reducescatter`."""
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, compression)
    operation = Operation(OpKind.REDUCESCATTER, [tensor], name, process_set, reduction)
    return start(operation, is_awaited=True).wait()


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """As `reducescatter`, of a list of tensors. Mirrors `horovod.grouped_reducescatter`."""
    reduction = Reduction.of(op, None, prescale_factor, postscale_factor, compression)
    operation = Operation(OpKind.REDUCESCATTER, tensors, name, process_set, reduction, is_group=True)
    return start(operation, is_awaited=True).wait()


# ---------------------------------------------------------------------------------------------------------- allgather


@_starting
def allgather_async(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Operation:
    """Concatenate the tensors of all ranks along the first dimension. Mirrors `horovod.allgather_async`.

    Args:
        tensor: same dtype on all ranks, and same shape but for the first dimension. A 0-d tensor counts as one of
            shape (1,).

    The result is the same on all ranks: the rows of rank 0, then those of rank 1, and so on.
    """
    return Operation(OpKind.ALLGATHER, [tensor], name, process_set)


@_starting
def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """As `allgather_async`, of a list of tensors. Mirrors `horovod.grouped_allgather_async`."""
    return Operation(OpKind.ALLGATHER, tensors, name, process_set, is_group=True)


allgather = _blocking(allgather_async)
grouped_allgather = _blocking(grouped_allgather_async)

# ---------------------------------------------------------------------------------------------------------- broadcast


@_starting
def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> Operation:
    """Give all ranks the tensor of one of them. Mirrors `horovod.broadcast_async`.

    Args:
        tensor: same shape and dtype on all ranks.
        root_rank: whose values all get; a rank of the job, also for a process set.
    """
    return Operation(OpKind.BROADCAST, [tensor], name, process_set, root=root_rank, priority=priority)


@_starting
def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> Operation:
    """As `broadcast_async`, in place. Mirrors `horovod.broadcast_async_`."""
    return Operation(OpKind.BROADCAST, [tensor], name, process_set, root=root_rank, priority=priority, in_place=True)


@_starting
def grouped_broadcast_async(
    tensors: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """As `broadcast_async`, of a list of tensors."""
    return Operation(OpKind.BROADCAST, tensors, name, process_set, root=root_rank, is_group=True)


@_starting
def grouped_broadcast_async_(
    tensors: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """As `broadcast_async_`, of a list of tensors."""
    return Operation(OpKind.BROADCAST, tensors, name, process_set, root=root_rank, is_group=True, in_place=True)


broadcast = _blocking(broadcast_async)
broadcast_ = _blocking(broadcast_async_)
grouped_broadcast = _blocking(grouped_broadcast_async)
grouped_broadcast_ = _blocking(grouped_broadcast_async_)

# ----------------------------------------------------------------------------------------------------------- alltoall


@_starting
def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Operation:
    """Send a part of the tensor to every rank and concatenate what comes back. Mirrors `horovod.alltoall_async`.

    Args:
        tensor: same dtype on all ranks, at least 1-d, and same shape but for the first dimension.
        splits: how many rows go to each rank of the process set: integers that add up to the first dimension, which is
            split evenly if None.

    The result is the rows from rank 0, then those from rank 1, and so on; with `splits` a pair of that and an int64
    array of how many rows came from each rank.
    """
    return Operation(OpKind.ALLTOALL, [tensor], name, process_set, splits=[splits])


@_starting
def grouped_alltoall_async(
    tensors: Sequence[Any],
    splits: Sequence[Any] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Operation:
    """As `alltoall_async`, of a list of tensors with a list of splits, one for each tensor."""
    each = [None] * len(tensors) if splits is None else list(splits)
    return Operation(OpKind.ALLTOALL, tensors, name, process_set, splits=each, is_group=True)


alltoall = _blocking(alltoall_async)
grouped_alltoall = _blocking(grouped_alltoall_async)

# -------------------------------------------------------------------------------------------------- without a tensor


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have come here. Mirrors `horovod.barrier`."""
    start(Operation(OpKind.BARRIER, [], None, process_set), is_awaited=True).wait()


def join(device: int = -1, *, process_set: ProcessSet = global_process_set) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so. Mirrors `horovod.join`.

    Until then this rank contributes zeros to the allreduces (Sum, Average and Adasum) of the others; any other
    operation of theirs but barrier fails there with MismatchError.

    Args:
        device: accepted for Horovod's sake.

    Returns:
        The last rank to join.
    """
    last: int = start(Operation(OpKind.JOIN, [], None, process_set), is_awaited=True).wait()
    for begin in _after_join:
        begin(process_set)
    return last


_after_join: list[Callable[[ProcessSet], None]] = []


def after_join(begin: Callable[[ProcessSet], None]) -> None:
    """Have a higher floor called at the end of join(), on all ranks of the process set."""
    _after_join.append(begin)
