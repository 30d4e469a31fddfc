"""PyTorch tensors, on a CUDA device in the order of torch's current stream.

Those on other devices go through the host's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ml_dtypes
import torch

import ringtrain._core as _core
from ringtrain.arrays.numpy import SMALL_BYTES, require_results as require_results

MAKES = "torch"
_DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): number for name, number in _core.DTYPES.items() if hasattr(torch, name)
}
# Of complex numbers, what their parts are.
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
# A tensor of any other type may wrap others, which have its elements.
PLAIN_TYPES: set[type] = {torch.Tensor, torch.nn.Parameter}
_STRIDED = torch.strided
# Not what a build for ROCm calls so.
_HAS_CUDA = torch.version.cuda is not None
_View = tuple[int, int, tuple[int, ...]] | tuple[int, int, tuple[int, ...], int, int]


def accepts(array: Any) -> bool:
    return isinstance(array, torch.Tensor)


def prepare(tensor: torch.Tensor) -> torch.Tensor:
    check_has_elements(tensor)
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"ringtrain cannot send a tensor with the layout {tensor.layout}; make it dense with to_dense(), or use "
            "sparse_allreduce_async of ringtrain.torch"
        )
    if tensor.dtype not in _DTYPES and tensor.dtype not in _PARTS:
        names = ", ".join(str(dtype) for dtype in (*_DTYPES, *_PARTS))
        raise TypeError(f"ringtrain cannot send dtype {tensor.dtype}; convert it to one of {names}")
    if tensor.is_meta:
        raise ValueError("ringtrain cannot send a tensor on the meta device: it has no values")
    stays = tensor.is_cpu or _is_on_gpu(tensor)
    if stays and _is_plain(tensor):
        return tensor
    values = tensor.detach().resolve_conj().resolve_neg()
    return (values if stays else values.cpu()).contiguous()


def check_has_elements(tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor of a type that wraps others."""
    if type(tensor) in PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_meta:
        return
    if tensor.numel() and not tensor.data_ptr():
        raise TypeError(
            f"ringtrain cannot send a {type(tensor).__name__}: its elements are in other tensors, which it wraps; send "
            "those, such as to_local() of a DTensor, or make a plain tensor of it"
        )


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and _HAS_CUDA


