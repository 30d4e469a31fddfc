"""Arrays of any other library on a GPU, through DLPack or `__cuda_array_interface__`.

An operation in place works on their memory. New arrays are CuPy's, as are copies on the way, so these need CuPy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

import ringtrain._core as _core
from ringtrain.arrays.numpy import no_copy, note_change as note_change, require_known, returned as returned, spec_of

# --- memory that another library lends: what DLPack and `__cuda_array_interface__` say of it, without CuPy ------------

# https://dmlc.github.io/dlpack/latest/ and https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html


_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}  # DLDataTypeCode
_READ_ONLY, _IS_COPY = 1, 2  # bits of DLManagedTensorVersioned.flags
_LEGACY_STREAM = 1  # CUDA's default stream, as both protocols number it


@dataclass(frozen=True)
class Borrowed:
    """The memory of an array of another library, which is kept as long as this object."""

    owner: Any  # the user's array
    address: int
    dtype: Any  # of NumPy, bfloat16 that of ml_dtypes
    shape: tuple[int, ...]
    device: int
    stream: int  # after the work in it the memory may be read
    is_contiguous: bool
    is_writable: bool
    capsule: Any = None  # of DLPack


def is_on_gpu(array: Any) -> bool:
    """Whether `borrow` takes it."""
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[0]) in _CUDA_DEVICES
    return hasattr(array, "__cuda_array_interface__")


def borrow(array: Any) -> Borrowed:
    """Ask an array for which `is_on_gpu` where its memory is.

    Raises:
        TypeError: the core has no such dtype, or the array has a mask.
        BufferError: the library refuses to share it.
    """
    borrowed = _by_capsule(array) if hasattr(array, "__dlpack_device__") else _by_interface(array)
    require_known(borrowed.dtype)
    return borrowed


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; null for a contiguous array
        ("byte_offset", ctypes.c_uint64),
    )


class _VersionedTensor(ctypes.Structure):
    """DLManagedTensorVersioned. Its predecessor, DLManagedTensor, begins with the tensor."""

    _fields_ = (
        ("version", _Version),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_name_of = ctypes.pythonapi.PyCapsule_GetName
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _by_capsule(array: Any) -> Borrowed:
    capsule = _capsule_of(array)
    tensor, flags = _tensor_in(capsule)
    shape = tuple(tensor.shape[: tensor.ndim])
    return Borrowed(
        array,
        (tensor.data or 0) + tensor.byte_offset,
        _dtype_of(tensor.dtype),
        shape,
        tensor.device_id,
        _LEGACY_STREAM,
        not tensor.strides or _is_contiguous(shape, tensor.strides[: tensor.ndim], 1),
        not flags & (_READ_ONLY | _IS_COPY),
        capsule,
    )


def _capsule_of(array: Any) -> Any:
    # Never renamed to "used", so that the library takes its memory back when the capsule dies.
    try:
        return array.__dlpack__(stream=_LEGACY_STREAM, max_version=(1, 0))
    except TypeError:  # from before versions had numbers
        return array.__dlpack__(stream=_LEGACY_STREAM)


def _tensor_in(capsule: Any) -> tuple[_Tensor, int]:
    """The tensor and its flags."""
    name = _name_of(capsule)
    pointer = _pointer_of(capsule, name)
    if name != b"dltensor_versioned":
        return _Tensor.from_address(pointer), 0
    managed = _VersionedTensor.from_address(pointer)
    if managed.version.major != 1:
        raise BufferError(f"ringtrain reads DLPack 1, and this is DLPack {managed.version.major}")
    return managed.tensor, managed.flags


def _dtype_of(given: _DataType) -> Any:
    kind = _KINDS.get(given.code)
    if kind == "bfloat" and given.bits == 16 and given.lanes == 1:
        return np.dtype(ml_dtypes.bfloat16)
    if kind == "bool" and given.bits == 8 and given.lanes == 1:
        return np.dtype(bool)
    sizes = (64, 128) if kind == "complex" else (8, 16, 32, 64)
    if kind not in ("int", "uint", "float", "complex") or given.bits not in sizes or given.lanes != 1:
        raise TypeError(
            f"ringtrain cannot send a DLPack tensor of type code {given.code}, {given.bits} bits, {given.lanes} lanes"
        )
    return np.dtype(f"{kind}{given.bits}")


def _by_interface(array: Any) -> Borrowed:
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise TypeError("ringtrain cannot send an array with a mask")
    address, is_read_only = interface["data"]
    dtype, shape, strides = np.dtype(interface["typestr"]), tuple(interface["shape"]), interface.get("strides")
    return Borrowed(
        array,
        address,
        dtype,
        shape,
        _core.gpu_of(address) if address else 0,
        interface.get("stream") or _LEGACY_STREAM,
        strides is None or _is_contiguous(shape, strides, dtype.itemsize),
        not is_read_only,
    )


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], unit: int) -> bool:
    if 0 in shape:
        return True
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != unit:
            return False
        unit *= length
    return True


# --- the adapter ------------------------------------------------------------------------------------------------------


MAKES = "cupy"
copy_of_small = no_copy
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


def dtype_name(array: Any) -> str:
    borrowed = array if isinstance(array, Borrowed) else _borrow(array)
    return str(borrowed.dtype.name)


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
    if isinstance(array, Borrowed):
        return array.device
    return int(_cupy().device(array)) if _is_of_cupy(array) else _borrow(array).device


def stack(arrays: Sequence[Any]) -> Any:
    return _cupy().stack(list(map(_as_cupy, arrays)))


def at_place_of(array: Any, like: Any) -> Any:
    return _cupy().at_place_of(_as_cupy(array), _as_cupy(like))


def require_results() -> None:
    _cupy()


def _by_cupy(name: str) -> Callable[..., Any]:
    """Returns the function of CuPy's adapter that has this name, for arrays that become CuPy's first."""
    return lambda array, *given: getattr(_cupy(), name)(_as_cupy(array), *given)


empty_like, is_finite, cast = map(_by_cupy, ("empty_like", "is_finite", "cast"))
on_host = in_host_memory = _by_cupy("on_host")
at_device_of, on_device = map(_by_cupy, ("at_device_of", "on_device"))


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
