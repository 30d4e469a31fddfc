"""Copies and sums of arrays of any library on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import ringtrain._core as _core
from ringtrain.arrays.adapter import adapter_for
from ringtrain.arrays.dlpack import Borrowed

SIXTEEN_BITS = ("float16", "bfloat16")


def readable(array: Any) -> Any:
    """Returns the array, or a contiguous copy, as one of NumPy, PyTorch or CuPy. Raises TypeError for other types."""
    adapter = adapter_for(array)
    prepared = adapter.prepare(array)
    return adapter.at_place_of(prepared, prepared) if isinstance(prepared, Borrowed) else prepared


def shape_of(array: Any) -> tuple[int, ...]:
    # A foreign array may have no more than DLPack.
    shape = getattr(array, "shape", None)
    return tuple(readable(array).shape if shape is None else shape)


def in_host_memory(array: Any) -> Any:
    adapter = adapter_for(array)
    return array if adapter.device(array) < 0 else adapter.in_host_memory(array)


def copy_into(target: Any, source: Any) -> None:
    """Copies values in the dtype of `target`. The arrays may be of different libraries and devices."""
    adapter, of_source = adapter_for(target), adapter_for(source)
    if adapter.MAKES == of_source.MAKES:
        adapter.assign(target, adapter.at_place_of(source, target))
    else:
        adapter.assign_host(target, of_source.on_host(source))
    adapter.note_change(target)


def copy_of(array: Any) -> Any:
    """Returns a new array of the same values on the same device."""
    new = adapter_for(array).empty_like(array)
    adapter_for(new).assign(new, array)
    return new


def like(array: Any, other: Any) -> Any:
    """Returns the array if `other` has the same library and device; else a copy like `other`."""
    adapter, of_array = adapter_for(other), adapter_for(array)
    if adapter is of_array:
        return adapter.at_place_of(array, other)
    new = adapter.empty_like(other)
    adapter.assign_host(new, of_array.on_host(array))
    return new


def cast(array: Any, dtype_name: str) -> Any:
    """Returns a copy in another dtype, or the array itself if it has that dtype."""
    adapter = adapter_for(array)
    return array if adapter.dtype_name(array) == dtype_name else adapter.cast(array, dtype_name)


def sum_of(arrays: Sequence[Any], place: Any) -> Any:
    """Returns the sum as a new array, of the dtype of the first, on the device of `place`.

    16-bit floats are summed in float32, which may be among them.
    """
    first, *others = arrays
    if all(adapter_for(one).device(one) < 0 for one in (*arrays, place)):
        return _sum_on_host([like(one, first) for one in arrays])
    if adapter_for(first) is adapter_for(place):
        first = adapter_for(first).at_place_of(first, place)
    dtype = adapter_for(first).dtype_name(first)
    is_short = dtype in SIXTEEN_BITS
    total = adapter_for(first).cast(first, "float32") if is_short else copy_of(first)
    with adapter_for(total).at_device_of(total):
        for one in others:
            here = like(one, first)
            total += cast(here, "float32") if is_short else here
    return cast(total, dtype)


def _sum_on_host(arrays: Sequence[Any]) -> Any:
    """Sums arrays of one library."""
    adapter = adapter_for(arrays[0])
    dtypes = [adapter.dtype_name(one) for one in arrays]
    if len(set(dtypes)) > 1:
        arrays = [cast(one, "float32") for one in arrays]
    prepared = [adapter.prepare(one) for one in arrays]
    total = adapter.empty_like(prepared[0])
    _core.sum([adapter.view(one) for one in prepared], adapter.view(total))
    return cast(total, dtypes[0])


def shared_like(array: Any) -> Any:
    """Returns a new array of the same dtype and shape, if possible in memory that the ranks of a node share."""
    adapter = adapter_for(array)
    if adapter.device(array) >= 0:
        return adapter.empty_like(array)
    memory = _core.empty_bytes(array.nbytes)
    return adapter.empty_like(array) if memory is None else adapter.from_memory(memory, _core_shape(array), array)


def _core_shape(array: Any) -> list[int]:
    return list(adapter_for(array).view(array)[2])


def for_reading(array: Any) -> Any:
    """Returns a read-only view of an array of NumPy, or a copy of another array."""
    if not isinstance(array, np.ndarray):
        return copy_of(array)
    view = array.view()
    view.flags.writeable = False
    return view


def is_same_place(one: Any, other: Any) -> bool:
    return adapter_for(one).device(one) == adapter_for(other).device(other)
