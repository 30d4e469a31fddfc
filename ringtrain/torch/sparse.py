"""The allreduce of sparse tensors: gathered, not summed element by element; and which gradients are sparse."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringtrain import ops
from ringtrain._core import ReduceOp
from ringtrain.handles import Handle
from ringtrain.objects import part_of
from ringtrain.ops import Average, Sum
from ringtrain.process_sets import ProcessSet, global_process_set


class SparseHandle:
    """One sparse allreduce under way. Give it to `synchronize` or `poll`, or call it as in Horovod."""

    def __init__(self, tensor: torch.Tensor, indices: Handle[torch.Tensor], values: Handle[torch.Tensor], divisor: int):
        self._like = tensor
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
        indices = self._indices.wait().t()
        if self._divisor != 1:
            values = values / self._divisor
        return torch.sparse_coo_tensor(indices, values, self._like.shape, check_invariants=False).coalesce()

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
        A handle for `synchronize`, whose result is a coalesced sparse tensor, the same on all ranks.

    Raises:
        TypeError: the tensor is not sparse in COO layout.
        ValueError: another op, or an average of integers.
    """
    title = "sparse_allreduce_async" + (f' "{name}"' if name else "")
    if not torch.is_tensor(tensor) or tensor.layout is not torch.sparse_coo:
        raise TypeError(f"{title} takes a tensor in COO layout, not {getattr(tensor, 'layout', type(tensor).__name__)}")
    if op not in (Average, Sum):
        raise ValueError(f"{title}: op must be Average or Sum, not {getattr(op, 'name', op)}")
    if op == Average and not tensor.dtype.is_floating_point:
        raise ValueError(f"{title}: an average of {tensor.dtype} is no {tensor.dtype}; use op=Sum, or convert to float")
    coalesced = tensor.detach().coalesce()
    # Rows of indices, since gathering concatenates along the first dimension.
    indices = ops.allgather_async(coalesced.indices().t().contiguous(), part_of(name, "indices"), process_set)
    values = ops.allgather_async(coalesced.values(), part_of(name, "values"), process_set)
    return SparseHandle(tensor, indices, values, (process_set.size() or 1) if op == Average else 1)


def empty_sparse(like: torch.Tensor) -> torch.Tensor:
    """The sparse gradient of an embedding of which no row was looked up; `like` is its weight."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=like.device)
    values = torch.empty(0, *like.shape[1:], dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)


def agree_on_sparse(gradients: Sequence[torch.Tensor | None], name: str, process_set: ProcessSet) -> list[bool]:
    """Whether each gradient is sparse on all ranks that have it; all of them call it together.

    Args:
        gradients: of the same parameters on all ranks; None where this rank has none.
        name: the same on all ranks.
        process_set: the ranks that take part; those that have joined need not.
    """
    is_sparse = torch.tensor([gradient is not None and gradient.is_sparse for gradient in gradients], device="cpu")
    # Where all is dense, ranks whose parameters differ are told by the first gradient that has no counterpart.
    if not ops.allreduce(is_sparse.sum(), op=Sum, name=name, process_set=process_set):
        return [False] * len(gradients)
    is_dense = torch.tensor([gradient is not None and not gradient.is_sparse for gradient in gradients], device="cpu")
    counts = ops.allreduce(torch.stack([is_sparse, is_dense]).int(), op=Sum, name=name, process_set=process_set)
    return [sparse > 0 and dense == 0 for sparse, dense in counts.t().tolist()]
