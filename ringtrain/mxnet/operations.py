"""The operations under the names and with the arguments of `horovod.mxnet` (horovod/mxnet/mpi_ops.py).

An operation whose result has a known shape returns at once: MXNet's engine begins it when its arrays are computed, and
a thread that reads the result waits, as for any NDArray. An error is raised there, on all ranks: what they disagree
about as MismatchError, the loss of one as PeerLostError. Elsewhere than in the host's memory, and with
MXNET_ENGINE_TYPE=NaiveEngine, each operation waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mxnet.ndarray import NDArray

from ringtrain import ops
from ringtrain._core import OpKind, ReduceOp
from ringtrain.arrays.mxnet import dtype_name, empty_like, view
from ringtrain.engine.compression import Compression
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.requirements import require_reducible, require_weighable
from ringtrain.engine.submission import Reduction
from ringtrain.mxnet.engine import push, require_dense, takes
from ringtrain.mxnet.library import raises_mxnet_errors
from ringtrain.ops import docstrings


@raises_mxnet_errors
def allreduce(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
    *,
    weight: float | None = None,
) -> NDArray:
    """Reduce a tensor over the ranks, as `ringtrain.allreduce`. Mirrors `horovod.mxnet.allreduce`.

    Raises:
        ValueError: this rank is not in the process set, or an argument is out of its range.
        TypeError: no NDArray.
        RingtrainError: a rank is lost. Reading the result raises the error of this operation.
    """
    return _reduce([tensor], average, name, priority, prescale_factor, postscale_factor, process_set, op, weight)[0]


@raises_mxnet_errors
def allreduce_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
    *,
    weight: float | None = None,
) -> NDArray:
    """As `allreduce`, in place; returns the tensor itself. Mirrors `horovod.mxnet.allreduce_`."""
    how = average, name, priority, prescale_factor, postscale_factor, process_set, op, weight
    return _reduce([tensor], *how, in_place=True)[0]


@raises_mxnet_errors
def grouped_allreduce(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
    *,
    weight: float | None = None,
) -> list[NDArray]:
    """As `allreduce`, of several tensors, all at once or not at all. Mirrors `horovod.mxnet.grouped_allreduce`."""
    return _reduce(list(tensors), average, name, priority, prescale_factor, postscale_factor, process_set, op, weight)


@raises_mxnet_errors
def grouped_allreduce_(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
    *,
    weight: float | None = None,
) -> list[NDArray]:
    """As `grouped_allreduce`, in place. Each of the tensors has memory of its own."""
    how = average, name, priority, prescale_factor, postscale_factor, process_set, op, weight
    return _reduce(list(tensors), *how, in_place=True)


def _reduce(
    tensors: list[NDArray],
    average: bool | None,
    name: str | None,
    priority: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    op: ReduceOp | None,
    weight: float | None,
    in_place: bool = False,
) -> list[NDArray]:
    reduction = Reduction.of(op, average, prescale_factor, postscale_factor, Compression.none, weight)
    if not tensors:
        return []
    if not takes(tensors):
        how = reduction.op, prescale_factor, postscale_factor, process_set
        if in_place:
            return ops.grouped_allreduce_(tensors, None, name, *how, priority=priority, weight=weight)
        return ops.grouped_allreduce(tensors, None, name, Compression.none, *how, weight=weight)
    _check_dtypes(tensors, reduction)
    if in_place:
        _require_distinct(tensors)
    outputs = tensors if in_place else [empty_like(tensor) for tensor in tensors]
    push(OpKind.ALLREDUCE, () if in_place else tensors, outputs, name, process_set, priority, reduction)
    return outputs


def _check_dtypes(tensors: Sequence[NDArray], reduction: Reduction) -> None:
    for tensor in tensors:
        dtype = dtype_name(tensor)
        require_reducible(reduction.op, dtype, dtype, "allreduce")
        if reduction.weight is not None:
            require_weighable(dtype, dtype, "allreduce")


def _require_distinct(tensors: Sequence[NDArray]) -> None:
    if len({tensor.handle.value for tensor in tensors}) < len(tensors):
        raise ValueError("a grouped operation in place takes each tensor once")


@raises_mxnet_errors
def broadcast(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Give all ranks the tensor of one of them, as `ringtrain.broadcast`. Mirrors `horovod.mxnet.broadcast`.

    Raises:
        ValueError: this rank, or root_rank, is not in the process set.
        TypeError: no NDArray.
        RingtrainError: a rank is lost. Reading the result raises the error of this operation.
    """
    if not takes([tensor]):
        return ops.broadcast(tensor, root_rank, name, process_set, priority=priority)
    _lay_out(tensor)
    output = empty_like(tensor)
    push(OpKind.BROADCAST, [tensor], [output], name, process_set, priority, root=root_rank)
    return output


