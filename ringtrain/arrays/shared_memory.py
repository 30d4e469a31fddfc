"""Arrays in memory that the ranks of a node share."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import ringtrain._core as _core
from ringtrain.arrays.numpy import dtype_of
from ringtrain.errors import NotInitializedError, RingtrainError

if TYPE_CHECKING:
    import numpy.typing as npt


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32, *, device: int | None = None) -> Any:
    """A new array, not initialised, for which an allreduce in place costs least.

    It is in memory that the ranks of a node share: `allreduce_` and `grouped_allreduce_` work on it without copying,
    if the arrays of all ranks come from here. Whole arrays and views that are contiguous count alike. Gradients are
    what it is for: they are made once and reduced in every step. Other libraries can use it, too:
    `torch.from_numpy(ringtrain.empty(shape))`.

    Where ranks share no memory (a job of one rank, `shared_memory=off`, several nodes) it is like any other array; when
    /dev/shm is full, so it is after a warning. The memory is returned when the last array that uses it goes, also after
    shutdown(). A forked child, such as the worker of a DataLoader, sees the same memory: what it lets go of stays with
    its parent, and what it writes is written for the parent, too.

    On a GPU it is a CuPy array in memory of ncclMemAlloc that all communicators know ("user-buffer registration"), so
    that NCCL sends from it and receives into it without copying where the hardware can, for a sum without a factor;
    where NCCL has no such memory it is like any other. The memory is used again for other arrays when ringtrain's
    streams and the default one have come past the moment when the array went; who works with it in other streams
    keeps it until they are done. It is returned when the last array has gone after shutdown().

    Args:
        shape: as for numpy.empty.
        dtype: any that an operation takes.
        device: the number of this rank's GPU; None for the host's memory.

    Raises:
        NotInitializedError: before init().
    """
    dtype = dtype_of(dtype)
    if device is not None:
        return _empty_on_gpu(shape, dtype, device)
    lengths = [operator.index(length) for length in np.atleast_1d(np.asarray(shape, dtype=object))]
    if any(length < 0 for length in lengths):
        raise ValueError(f"negative dimensions are not allowed, but the shape is {lengths}")
    try:
        memory = _core.empty_bytes(math.prod(lengths) * dtype.itemsize)
    except NotInitializedError:
        raise
    except RingtrainError as error:
        warnings.warn(f"ringtrain.empty gives ordinary memory, which is slower to reduce: {error}", stacklevel=2)
        memory = None
    if memory is None:
        return np.empty(lengths, dtype)
    array: npt.NDArray[Any] = memory.view(dtype).reshape(lengths)
    return array


def _empty_on_gpu(shape: int | Sequence[int], dtype: np.dtype[Any], device: int) -> Any:
    from ringtrain.arrays import cupy

    lengths = (shape,) if isinstance(shape, int) else tuple(shape)
    memory = _core.gpu_bytes(math.prod(lengths) * dtype.itemsize, device)
    return cupy.empty_on(device, lengths, dtype) if memory is None else cupy.over(memory, lengths, dtype)