def _current_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# The one without an object for the stream takes a tenth of the time.
stream_of_device: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements are in memory unchanged, in the usual order."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def is_in_place(tensor: torch.Tensor) -> bool:
    repeats = (stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
    if tensor.numel() > 0 and any(repeats):
        raise ValueError(
            "an operation in place needs a tensor whose elements have places of their own; this one was expanded"
        )
    return (tensor.is_cpu or _is_on_gpu(tensor)) and _is_plain(tensor)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def copy_of_small(tensor: Any) -> torch.Tensor | None:
    if type(tensor) not in PLAIN_TYPES or not tensor.is_cpu or tensor.layout is not _STRIDED:
        return None
    if tensor.nbytes > SMALL_BYTES or tensor.dtype not in _DTYPES:
        return None
    copied: torch.Tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copied


def view(tensor: torch.Tensor) -> _View:
    real = torch.view_as_real(tensor.detach()) if tensor.dtype in _PARTS else tensor
    return _view(real, _DTYPES[real.dtype])


def _view(tensor: torch.Tensor, dtype: int) -> _View:
    if tensor.is_cpu:
        return tensor.data_ptr(), dtype, tensor.shape
    device = tensor.get_device()
    return tensor.data_ptr(), dtype, tensor.shape, device, stream_of_device(device)


def view_in_place(tensor: torch.Tensor) -> _View | None:
    # Of every gradient in every step, so nothing is looked up or called that need not be.
    if type(tensor) not in PLAIN_TYPES:
        return None
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not _STRIDED or not tensor.is_contiguous() or tensor.is_neg():
        return None
    if tensor.is_cpu:
        return tensor.data_ptr(), dtype, tensor.shape
    return _view(tensor, dtype) if _is_on_gpu(tensor) else None


def assign(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def assign_host(target: torch.Tensor, values: Any) -> None:
    plain = values.astype("float32") if values.dtype == ml_dtypes.bfloat16 else values
    assign(target, torch.from_numpy(plain))


def set_rows(tensor: torch.Tensor, numbers: Any, rows: Any) -> None:
    """Give a sparse_coo tensor these rows, in its dtype, and no others; they are in order."""
    values = torch.empty(rows.shape, dtype=tensor.dtype, device=tensor.device)
    assign_host(values, rows)
    indices = torch.from_numpy(numbers).reshape(1, -1).to(tensor.device)
    with torch.no_grad():
        tensor.copy_(_as_coalesced(indices, values, tensor.shape))


def coalesced(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a sparse_coo tensor with each index once; 16-bit floats are summed in float32, unlike by `coalesce()`."""
    if tensor.is_coalesced():
        return tensor
    return sum_sparse(tensor._indices(), tensor._values(), tensor.shape)


def sum_sparse(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], divisor: int = 1) -> torch.Tensor:
    """Returns a coalesced tensor with the sums of values of one index, divided. Rounded as the sum of dense tensors.

    Args:
        indices: int64[dimensions, n], all within the shape.
        values: n of them.
        shape: of the tensor.
        divisor: 2 or more for an average, also of integers.
    """
    if not (values.is_cpu and indices.numel()):
        return _sum_by_coalesce(indices, values, shape, divisor)
    if len(indices) == 1:
        merged, places = torch.unique(indices, return_inverse=True)
        of_sums = merged[None]
    else:
        of_sums, places = torch.unique(indices, dim=1, return_inverse=True)
    total = torch.empty((of_sums.shape[1], *values.shape[1:]), dtype=values.dtype)
    _core.sum_rows(view(places.reshape(-1)), view(prepare(values)), view(total), 1 / divisor)
    return _as_coalesced(of_sums, total, shape)


def _sum_by_coalesce(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], divisor: int) -> torch.Tensor:
    """By torch's `coalesce`, which is the only sum of rows on a GPU that has the same bits in each run."""
    is_short = values.is_floating_point() and values.dtype.itemsize < 4
    wide = values.float() if is_short else values
    total = torch.sparse_coo_tensor(indices, wide, tuple(shape), check_invariants=False).coalesce()
    sums = total.values()
    if divisor != 1 and values.dtype != torch.bool:
        is_integer = not (sums.is_floating_point() or sums.is_complex())
        sums = sums.div(divisor, rounding_mode="trunc") if is_integer else sums * (1 / divisor)
    return _as_coalesced(total.indices(), sums.to(values.dtype), shape)


def _as_coalesced(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    made = (indices, values, tuple(shape))
    return torch.sparse_coo_tensor(*made, is_coalesced=True, check_invariants=False)


def require_indices(title: str, tensor: torch.Tensor) -> None:
    """Raises ValueError where an index of a sparse_coo tensor is outside of it, which torch does not check."""
    indices = tensor._indices()
    if not indices.shape[1]:
        return
    smallest, largest = indices.amin(1).tolist(), indices.amax(1).tolist()
    for dimension, (low, high) in enumerate(zip(smallest, largest, strict=True)):
        length = tensor.shape[dimension]
        if low < 0 or high >= length:
            raise ValueError(
                f"{title}: indices of dimension {dimension} must be in 0..{length - 1}, not in {low}..{high}"
            )


def note_change(tensor: torch.Tensor) -> None:
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def from_memory(memory: Any, shape: list[int], like: torch.Tensor) -> torch.Tensor:
    shape = shape[:-1] if like.dtype in _PARTS else shape
    if not isinstance(memory, _core.GpuMemory):
        return torch.from_numpy(memory).view(like.dtype).reshape(shape)
    tensor = torch.empty(shape, dtype=like.dtype, device=f"cuda:{memory.device}")
    memory.copy_to(tensor.data_ptr(), stream_of_device(memory.device))
    return tensor


def returned(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if _is_on_gpu(tensor):
        # It may have been made in another stream, to which torch gives its memory back.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor.to(like.device)


def rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def is_finite(tensor: torch.Tensor) -> Any:
    values = tensor.detach()
    if values.is_sparse:
        values = coalesced(values).values()
    if not values.numel():
        return True
    if _is_on_gpu(values) and values.is_floating_point():
        return torch.isfinite(torch.linalg.vector_norm(values, math.inf))
    # The sum takes one look at each element, but may be too large itself.
    total = values.sum(dtype=torch.float32 if values.dtype.itemsize < 4 else None)
    return bool(torch.isfinite(total) or torch.isfinite(values).all())


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def cast(tensor: torch.Tensor, dtype_name: str) -> torch.Tensor:
    return tensor.to(getattr(torch, dtype_name))


def received_splits(numbers: list[int], sent: Any) -> torch.Tensor:
    if isinstance(sent, torch.Tensor):
        return torch.tensor(numbers, dtype=sent.dtype, device=sent.device)
    return torch.tensor(numbers, dtype=torch.int32, device="cpu")


def stream(tensor: torch.Tensor) -> int | None:
    return stream_of_device(tensor.get_device()) if _is_on_gpu(tensor) else None


def device(tensor: torch.Tensor) -> int:
    return tensor.get_device() if _is_on_gpu(tensor) else -1


def stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors))


def on_host(tensor: torch.Tensor) -> Any:
    values = tensor.detach().resolve_conj().resolve_neg().cpu()
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return values.numpy()


def in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def at_place_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device == like.device else tensor.detach().to(like.device)


def at_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(tensor.device) if _is_on_gpu(tensor) else nullcontext()


def on_device(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    try:
        return tensor.to(device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"PyTorch has no device {device!r}: {error}") from None
