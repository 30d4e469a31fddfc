"""The operations on tensors, with gradients: those that wait for their result are differentiable.

Arguments and gradients are Horovod's (horovod/torch/mpi_ops.py). Where an operation hands a value to all ranks its
gradient is averaged over them, so the losses of the ranks count as one loss that is their average. Gradients go through
the same operations, so they can be differentiated again. The `_async` and the in-place forms are those of
`ringtrain.ops`, which are not differentiable; the latter tell autograd which values change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from ringtrain import ops
from ringtrain._core import ReduceOp
from ringtrain.arrays.torch import coalesced, require_indices, sum_sparse
from ringtrain.engine.compression import AnyCompressor, Compression
from ringtrain.engine.handles import Handle
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.requirements import require_process_set
from ringtrain.engine.submission import op_of
from ringtrain.ops import Average, Sum, docstrings
from ringtrain.ops.objects import part_of

Tensors = Sequence[torch.Tensor]
_Function = Callable[[Tensors], Tensors]
_How = tuple[AnyCompressor, ReduceOp, float, float, ProcessSet]


class _Operation(torch.autograd.Function):
    """Any operation: `run` makes its results of the tensors, `gradients` the gradients of the tensors of theirs.

    Integers and bool, such as labels and masks in a group, have no gradient, and `gradients` does not get them.
    """

    @staticmethod
    def forward(ctx: Any, run: _Function, gradients: _Function, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.gradients = gradients
        results = tuple(run(tensors))
        ctx.have_gradient = [_has_gradient(result) for result in results]
        ctx.mark_non_differentiable(*(result for result in results if not _has_gradient(result)))
        return results

    @staticmethod
    def backward(ctx: Any, *of_results: torch.Tensor) -> Any:
        found = iter(ctx.gradients([one for one, has in zip(of_results, ctx.have_gradient, strict=True) if has]))
        return (None, None, *(next(found) if has else None for has in ctx.have_gradient))


def _has_gradient(tensor: torch.Tensor) -> bool:
    """By the dtype alone, which is the same on all ranks: they reduce the same gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def _apply(run: _Function, gradients: _Function, tensors: Tensors) -> Tensors:
    is_list = isinstance(tensors, (list, tuple))  # `run` refuses anything else
    if is_list and torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors):
        return list(_Operation.apply(run, gradients, *tensors))  # type: ignore[no-untyped-call]
    return run(tensors)


# ---------------------------------------------------------------------------------------------------------- allreduce


def allreduce(
    tensor: torch.Tensor,
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
) -> torch.Tensor:
    """Reduce a tensor over the ranks, as `ringtrain.allreduce`. Mirrors `horovod.torch.allreduce`.

    Differentiable: the gradient is reduced in the same way. For Min, Max and Product backward() raises RuntimeError.
    """
    op = op_of(op, average)
    how = (compression, op, prescale_factor, postscale_factor, process_set)

    def run(tensors: Tensors) -> Tensors:
        return [ops.allreduce(tensors[0], None, name, *how, priority=priority, weight=weight)]

    def gradients(of_results: Tensors) -> Tensors:
        _check_has_gradient(op)
        if weight is not None:
            return _of_weighted(of_results, weight, part_of(name, "gradient"), how, priority)
        return [allreduce(of_results[0], None, part_of(name, "gradient"), *how, priority=priority)]

    return _apply(run, gradients, [tensor])[0]


def grouped_allreduce(
    tensors: Tensors,
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
) -> Tensors:
    """Reduce tensors as one operation, as `ringtrain.grouped_allreduce`. Mirrors `horovod.torch.grouped_allreduce`.

    Differentiable as `allreduce`.
    """
    op = op_of(op, average)
    how = (compression, op, prescale_factor, postscale_factor, process_set)

    def run(tensors: Tensors) -> Tensors:
        reduced: Tensors = ops.grouped_allreduce(tensors, None, name, *how, priority=priority, weight=weight)
        return reduced

    def gradients(of_results: Tensors) -> Tensors:
        _check_has_gradient(op)
        if weight is not None:
            return _of_weighted(of_results, weight, part_of(name, "gradient"), how, priority)
        return grouped_allreduce(of_results, None, part_of(name, "gradient"), *how, priority=priority)

    return _apply(run, gradients, tensors)


def _of_weighted(of_results: Tensors, weight: float, name: str | None, how: _How, priority: int) -> Tensors:
    """The gradients of an average by weight: their sum over the ranks, times the share of this rank in the weights."""
    compression, _, prescale, postscale, process_set = how
    share_of = _share_of(weight, name, process_set)
    sum_of = (compression, Sum, prescale, postscale, process_set)
    sums = grouped_allreduce(list(of_results), None, name, *sum_of, priority=priority)
    share = share_of()
    return [gradient * share for gradient in sums]


def _share_of(weight: float, name: str | None, process_set: ProcessSet) -> Callable[[], float]:
    """Sums the weights of all ranks. Returns the function that waits for the sum, and returns the share of this one."""
    own = torch.tensor(float(weight), dtype=torch.float64, device="cpu")
    total = ops.allreduce_async(own, None, part_of(name, "weight"), Sum, process_set=process_set)
    return lambda: weight / float(total.wait().item())


