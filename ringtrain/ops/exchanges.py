"""allgather, broadcast, alltoall, barrier and join: values go to other ranks as they are. See `ringtrain.ops`, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import numpy as np

from ringtrain._core import OpKind, run_repeated
from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.handles import Handle, time_limit
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.submission import Operation, PreparedBroadcasts, run_in_place, start
from ringtrain.failure import RepeatedSite
from ringtrain.job import session
from ringtrain.ops import docstrings

Array = TypeVar("Array")

_broadcasts = PreparedBroadcasts()
_known = _broadcasts.known
_site = RepeatedSite()
# The next job may not have the root.
session.at_init(lambda _settings: _broadcasts.known.clear())

# ---------------------------------------------------------------------------------------------------------- allgather


def allgather(tensor: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Concatenate the tensors of all ranks along the first dimension. Mirrors `horovod.allgather`.

    Args:
        tensor: same dtype on all ranks, and same shape but for the first dimension. A 0-d tensor counts as one of
            shape (1,).
        name: the ranks match operations by it, in any order; operations without a name by their order.
        process_set: the ranks that take part, all of which call it.

    Returns:
        A new array, the same on all ranks: the rows of rank 0, then those of rank 1, and so on.

    Raises:
        NotInitializedError: before init().
        ValueError: the name is in flight, this rank is not in the process set, or an argument is out of its range.
        TypeError: an unsupported object or dtype.
        RingtrainError: the ranks disagree (MismatchError), or one of them is lost, fails or does not arrive.

    Examples:
        Rank 0 has one row, rank 1 has two:

        >>> hvd.allgather(np.full(hvd.rank() + 1, hvd.rank()))
        array([0, 1, 1])
    """
    return start(Operation(OpKind.ALLGATHER, [tensor], name, process_set), is_awaited=True).wait()


