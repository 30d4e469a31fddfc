"""Memory of other libraries on a GPU: what DLPack and `__cuda_array_interface__` say of it, without CuPy.

https://dmlc.github.io/dlpack/latest/ and https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import ringtrain._core as _core
from ringtrain.arrays.numpy import require_known

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