def _check_has_gradient(op: ReduceOp) -> None:
    if op in (ReduceOp.Min, ReduceOp.Max, ReduceOp.Product):
        raise RuntimeError(f"an allreduce with op={op.name} has no gradient; detach() its tensor")


# ------------------------------------------------------------------------------------------------------ reducescatter


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    weight: float | None = None,
) -> torch.Tensor:
    """Reduce a tensor and give each rank some of its rows, as `ringtrain.reducescatter`.

    Mirrors `horovod.torch.reducescatter`. Differentiable: the gradient is gathered; of a Sum it is multiplied by the
    number of ranks. For Min, Max and Product backward() raises RuntimeError.
    """

    def run(tensors: Tensors) -> Tensors:
        how = (compression, op, process_set, prescale_factor, postscale_factor)
        return [ops.reducescatter(tensors[0], name, *how, weight=weight)]

    def gradients(of_results: Tensors) -> Tensors:
        factor_of = _factor_of_scatter(op, process_set, prescale_factor * postscale_factor, weight, name)
        gathered = allgather(of_results[0], part_of(name, "gradient"), process_set)
        return [gathered * factor_of()]

    return _apply(run, gradients, [tensor])[0]


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    weight: float | None = None,
) -> Tensors:
    """Reduce tensors and give each rank some rows of each, as `ringtrain.grouped_reducescatter`.

    Differentiable as `reducescatter`. Mirrors `horovod.torch.grouped_reducescatter`.
    """

    def run(tensors: Tensors) -> Tensors:
        scattered: Tensors = ops.grouped_reducescatter(
            *(tensors, name, compression, op, process_set, prescale_factor, postscale_factor), weight=weight
        )
        return scattered

    def gradients(of_results: Tensors) -> Tensors:
        factor_of = _factor_of_scatter(op, process_set, prescale_factor * postscale_factor, weight, name)
        gathered = grouped_allgather(list(of_results), part_of(name, "gradient"), process_set)
        factor = factor_of()
        return [gradient * factor for gradient in gathered]

    return _apply(run, gradients, tensors)


def _factor_of_scatter(
    op: ReduceOp, process_set: ProcessSet, scale: float, weight: float | None, name: str | None
) -> Callable[[], float]:
    """Returns what returns the factor of the gathered gradients, after the sum of the weights if there is a weight."""
    _check_has_gradient(op)
    ranks = process_set.size() or 1
    if weight is None:
        return lambda: scale * (ranks if op == Sum else 1)
    share_of = _share_of(weight, part_of(name, "gradient"), process_set)
    return lambda: scale * ranks * share_of()


