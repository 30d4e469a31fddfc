"""Arrays of any other library on a GPU, through DLPack or `__cuda_array_interface__`.

An operation in place works on their memory. New arrays are CuPy's, as are copies on the way, so these need CuPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import Any

from ringtrain.arrays.dlpack_memory import Borrowed, borrow, is_on_gpu
from ringtrain.arrays.numpy import note_change as note_change, returned as returned, spec_of

MAKES = "cupy"
_DeviceView = tuple[int, int, tuple[int, ...], int, int]


def accepts(array: Any) -> bool:
    return isinstance(array, Borrowed) or is_on_gpu(array)


# Between `prepare` and the result an array is a Borrowed, or CuPy's where it had to be copied.


def prepare(array: Any) -> Any:
    if isinstance(array, Borrowed):
        return array
    if _is_of_cupy(array):
        return _cupy().prepare(array)
    borrowed = _borrow(array)
    return borrowed if borrowed.is_contiguous else _cupy().prepare(_cupy().wrap(array))


def is_in_place(array: Any) -> bool:
    borrowed = _borrow(array)
    if not borrowed.is_writable:
        raise ValueError("an operation in place needs an array that can be written to, and this one is read-only")
    return borrowed.is_contiguous


def empty_like(array: Any) -> Any:
    return _cupy().empty_like(_as_cupy(array))


def view(array: Any) -> _DeviceView:
    if not isinstance(array, Borrowed):
        view_of_cupy: _DeviceView = _cupy().view(array)
        return view_of_cupy
    return array.address, *spec_of(array), array.device, array.stream


def view_in_place(array: Any) -> _DeviceView | None:
    # No object would keep the borrowed memory until the end of the operation.
    return None


def assign(target: Any, source: Any) -> None:
    if isinstance(source, Borrowed):
        return  # it is the target's memory
    cupy = _cupy()
    wrapped = cupy.wrap(target)
    cupy.assign(wrapped, source)
    cupy.finish(wrapped)  # the library of the target cannot wait for CuPy's stream


def assign_host(target: Any, values: Any) -> None:
    cupy = _cupy()
    wrapped = cupy.wrap(target)
    cupy.assign_host(wrapped, values)
    cupy.finish(wrapped)


def from_memory(memory: Any, shape: list[int], like: Any) -> Any:
    return _cupy().from_memory(memory, shape, like)


def rows(array: Any) -> Any:
    if not isinstance(array, Borrowed):
        return _cupy().rows(array)
    return array if array.shape else replace(array, shape=(1,))


def is_finite(array: Any) -> Any:
    return _cupy().is_finite(_as_cupy(array))


def dtype_name(array: Any) -> str:
    borrowed = array if isinstance(array, Borrowed) else _borrow(array)
    return str(borrowed.dtype.name)


def cast(array: Any, dtype_name: str) -> Any:
    return _cupy().cast(_as_cupy(array), dtype_name)


def received_splits(numbers: list[int], sent: Any) -> Any:
    return _cupy().received_splits(numbers, sent)


def stream(array: Any) -> int:
    owner = array.owner if isinstance(array, Borrowed) else array
    # The stream of an array from DLPack is unknown: the host has to wait.
    if hasattr(owner, "__dlpack_device__"):
        return -1
    of_library: int | None = owner.__cuda_array_interface__.get("stream")
    return of_library or -1


def device(array: Any) -> int:
    return array.device if isinstance(array, Borrowed) else _cupy().device(array)


def stack(arrays: Sequence[Any]) -> Any:
    return _cupy().stack(list(map(_as_cupy, arrays)))


def on_host(array: Any) -> Any:
    return _cupy().on_host(_as_cupy(array))


def in_host_memory(array: Any) -> Any:
    return on_host(array)


def at_place_of(array: Any, like: Any) -> Any:
    return _cupy().at_place_of(_as_cupy(array), _as_cupy(like))


def at_device_of(array: Any) -> AbstractContextManager[Any]:
    device: AbstractContextManager[Any] = _cupy().at_device_of(_as_cupy(array))
    return device


def on_device(array: Any, device: Any) -> Any:
    return _cupy().on_device(_as_cupy(array), device)


def require_results() -> None:
    _cupy()


def _borrow(array: Any) -> Borrowed:
    # The adapter was chosen by the type, and other arrays of the same type may be elsewhere.
    if not is_on_gpu(array):
        raise TypeError(f"ringtrain cannot send a {type(array).__qualname__} that is not on a CUDA device")
    return borrow(array)


def _as_cupy(array: Any) -> Any:
    if _is_of_cupy(array):
        return array
    return _cupy().wrap(array.owner if isinstance(array, Borrowed) else array)


def _is_of_cupy(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "cupy"


def _cupy() -> ModuleType:
    try:
        from ringtrain.arrays import cupy
    except ImportError:
        raise TypeError(
            "an array that came through DLPack or __cuda_array_interface__ can only be overwritten in place, and as it "
            "is: without CuPy ringtrain makes no arrays on a GPU"
        ) from None
    return cupy