def allgather_async(
    tensor: Array, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    """As `allgather`, at once: give the Handle to `synchronize`. Mirrors `horovod.allgather_async`."""
    return start(Operation(OpKind.ALLGATHER, [tensor], name, process_set))


def grouped_allgather(
    tensors: Sequence[Array], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Gather a list of tensors as one operation, each as `allgather`. Mirrors `horovod.grouped_allgather`.

    Args:
        tensors: at least one, each as for `allgather`.

    Returns:
        New arrays, the same on all ranks: of each tensor the rows of all ranks.
    """
    return start(Operation(OpKind.ALLGATHER, tensors, name, process_set, is_group=True), is_awaited=True).wait()


def grouped_allgather_async(
    tensors: Sequence[Array], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Array]]:
    """As `grouped_allgather`, at once. Mirrors `horovod.grouped_allgather_async`."""
    return start(Operation(OpKind.ALLGATHER, tensors, name, process_set, is_group=True))


# ---------------------------------------------------------------------------------------------------------- broadcast


def broadcast(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> Array:
    """Give all ranks the tensor of one of them. Mirrors `horovod.broadcast`.

    Args:
        tensor: same shape and dtype on all ranks.
        root_rank: whose values all get; a rank of the job, also for a process set.
        name: the ranks match operations by it, in any order; operations without a name by their order.
        process_set: the ranks that take part, all of which call it.
        priority: operations that are ready at the same time begin in descending order of it.

    Returns:
        A new array, on all ranks with the values of `root_rank`.

    Raises:
        NotInitializedError: before init().
        ValueError: the name is in flight, this rank is not in the process set, or `root_rank` is not in it.
        TypeError: an unsupported object or dtype.
        RingtrainError: the ranks disagree (MismatchError), or one of them is lost, fails or does not arrive.

    Examples:
        >>> hvd.broadcast(np.full(2, hvd.rank()), root_rank=1)
        array([1, 1])
    """
    operation = Operation(OpKind.BROADCAST, [tensor], name, process_set, root=root_rank, priority=priority)
    return start(operation, is_awaited=True).wait()


def broadcast_async(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> Handle[Array]:
    """As `broadcast`, at once: give the Handle to `synchronize`. Mirrors `horovod.broadcast_async`."""
    return start(Operation(OpKind.BROADCAST, [tensor], name, process_set, root=root_rank, priority=priority))


def broadcast_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> Array:
    """Give all ranks the values of one of them in place, as `broadcast`. Mirrors `horovod.broadcast_`.

    Args:
        tensor: same shape and dtype on all ranks; gets the values of `root_rank`.

    Returns:
        The tensor itself.
    """
    site = _site.get() if name is None else None
    is_usual = type(tensor) is np.ndarray  # then this is _broadcasts.run() without its calls
    again: Any = is_usual and run_repeated(_known, tensor, None, name, root_rank, process_set, priority, site)
    if again is tensor:
        return tensor
    key = name, root_rank, process_set, priority
    if is_usual:
        return _broadcasts.result_of(again, tensor, key, None, site)
    return run_in_place(_broadcasts, tensor, key, None, site)


def broadcast_async_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> Handle[Array]:
    """As `broadcast_`, at once: give the Handle to `synchronize`. Mirrors `horovod.broadcast_async_`."""
    site = _site.get() if name is None else None
    handle: Any = _broadcasts.submit(tensor, (name, root_rank, process_set, priority), None, site)
    adapter_for(tensor).note_change(tensor)
    return handle


def grouped_broadcast(
    tensors: Sequence[Array], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Give all ranks a list of tensors of one of them as one operation, each as `broadcast`.

    Args:
        tensors: at least one; each has the same shape and dtype on all ranks.

    Returns:
        New arrays, on all ranks with the values of `root_rank`.
    """
    operation = Operation(OpKind.BROADCAST, tensors, name, process_set, root=root_rank, is_group=True)
    return start(operation, is_awaited=True).wait()


def grouped_broadcast_async(
    tensors: Sequence[Array], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Array]]:
    """As `grouped_broadcast`, at once: give the Handle to `synchronize`."""
    return start(Operation(OpKind.BROADCAST, tensors, name, process_set, root=root_rank, is_group=True))


def grouped_broadcast_(
    tensors: Sequence[Array], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Give all ranks the values of a list of tensors of one of them in place, as `grouped_broadcast`.

    Args:
        tensors: at least one; each has the same shape and dtype on all ranks, and gets the values of `root_rank`.

    Returns:
        The tensors themselves.
    """
    operation = Operation(OpKind.BROADCAST, tensors, name, process_set, root=root_rank, is_group=True)
    return _start_in_place(operation, is_awaited=True).wait()


def grouped_broadcast_async_(
    tensors: Sequence[Array], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Array]]:
    """As `grouped_broadcast_`, at once: give the Handle to `synchronize`."""
    return _start_in_place(Operation(OpKind.BROADCAST, tensors, name, process_set, root=root_rank, is_group=True))


def _start_in_place(operation: Operation, is_awaited: bool = False) -> Handle[Any]:
    handle = start(operation._replace(in_place=True), is_awaited)
    for tensor in operation.tensors:
        adapter_for(tensor).note_change(tensor)
    return handle


# ----------------------------------------------------------------------------------------------------------- alltoall


@overload
def alltoall(
    tensor: Array, splits: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array: ...
@overload
def alltoall(
    tensor: Array, splits: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Array, Any]: ...
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send a part of the tensor to every rank and concatenate the received parts. Mirrors `horovod.alltoall`.

    Args:
        tensor: same dtype on all ranks, at least 1-d, and same shape but for the first dimension.
        splits: how many rows go to each rank of the process set: integers that add up to the first dimension, which is
            split evenly if None.
        name: the ranks match operations by it, in any order; operations without a name by their order.
        process_set: the ranks that take part, all of which call it.

    Returns:
        A new array: the rows from rank 0, then those from rank 1, and so on. With `splits` a pair of that and an int64
        array of how many rows came from each rank.

    Raises:
        NotInitializedError: before init().
        ValueError: the name is in flight, this rank is not in the process set, or the rows cannot be split so.
        TypeError: an unsupported object or dtype.
        RingtrainError: the ranks disagree (MismatchError), or one of them is lost, fails or does not arrive.

    Examples:
        On two ranks, rank 0 sends its first element to itself and its second one to rank 1:

        >>> received = hvd.alltoall(np.array([0, 1]) + 10 * hvd.rank())
        >>> received.tolist() == [hvd.rank(), 10 + hvd.rank()]
        True
    """
    return start(Operation(OpKind.ALLTOALL, [tensor], name, process_set, splits=[splits]), is_awaited=True).wait()


@overload
def alltoall_async(
    tensor: Array, splits: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]: ...
@overload
def alltoall_async(
    tensor: Array, splits: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[tuple[Array, Any]]: ...
def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Any]:
    """As `alltoall`, at once: give the Handle to `synchronize`. Mirrors `horovod.alltoall_async`."""
    return start(Operation(OpKind.ALLTOALL, [tensor], name, process_set, splits=[splits]))


@overload
def grouped_alltoall(
    tensors: Sequence[Array], splits: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]: ...
@overload
def grouped_alltoall(
    tensors: Sequence[Array],
    splits: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]: ...
def grouped_alltoall(
    tensors: Sequence[Any],
    splits: Sequence[Any] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Exchange the rows of a list of tensors as one operation, each as `alltoall`.

    Args:
        tensors: at least one, each as for `alltoall`.
        splits: those of each tensor, as for `alltoall`; None splits all of them evenly.

    Returns:
        The results of `alltoall` for each tensor.
    """
    return start(_grouped_alltoall(tensors, splits, name, process_set), is_awaited=True).wait()


@overload
def grouped_alltoall_async(
    tensors: Sequence[Array], splits: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Array]]: ...
@overload
def grouped_alltoall_async(
    tensors: Sequence[Array],
    splits: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Any]]: ...
def grouped_alltoall_async(
    tensors: Sequence[Any],
    splits: Sequence[Any] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Any]]:
    """As `grouped_alltoall`, at once: give the Handle to `synchronize`."""
    return start(_grouped_alltoall(tensors, splits, name, process_set))


def _grouped_alltoall(
    tensors: Sequence[Any], splits: Sequence[Any] | None, name: str | None, process_set: ProcessSet
) -> Operation:
    each = [None] * len(tensors) if splits is None else list(splits)
    return Operation(OpKind.ALLTOALL, tensors, name, process_set, splits=each, is_group=True)


# --- barrier and join -------------------------------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set, *, timeout_s: float | None = None) -> None:
    """Wait until all ranks have called it. Mirrors `horovod.barrier`.

    Args:
        process_set: the ranks that take part, all of which call it.
        timeout_s: how long to wait. After that this rank still counts as one that has called it.

    Raises:
        NotInitializedError: before init().
        ValueError: this rank is not in the process set, or timeout_s is not above 0.
        RingtrainError: one of the ranks is lost, fails or does not arrive. StalledError: not within timeout_s.

    Examples:
        >>> if hvd.rank() == 0:
        ...     os.makedirs("checkpoints", exist_ok=True)
        >>> hvd.barrier()
        >>> os.path.isdir("checkpoints")  # on all ranks
        True
    """
    with time_limit(timeout_s, "barrier"):
        start(Operation(OpKind.BARRIER, [], None, process_set), is_awaited=True).wait()


def join(device: int = -1, *, process_set: ProcessSet = global_process_set) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so. Mirrors `horovod.join`.

    Until then this rank contributes zeros to the allreduces (Sum, Average and Adasum) of the others; any other
    operation of theirs but barrier fails there with MismatchError.

    Args:
        device: accepted for Horovod's sake.
        process_set: the ranks that take part, all of which call it in the end.

    Returns:
        The last rank to join.

    Raises:
        NotInitializedError: before init().
        ValueError: this rank is not in the process set.
        RingtrainError: one of the ranks is lost or fails.

    Examples:
        Rank 1 has one batch more than rank 0:

        >>> sums = [float(hvd.allreduce(np.ones(1), op=hvd.Sum, name="batch")[0]) for _ in range(3 + hvd.rank())]
        >>> last = hvd.join()
        >>> (last, sums) == (1, [2.0, 2.0, 2.0] + [1.0] * hvd.rank())
        True
    """
    last: int = start(Operation(OpKind.JOIN, [], None, process_set), is_awaited=True).wait()
    for begin in _after_join:
        begin(process_set)
    return last


_after_join: list[Callable[[ProcessSet], None]] = []


def after_join(begin: Callable[[ProcessSet], None]) -> None:
    """Registers a function of a higher floor, called at the end of join(), on all ranks of the process set."""
    _after_join.append(begin)


docstrings.complete(globals(), globals())