# ---------------------------------------------------------------------------------------------------------- allgather


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks, as `ringtrain.allgather`. Mirrors `horovod.torch.allgather`.

    Differentiable: the gradient is averaged over the ranks, and each takes that of its own rows.
    """

    def run(tensors: Tensors) -> Tensors:
        return [ops.allgather(tensors[0], name, process_set)]

    def gradients(of_results: Tensors) -> Tensors:
        return _own_rows(of_results, [tensor.shape], part_of(name, "gradient"), process_set)

    return _apply(run, gradients, [tensor])[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensors:
    """Gather tensors as one operation, as `ringtrain.grouped_allgather`. Mirrors `horovod.torch.grouped_allgather`.

    Differentiable as `allgather`.
    """

    def run(tensors: Tensors) -> Tensors:
        gathered: Tensors = ops.grouped_allgather(tensors, name, process_set)
        return gathered

    def gradients(of_results: Tensors) -> Tensors:
        shapes = [tensor.shape for tensor in tensors if _has_gradient(tensor)]
        return _own_rows(of_results, shapes, part_of(name, "gradient"), process_set)

    return _apply(run, gradients, tensors)


def _own_rows(
    gathered: Tensors, shapes: Sequence[torch.Size], name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    """The averages over the ranks of gradients of gathered tensors, of which this rank gave those with `shapes`."""
    own = torch.tensor([[shape[0] if shape else 1 for shape in shapes]], device="cpu")
    rows = ops.allgather_async(own, part_of(name, "rows"), process_set)
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
    """Give all ranks the tensor of one of them, as `ringtrain.broadcast`. Mirrors `horovod.torch.broadcast`.

    Differentiable: the average of the gradients goes to the root, zeros to the others.
    """

    def run(tensors: Tensors) -> Tensors:
        return [ops.broadcast(tensors[0], root_rank, name, process_set)]

    def gradients(of_results: Tensors) -> Tensors:
        average = allreduce(of_results[0], None, part_of(name, "gradient"), process_set=process_set)
        is_root = (process_set.ranks or []).index(root_rank) == process_set.rank()
        # Zeros in the graph of the average: all ranks have to take part where it is differentiated again.
        is_zero = torch.tensor(not is_root, device=average.device)
        return [average.masked_fill(is_zero, 0)]

    return _apply(run, gradients, [tensor])[0]


# ----------------------------------------------------------------------------------------------------------- alltoall


@overload
def alltoall(
    tensor: torch.Tensor, splits: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor: ...
@overload
def alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, torch.Tensor]: ...
def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send some rows to each rank and receive some, as `ringtrain.alltoall`. Mirrors `horovod.torch.alltoall`.

    Differentiable: the gradients travel back.

    Returns:
        A new tensor: the rows from rank 0, then those from rank 1, and so on. With `splits` a pair of that and of how
        many rows came from each rank, of the dtype of `splits`, or int32 if that is not a tensor.
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
        return [alltoall(of_results[0], received[0], part_of(name, "gradient"), process_set)[0]]

    result = _apply(run, gradients, [tensor])[0]
    return result if splits is None else (result, received[0])


def _even_splits(tensor: torch.Tensor, process_set: ProcessSet) -> list[int] | None:
    """None where there are none: the operation says why."""
    require_process_set(process_set, "alltoall")
    ranks = process_set.size()
    if not ranks or tensor.dim() == 0 or tensor.shape[0] % ranks:
        return None
    return [tensor.shape[0] // ranks] * ranks


# --- sparse tensors: gathered, not summed element by element; and which gradients are sparse --------------------------


class SparseHandle:
    """One sparse allreduce under way. Give it to `synchronize` or `poll`, or call it as in Horovod."""

    def __init__(self, shape: torch.Size, indices: Handle[torch.Tensor], values: Handle[torch.Tensor], divisor: int):
        self._shape = shape
        self._indices = indices
        self._values = values
        self._divisor = divisor

    def poll(self) -> bool:
        """Whether `wait` returns at once."""
        return self._indices.poll() and self._values.poll()

    def wait(self) -> torch.Tensor:
        """Wait for the operation and return its result.

        Raises:
            RingtrainError: the operation failed; see ringtrain.errors.
        """
        values = self._values.wait()
        return sum_sparse(self._indices.wait().t(), values, self._shape, self._divisor)

    __call__ = wait


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
) -> SparseHandle:
    """Sum or average sparse tensors over the ranks. Mirrors `horovod.torch.sparse_allreduce_async`.

    Args:
        tensor: in COO layout, of the same shape and dtype on all ranks, with any number of values on each.
        name: the same on all ranks.
        op: Average or Sum.
        process_set: the ranks that take part.

    Returns:
        A handle for `synchronize`, whose result is a coalesced sparse tensor, the same on all ranks. Its values are
        those of an allreduce of dense tensors: 16-bit floats are summed in float32, averages of integers are truncated.

    Raises:
        TypeError: the tensor is not sparse in COO layout.
        ValueError: another op, or an index outside of the tensor.
    """
    title = "sparse_allreduce_async" + (f' "{name}"' if name else "")
    if not torch.is_tensor(tensor) or tensor.layout is not torch.sparse_coo:
        raise TypeError(f"{title} takes a tensor in COO layout, not {getattr(tensor, 'layout', type(tensor).__name__)}")
    if op not in (Average, Sum):
        raise ValueError(f"{title}: op must be Average or Sum, not {getattr(op, 'name', op)}")
    require_indices(title, tensor)
    own = coalesced(tensor.detach())
    # Rows of indices, since gathering concatenates along the first dimension.
    indices = ops.allgather_async(own.indices().t().contiguous(), part_of(name, "indices"), process_set)
    values = ops.allgather_async(own.values(), part_of(name, "values"), process_set)
    return SparseHandle(tensor.shape, indices, values, (process_set.size() or 1) if op == Average else 1)


def empty_sparse(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sparse gradient of an embedding of which no row was looked up; `like` is its weight."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=like.device)
    values = torch.empty(0, *like.shape[1:], dtype=dtype or like.dtype, device=like.device)
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)


def agree_on_sparse(gradients: Sequence[torch.Tensor | None], name: str, process_set: ProcessSet) -> list[bool | None]:
    """Whether each gradient is sparse on all ranks that have it, None if none has; all of them call it together.

    Args:
        gradients: of the same parameters on all ranks; None where this rank has none.
        name: the same on all ranks.
        process_set: the ranks that take part; those that have joined need not.
    """
    is_sparse = [gradient is not None and gradient.is_sparse for gradient in gradients]
    is_dense = [gradient is not None and not gradient.is_sparse for gradient in gradients]
    # Ranks whose parameters differ in number are told by the first gradient that has no counterpart.
    is_odd = torch.tensor([any(is_sparse), not all(is_dense)], dtype=torch.int32, device="cpu")
    any_sparse, any_missing = ops.allreduce(is_odd, op=Sum, name=name, process_set=process_set).tolist()
    if not any_sparse and not any_missing:
        return [False] * len(gradients)
    counts = torch.tensor([is_sparse, is_dense], dtype=torch.int32, device="cpu")
    counts = ops.allreduce(counts, op=Sum, name=name, process_set=process_set)
    return [None if sparse + dense == 0 else dense == 0 for sparse, dense in counts.t().tolist()]


docstrings.complete(globals(), vars(ops))
