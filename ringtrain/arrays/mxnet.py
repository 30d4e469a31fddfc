"""MXNet's NDArrays and its `mx.np` arrays, in the host's memory; those elsewhere go through it.

These functions wait until an array is computed. `ringtrain.mxnet` has operations that do not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import mxnet
import numpy as np
from mxnet.base import _LIB, check_call

import ringtrain._core as _core
from ringtrain.arrays import numpy as numpy_adapter
from ringtrain.arrays.numpy import (
    at_device_of as at_device_of,
    device as device,
    no_copy,
    note_change as note_change,
    require_results as require_results,
    stream as stream,
)

MAKES = "mxnet"
copy_of_small = no_copy
# The name in MXNet 1.x.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
_BY_NAME: dict[str, Any] = {
    "bfloat16": BFLOAT16,
    **{
        name: np.dtype(name).type
        for name in ("bool", "uint8", "int8", "int32", "int64", "float16", "float32", "float64")
    },
}
# NDArrays have the types of NumPy's scalars here, and `mx.np` arrays have dtypes.
_NAMES = {kind: name for name, dtype in _BY_NAME.items() for kind in (dtype, np.dtype(dtype))}
_DTYPES = {kind: _core.DTYPES[name] for kind, name in _NAMES.items()}
_HOST = ("cpu", "cpu_pinned", "cpu_shared")
# Without CUDA in it there are no arrays elsewhere, and to ask one is a call of libmxnet.so.
_HAS_CUDA = mxnet.runtime.Features().is_enabled("CUDA")


def accepts(array: Any) -> bool:
    return isinstance(array, mxnet.nd.NDArray)


def prepare(array: Any) -> Any:
    if array.stype != "default":
        raise TypeError(
            f"ringtrain cannot send an NDArray of the storage type {array.stype}: make it dense with "
            'tostype("default"), or give row_sparse gradients to DistributedTrainer of ringtrain.mxnet'
        )
    if array.dtype not in _DTYPES:
        raise TypeError(f"ringtrain cannot send dtype {array.dtype}; of MXNet it takes {', '.join(_BY_NAME)}")
    return array if is_on_host(array) else array.as_in_context(mxnet.cpu())


def is_on_host(array: Any) -> bool:
    return not _HAS_CUDA or array.context.device_type in _HOST


def is_in_place(array: Any) -> bool:
    return is_on_host(array)


def empty_like(array: Any) -> Any:
    return _empty(array.shape, array)


def _empty(shape: Sequence[int], like: Any) -> Any:
    """In the host's memory. Of a scalar or without elements, too, which MXNet's older arrays are not by themselves."""
    of_numpy = isinstance(like, mxnet.np.ndarray)
    with mxnet.util.np_shape(True):
        return (mxnet.np if of_numpy else mxnet.nd).empty(tuple(shape), ctx=mxnet.cpu(), dtype=like.dtype)


def view(array: Any) -> tuple[int, int, tuple[int, ...]]:
    address = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayWaitToWrite(array.handle))
    # It also brings what MKLDNN has in a layout of its own into the usual one.
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    return address.value or 0, _DTYPES[array.dtype], array.shape


def view_in_place(array: Any) -> tuple[int, int, tuple[int, ...]] | None:
    if array.stype != "default" or array.dtype not in _DTYPES or not is_on_host(array):
        return None
    return view(array)


class _Memory:
    """Keeps an array for NumPy, which looks at its memory."""

    def __init__(self, array: Any) -> None:
        address, _, shape = view(array)
        dtype = np.dtype(np.uint16) if array.dtype == BFLOAT16 else np.dtype(array.dtype)
        self._array = array
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": shape, "typestr": dtype.str}


def memory_of(array: Any) -> np.ndarray[Any, Any]:
    """The array on the host as one of NumPy's over the same memory, once it is computed and no operation reads it.

    MXNet does not know that the memory is used: none of its operations may touch the array meanwhile.
    """
    if 0 in array.shape:
        return np.empty(array.shape, numpy_dtype(array))
    values = np.asarray(_Memory(array))
    return values.view(ml_dtypes.bfloat16) if array.dtype == BFLOAT16 else values


def numpy_dtype(array: Any) -> np.dtype[Any]:
    """The dtype that an array of NumPy with the same elements has."""
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16 if array.dtype == BFLOAT16 else array.dtype)
    return dtype


def assign(target: Any, source: Any) -> None:
    source.copyto(target)


def assign_host(target: Any, values: np.ndarray[Any, Any]) -> None:
    if is_on_host(target):
        memory_of(target)[...] = values
    else:
        target[:] = values


def from_memory(memory: Any, shape: list[int], like: Any) -> Any:
    new = _empty(shape, like)
    memory_of(new)[...] = memory.view(numpy_dtype(like)).reshape(shape)
    return new


def returned(array: Any, like: Any) -> Any:
    return array if is_on_host(like) else array.as_in_context(like.context)


def rows(array: Any) -> Any:
    return array.reshape((1,)) if array.ndim == 0 else array


def is_finite(array: Any) -> bool:
    return numpy_adapter.is_finite(on_host(array))


def dtype_name(array: Any) -> str:
    return _NAMES.get(array.dtype) or str(array.dtype)


def cast(array: Any, dtype_name: str) -> Any:
    return array.astype(_BY_NAME[dtype_name])


def received_splits(numbers: list[int], sent: Any) -> Any:
    return mxnet.nd.array(numbers, dtype="int32")


def stack(arrays: Sequence[Any]) -> Any:
    return mxnet.nd.stack(*arrays)


def on_host(array: Any) -> np.ndarray[Any, Any]:
    copy: np.ndarray[Any, Any] = memory_of(prepare(array)).copy()
    return copy


def in_host_memory(array: Any) -> Any:
    return array if is_on_host(array) else array.as_in_context(mxnet.cpu())


def at_place_of(array: Any, like: Any) -> Any:
    return array.as_in_context(like.context)


def on_device(array: Any, device: Any) -> Any:
    if not isinstance(device, mxnet.Context):
        raise ValueError(f"MXNet has no device {device!r}: give a context such as mx.cpu()")
    return array.as_in_context(device)