@raises_mxnet_errors
def broadcast_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """As `broadcast`, in place; returns the tensor itself. Mirrors `horovod.mxnet.broadcast_`."""
    if not takes([tensor]):
        return ops.broadcast_(tensor, root_rank, name, process_set, priority=priority)
    _lay_out(tensor)
    push(OpKind.BROADCAST, (), [tensor], name, process_set, priority, root=root_rank)
    return tensor


def _lay_out(tensor: NDArray) -> None:
    """MKLDNN keeps weights in a layout of its own after inference: only who is not an operation can change that."""
    view(tensor)


# The sizes of these results depend on other ranks, or the core makes them: they wait.


@raises_mxnet_errors
def allgather(
    tensor: NDArray, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> NDArray:
    """Join the tensors of all ranks, and wait, as `ringtrain.allgather`. Mirrors `horovod.mxnet.allgather`.

    Args:
        priority: accepted.
    """
    require_dense([tensor])
    return ops.allgather(tensor, name, process_set)


@raises_mxnet_errors
def grouped_allgather(
    tensors: Sequence[NDArray],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[NDArray]:
    """As `allgather`, of several tensors as one operation."""
    require_dense(tensors)
    return ops.grouped_allgather(list(tensors), name, process_set)


@raises_mxnet_errors
def alltoall(
    tensor: NDArray,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each rank some rows of the tensor, and wait, as `ringtrain.alltoall`. Mirrors `horovod.mxnet.alltoall`.

    Args:
        priority: accepted.

    Raises:
        ValueError: splits that do not add up to the rows, or rows that cannot be split evenly. It is an MXNetError,
            too, which is what Horovod raises.
    """
    require_dense([tensor])
    return ops.alltoall(tensor, splits, name, process_set)


@raises_mxnet_errors
def reducescatter(
    tensor: NDArray,
    op: ReduceOp = ReduceOp.Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    weight: float | None = None,
) -> NDArray:
    """Reduce a tensor, give each rank some of its rows, and wait, as `ringtrain.reducescatter`.

    Args:
        priority: accepted.
    """
    _require_process_set("reducescatter", process_set)
    require_dense([tensor])
    how = (Compression.none, op, process_set, prescale_factor, postscale_factor)
    return ops.reducescatter(tensor, name, *how, weight=weight)


@raises_mxnet_errors
def grouped_reducescatter(
    tensors: Sequence[NDArray],
    op: ReduceOp = ReduceOp.Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    weight: float | None = None,
) -> list[NDArray]:
    """As `reducescatter`, of several tensors as one operation."""
    _require_process_set("grouped_reducescatter", process_set)
    require_dense(tensors)
    how = (Compression.none, op, process_set, prescale_factor, postscale_factor)
    return ops.grouped_reducescatter(list(tensors), name, *how, weight=weight)


def _require_process_set(call: str, process_set: Any) -> None:
    """Raises TypeError for something else, such as a factor in the fifth place."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"{call}: process_set must be a ProcessSet, not {process_set!r}; give factors by name, such as "
            "prescale_factor=0.5"
        )


def synchronize(tensor: NDArray) -> NDArray:
    """Wait until an array is computed, and return it. Raises what its operation ended with."""
    tensor.wait_to_read()
    return tensor


for _alone in (allreduce, broadcast, allgather, alltoall, reducescatter):
    docstrings.complete({_alone.__name__: _alone}, vars(ops))
