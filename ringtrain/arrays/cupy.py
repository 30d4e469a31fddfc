"""CuPy arrays, in place on the GPU and in the order of CuPy's current stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import cupy
import numpy as np

from ringtrain.arrays.numpy import (
    DTYPES,
    dtype_name as dtype_name,
    no_copy,
    note_change as note_change,
    require_known,
    require_results as require_results,
    returned as returned,
    rows as rows,
    shape_from_core,
    spec_of,
)

MAKES = "cupy"
copy_of_small = no_copy
_DeviceView = tuple[int, int, tuple[int, ...], int, int]
_current_stream = cupy.cuda.get_current_stream


def accepts(array: Any) -> bool:
    return isinstance(array, cupy.ndarray)


def prepare(array: Any) -> Any:
    require_known(array.dtype)
    if array.flags.c_contiguous:
        return array
    with array.device:
        return array.copy(order="C")


def is_in_place(array: Any) -> bool:
    repeats = (stride == 0 and length > 1 for stride, length in zip(array.strides, array.shape, strict=True))
    if array.size > 0 and any(repeats):
        raise ValueError(
            "an operation in place needs an array whose elements have places of their own; this one was broadcast"
        )
    return bool(array.flags.c_contiguous)


def empty_like(array: Any) -> Any:
    with array.device:
        return cupy.empty(array.shape, array.dtype)


def view(array: Any) -> _DeviceView:
    data = array.data
    device = data.device_id
    return data.ptr, *spec_of(array), device, _current_stream(device).ptr


def view_in_place(array: Any) -> _DeviceView | None:
    # Of every gradient in every step. `flags` would make an object of its own, and with it half of the time again.
    try:
        dtype = DTYPES[array.dtype]
    except KeyError:
        return None
    if not array._c_contiguous:
        return None
    data = array.data
    device = data.device_id
    return data.ptr, dtype, array.shape, device, _current_stream(device).ptr


def assign(target: Any, source: Any) -> None:
    with target.device:
        target[...] = source


def assign_host(target: Any, values: Any) -> None:
    with target.device:
        target[...] = cupy.asarray(values)


def from_memory(memory: Any, shape: list[int], like: Any) -> Any:
    with cupy.cuda.Device(memory.device):
        array = cupy.empty(shape_from_core(shape, like), like.dtype)
    memory.copy_to(array.data.ptr, stream(array))
    return array


def is_finite(array: Any) -> Any:
    if array.dtype.kind in "biu":
        return True
    with array.device:
        return cupy.isfinite(array).all()


def cast(array: Any, dtype_name: str) -> Any:
    with array.device:
        return array.astype(dtype_name)


def received_splits(numbers: list[int], sent: Any) -> Any:
    if not accepts(sent):
        return np.array(numbers, np.int64)
    with sent.device:
        return cupy.array(numbers, np.int64)


def stream(array: Any) -> int:
    return stream_of_device(array.data.device_id)


def stream_of_device(device: int) -> int:
    return int(_current_stream(device).ptr)


def device(array: Any) -> int:
    return int(array.data.device_id)


def stack(arrays: Sequence[Any]) -> Any:
    with arrays[0].device:
        return cupy.stack(arrays)


def on_host(array: Any) -> Any:
    with array.device:
        return array.get()


in_host_memory = on_host


def at_place_of(array: Any, like: Any) -> Any:
    if array.device == like.device:
        return array
    return _copied_to(array, like.device)


def _copied_to(array: Any, device: Any) -> Any:
    """In the order of the current streams of both devices."""
    here, there = _current_stream(array.data.device_id), _current_stream(device.id)
    with array.device:
        contiguous = prepare(array)
        ready = here.record()
    with device:
        there.wait_event(ready)
        copy = contiguous.copy()
        copied = there.record()
    with array.device:
        here.wait_event(copied)
    return copy


def at_device_of(array: Any) -> AbstractContextManager[Any]:
    device: AbstractContextManager[Any] = array.device
    return device


def on_device(array: Any, device: Any) -> Any:
    number = getattr(device, "id", device)
    if not isinstance(number, int) or not 0 <= number < cupy.cuda.runtime.getDeviceCount():
        raise ValueError(f"CuPy has no device {device!r}: give the number of a GPU")
    return array if array.device.id == number else _copied_to(array, cupy.cuda.Device(number))


def wrap(array: Any) -> Any:
    """A CuPy array in the memory of another library's, after what that library has put into its stream."""
    return cupy.from_dlpack(array) if hasattr(array, "__dlpack__") else cupy.asarray(array)


def finish(array: Any) -> None:
    """Wait for what is in the current stream of the array's device."""
    _current_stream(array.data.device_id).synchronize()


def empty_on(device: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """A new array on that GPU, not initialised."""
    with cupy.cuda.Device(device):
        return cupy.empty(shape, dtype)


def over(memory: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array in memory that the core gave, a `_core.GpuBytes`."""
    count = math.prod(shape)
    return cupy.asarray(memory)[: count * dtype.itemsize].view(dtype).reshape(shape)
