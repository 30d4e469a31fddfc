"""Tensors of torch as the engine takes them, and results as torch expects them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ringtrain._core as _core
from ringtrain._core import ReduceOp
from ringtrain.arrays import torch as adapter
from ringtrain.arrays.adapter import View

Tensor = torch.Tensor

_DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): number for name, number in _core.DTYPES.items() if hasattr(torch, name)
}
_BYTE = _core.DTYPES["uint8"]
_PARTS = {torch.complex64: _core.DTYPES["float32"], torch.complex128: _core.DTYPES["float64"]}

RedOp: Any = dist.ReduceOp.RedOpType
_OPS = {
    RedOp.SUM: ReduceOp.Sum,
    RedOp.AVG: ReduceOp.Average,
    RedOp.MIN: ReduceOp.Min,
    RedOp.MAX: ReduceOp.Max,
    RedOp.PRODUCT: ReduceOp.Product,
}
BITWISE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    RedOp.BAND: torch.bitwise_and,
    RedOp.BOR: torch.bitwise_or,
    RedOp.BXOR: torch.bitwise_xor,
}


def list_of(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def seconds_of(timeout: timedelta) -> float:
    """Raises TypeError for what is not a timedelta, ValueError for one below zero."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"the timeout must be a datetime.timedelta, not {timeout!r}")
    if timeout < timedelta(0):
        raise ValueError(f"the timeout must not be negative, but is {timeout}")
    return timeout.total_seconds()


def op_of(opts: Any) -> Any:
    """The RedOpType of what torch gives: options, a ReduceOp, or nothing."""
    given = getattr(opts, "reduceOp", opts)
    if given is None or isinstance(given, timedelta):
        return RedOp.SUM
    op = getattr(given, "op", given)
    if op == RedOp.PREMUL_SUM:
        raise ValueError("ringtrain has no PREMUL_SUM; multiply the tensor and use SUM, or use AVG")
    return op


def needs_all_values(op: Any, tensors: list[Tensor]) -> bool:
    """Whether the engine has no such reduction. Of bool it has AND and OR as smallest and largest."""
    return op == RedOp.BXOR or (op in BITWISE and any(tensor.dtype is not torch.bool for tensor in tensors))


def reduction_of(op: Any, tensors: list[Tensor], kind: str) -> ReduceOp:
    """The engine's op. Raises TypeError where a dtype does not have it."""
    for tensor in tensors:
        if tensor.dtype is torch.bool and op in (RedOp.BAND, RedOp.BOR):
            return ReduceOp.Min if op == RedOp.BAND else ReduceOp.Max
        has_average = tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.int64
        if op == RedOp.AVG and not has_average:
            raise TypeError(f"{kind}: {tensor.dtype} has no AVG; convert to torch.int64 or a float")
        if tensor.dtype in _PARTS and op not in (RedOp.SUM, RedOp.AVG):
            raise TypeError(f"{kind}: {tensor.dtype} has SUM and AVG, not {op.name}")
        if tensor.dtype not in _DTYPES and tensor.dtype not in _PARTS:
            raise TypeError(f"{kind}: ringtrain cannot reduce {tensor.dtype}; convert it to float32 or bfloat16")
    return _OPS[op]


