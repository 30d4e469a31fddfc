"""The operations on tensors, with gradients: those that wait for their result are differentiable.

Arguments and gradients are Horovod's (horovod/torch/mpi_ops.py). Where an operation hands a value to all ranks its
gradient is averaged over them, so the losses of the ranks count as one loss that is their average. Gradients go through
the same operations, so they can be differentiated again. The `_async` and the in-place forms are not differentiable;
the latter tell autograd which values change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from ringtrain import ops
from ringtrain._core import ReduceOp
from ringtrain.compression import Compression, Compressor
from ringtrain.ops import Average, Sum
from ringtrain.process_sets import ProcessSet, global_process_set

Tensors = Sequence[torch.Tensor]
_Function = Callable[[Tensors], Tensors]


class _Operation(torch.autograd.Function):
    """Any operation: `run` makes its results of the tensors, `gradients` the gradients of the tensors of theirs."""

    @staticmethod
    def forward(ctx: Any, run: _Function, gradients: _Function, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.gradients = gradients
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *of_results: torch.Tensor) -> Any:
        return (None, None, *ctx.gradients(of_results))


def _apply(run: _Function, gradients: _Function, tensors: Tensors) -> Tensors:
    is_list = isinstance(tensors, (list, tuple))  # `run` refuses anything else
    if is_list and torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        return list(_Operation.apply(run, gradients, *tensors))  # type: ignore[no-untyped-call]
    return run(tensors)


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


# ---------------------------------------------------------------------------------------------------------- allreduce


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> torch.Tensor:
    """As `ringtrain.allreduce`, differentiable: the gradient is reduced in the same way.

    Mirrors `horovod.torch.allreduce`. For Min, Max and Product backward() raises RuntimeError.
    """
    how = (compression, op, prescale_factor, postscale_factor, process_set)

    def run(tensors: Tensors) -> Tensors:
        return [ops.allreduce(tensors[0], average, name, *how, priority=priority)]

    def gradients(of_results: Tensors) -> Tensors:
        _check_has_gradient(op)
        return [allreduce(of_results[0], average, _of_gradient(name), *how, priority=priority)]

    return _apply(run, gradients, [tensor])[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    priority: int = 0,
) -> Tensors:
    """As `ringtrain.grouped_allreduce`, differentiable as `allreduce`. Mirrors `horovod.torch.grouped_allreduce`."""
    how = (compression, op, prescale_factor, postscale_factor, process_set)

    def run(tensors: Tensors) -> Tensors:
        reduced: Tensors = ops.grouped_allreduce(tensors, average, name, *how, priority=priority)
        return reduced

    def gradients(of_results: Tensors) -> Tensors:
        _check_has_gradient(op)
        return grouped_allreduce(of_results, average, _of_gradient(name), *how, priority=priority)

    return _apply(run, gradients, tensors)


def _check_has_gradient(op: ReduceOp | None) -> None:
    if op in (ReduceOp.Min, ReduceOp.Max, ReduceOp.Product):
        raise RuntimeError(f"an allreduce with op={op.name} has no gradient; detach() its tensor")


# ------------------------------------------------------------------------------------------------------ reducescatter


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """As `ringtrain.reducescatter`, differentiable: the gradient is gathered; of a Sum it is multiplied by the size.

    Mirrors `horovod.torch.reducescatter`. For Min, Max and Product backward() raises RuntimeError.
    """

    def run(tensors: Tensors) -> Tensors:
        return [ops.reducescatter(tensors[0], name, compression, op, process_set, prescale_factor, postscale_factor)]

    def gradients(of_results: Tensors) -> Tensors:
        factor = _factor_of_scatter(op, process_set, prescale_factor, postscale_factor)
        return [allgather(of_results[0] * factor, _of_gradient(name), process_set)]

    return _apply(run, gradients, [tensor])[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensors:
    """As `reducescatter`, of a list of tensors. Mirrors `horovod.torch.grouped_reducescatter`."""

    def run(tensors: Tensors) -> Tensors:
        scattered: Tensors = ops.grouped_reducescatter(
            tensors, name, compression, op, process_set, prescale_factor, postscale_factor
        )
        return scattered

    def gradients(of_results: Tensors) -> Tensors:
        factor = _factor_of_scatter(op, process_set, prescale_factor, postscale_factor)
        return grouped_allgather([gradient * factor for gradient in of_results], _of_gradient(name), process_set)

    return _apply(run, gradients, tensors)


def _factor_of_scatter(op: ReduceOp, process_set: ProcessSet, prescale_factor: float, postscale_factor: float) -> float:
    _check_has_gradient(op)
    ranks = process_set.size() or 1
    return prescale_factor * postscale_factor * (ranks if op == Sum else 1)


# ---------------------------------------------------------------------------------------------------------- allgather


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As `ringtrain.allgather`, differentiable: the gradient is averaged, and each rank takes that of its own rows.

    Mirrors `horovod.torch.allgather`.
    """

    def run(tensors: Tensors) -> Tensors:
        return [ops.allgather(tensors[0], name, process_set)]

    def gradients(of_results: Tensors) -> Tensors:
        return _own_rows(of_results, [tensor.shape], _of_gradient(name), process_set)

    return _apply(run, gradients, [tensor])[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensors:
    """As `allgather`, of a list of tensors. Mirrors `horovod.torch.grouped_allgather`."""

    def run(tensors: Tensors) -> Tensors:
        gathered: Tensors = ops.grouped_allgather(tensors, name, process_set)
        return gathered

    def gradients(of_results: Tensors) -> Tensors:
        return _own_rows(of_results, [tensor.shape for tensor in tensors], _of_gradient(name), process_set)

    return _apply(run, gradients, tensors)


def _own_rows(
    gathered: Tensors, shapes: Sequence[torch.Size], name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    """The averages over the ranks of gradients of gathered tensors, of which this rank gave those with `shapes`."""
    own = torch.tensor([[shape[0] if shape else 1 for shape in shapes]], device="cpu")
    rows = ops.allgather_async(own, None if name is None else f"{name}.rows", process_set)
    averages = grouped_allreduce(list(gathered), None, name, process_set=process_set)
    first_rows = rows.wait()[: process_set.rank()].sum(0).tolist()
    return [
        average.narrow(0, first, count).reshape(shape)
        for average, first, count, shape in zip(averages, first_rows, own[0].tolist(), shapes, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------------- broadcast


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As `ringtrain.broadcast`, differentiable: the average of the gradients goes to the root, zeros to the others.

    Mirrors `horovod.torch.broadcast`.
    """

    def run(tensors: Tensors) -> Tensors:
        return [ops.broadcast(tensors[0], root_rank, name, process_set)]

    def gradients(of_results: Tensors) -> Tensors:
        average = allreduce(of_results[0], None, _of_gradient(name), process_set=process_set)
        is_root = (process_set.ranks or []).index(root_rank) == process_set.rank()
        return [average if is_root else torch.zeros_like(average)]

    return _apply(run, gradients, [tensor])[0]


# ----------------------------------------------------------------------------------------------------------- alltoall


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """As `ringtrain.alltoall`, differentiable: the gradients travel back.

    Mirrors `horovod.torch.alltoall`: with `splits` the result is a pair of the tensor and how many rows came from each
    rank, of the dtype of `splits`, or int32 if that is no tensor.
    """
    received: list[torch.Tensor] = []

    def run(tensors: Tensors) -> Tensors:
        if splits is None and not tensors[0].requires_grad:
            return [ops.alltoall(tensors[0], None, name, process_set)]
        sent = _even_splits(tensors[0], process_set) if splits is None else splits
        result, numbers = ops.alltoall(tensors[0], sent, name, process_set)
        received.append(numbers)
        return [result]

    def gradients(of_results: Tensors) -> Tensors:
        return [alltoall(of_results[0], received[0], _of_gradient(name), process_set)[0]]

    result = _apply(run, gradients, [tensor])[0]
    return result if splits is None else (result, received[0])


def _even_splits(tensor: torch.Tensor, process_set: ProcessSet) -> list[int] | None:
    """None where there are none: the operation says why."""
    ranks = process_set.size()
    if not ranks or tensor.dim() == 0 or tensor.shape[0] % ranks:
        return None
    return [tensor.shape[0] // ranks] * ranks


# ----------------------------------------------------------------------------------------------------------- in place

P = ParamSpec("P")
R = TypeVar("R")


def _changing(operation: Callable[P, R]) -> Callable[P, R]:
    """An operation in place that tells autograd, so that backward() refuses the values that it had saved."""

    @functools.wraps(operation)
    def in_place(*args: P.args, **kwargs: P.kwargs) -> R:
        result = operation(*args, **kwargs)
        changed = args[0] if args else next(iter(kwargs.values()))
        for tensor in changed if isinstance(changed, (list, tuple)) else (changed,):
            if torch.is_tensor(tensor) and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        return result

    return in_place


allreduce_ = _changing(ops.allreduce_)
allreduce_async_ = _changing(ops.allreduce_async_)
grouped_allreduce_ = _changing(ops.grouped_allreduce_)
grouped_allreduce_async_ = _changing(ops.grouped_allreduce_async_)
broadcast_ = _changing(ops.broadcast_)
broadcast_async_ = _changing(ops.broadcast_async_)
grouped_broadcast_ = _changing(ops.grouped_broadcast_)
grouped_broadcast_async_ = _changing(ops.grouped_broadcast_async_)