def require_movable(tensor: Tensor, kind: str) -> None:
    """Raises ValueError for what is neither in host memory nor on a GPU of CUDA, TypeError for what is not dense."""
    if not tensor.is_cpu and adapter.device(tensor) < 0:
        raise ValueError(
            f"{kind}: the tensor is on {tensor.device}; a ringtrain group takes tensors in host memory and on GPUs of "
            "CUDA: use .cpu(), or another backend for this device"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{kind}: the tensor has the layout {tensor.layout}; make it dense with to_dense()")


def contiguous(tensor: Tensor, kind: str) -> Tensor:
    """The tensor, or a contiguous copy. Raises as require_movable()."""
    require_movable(tensor, kind)
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def view_of(tensor: Tensor, kind: str, shape: tuple[int, ...] | None = None) -> View:
    """Returns the view that the core needs of a contiguous tensor: one dimension, unless `shape` says otherwise."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is not None:
        return _view(tensor, dtype, (tensor.numel(),) if shape is None else shape)
    dtype = _PARTS.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"{kind}: ringtrain cannot send {tensor.dtype}")
    doubled = (
        (2 * tensor.numel(),) if shape is None else (*shape[:-1], 2 * tensor.numel() // max(1, math.prod(shape[:-1])))
    )
    return _view(tensor, dtype, doubled)


def bytes_view_of(tensor: Tensor, kind: str) -> View:
    """As view_of, of any dtype: what is only moved may be bytes."""
    if tensor.dtype in _DTYPES or tensor.dtype in _PARTS:
        return view_of(tensor, kind)
    return _view(tensor, _BYTE, (tensor.numel() * tensor.element_size(),))


def _view(tensor: Tensor, dtype: int, shape: tuple[int, ...]) -> View:
    if tensor.is_cpu:
        return tensor.data_ptr(), dtype, shape
    device = tensor.get_device()
    return tensor.data_ptr(), dtype, shape, device, adapter.stream_of_device(device)


def with_shape(view: View, shape: tuple[int, ...]) -> View:
    """Returns the view of the same elements in another shape."""
    return (*view[:2], shape, *view[3:])


def require_one_place(views: Sequence[View], title: str) -> None:
    """Raises ValueError unless all tensors of an operation are in host memory, or all on one GPU."""
    places = {view[3:4] for view in views}
    if len(places) > 1:
        text = " and ".join(f"on GPU {place[0]}" if place else "in host memory" for place in sorted(places))
        raise ValueError(f"{title}: its tensors are {text}; put them in one place")


def host_copy(tensor: Tensor, kind: str, has_values: bool) -> Tensor:
    """Returns the tensor if it is in host memory, else a tensor there for a message from it or to it.

    Raises as require_movable().
    """
    if tensor.is_cpu:
        return contiguous(tensor, kind)
    require_movable(tensor, kind)
    if has_values:
        return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def elements_of(tensor: Tensor) -> int:
    """How many elements of the core one of its elements is."""
    if tensor.dtype in _PARTS:
        return 2
    return 1 if tensor.dtype in _DTYPES else tensor.element_size()


def shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors have elements in common."""
    first, second = sorted([one, other], key=lambda tensor: tensor.data_ptr())
    return second.data_ptr() < first.data_ptr() + first.numel() * first.element_size()


def nothing_of(tensor: Tensor) -> Tensor:
    """Returns a tensor without elements, in the same place."""
    return tensor.detach().reshape(-1).narrow(0, 0, 0)


def assign(target: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        target.detach().copy_(values)


def require_writable(tensors: Sequence[Tensor]) -> None:
    """Raises ValueError for a tensor that cannot take a result, since elements of it share memory."""
    for tensor in tensors:
        if tensor.is_contiguous():
            continue
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(
                f"elements of the tensor of shape {tuple(tensor.shape)} share memory, as after expand(), so it cannot "
                "take a result; use .contiguous()"
            )


def copies_back(targets: list[Tensor], memory: list[Tensor]) -> Callable[[_core.Handle], None] | None:
    """Returns the copying back of results that are in a copy. Raises as require_writable()."""
    copied = [(target, one) for target, one in zip(targets, memory, strict=True) if target is not one]
    if not copied:
        return None
    require_writable(targets)

    def finish(_: _core.Handle) -> None:
        for target, one in copied:
            assign(target, one)

    return finish


def gathered_rows(handle: _core.Handle, like: Tensor) -> Tensor:
    """The rows of all ranks, which are as those of `like`."""
    return _allocated(handle, like).reshape(-1, *like.shape[1:])


def _allocated(handle: _core.Handle, like: Tensor) -> Tensor:
    """Returns the elements of a result that the engine has allocated."""
    ((memory, _, shape),) = handle.tensors()
    if not math.prod(shape):
        return torch.empty(0, dtype=like.dtype, device=like.device)
    if not isinstance(memory, _core.GpuMemory):
        return torch.from_numpy(memory).view(like.dtype)
    values = torch.empty(math.prod(shape) // elements_of(like), dtype=like.dtype, device=like.device)
    memory.copy_to(values.data_ptr(), adapter.stream_of_device(memory.device))
    return values


def deliver(kind: str, targets: list[Tensor], handle: _core.Handle, like: Tensor) -> None:
    """From the memory of the result, one after the other."""
    values = _allocated(handle, like)
    counts = [target.numel() for target in targets]
    if sum(counts) != values.numel():
        raise ValueError(f"{kind}: {values.numel()} elements came, but the outputs have {sum(counts)}")
    for target, part in zip(targets, values.split(counts), strict=True):
        assign(target, part.reshape(target.shape))
