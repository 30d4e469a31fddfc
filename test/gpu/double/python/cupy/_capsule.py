"""DLPack: arrays to and from capsules."""

import ctypes

import ml_dtypes
import numpy as np

from cupy import _driver
from cupy._ndarray import ndarray
from cupy.cuda import runtime
from cupy.cuda.device import Device
from cupy.cuda.memory import MemoryPointer, UnownedMemory
from cupy.cuda.stream import Event, get_current_stream

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_pointer_of_dying = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_NAMES = {False: b"dltensor", True: b"dltensor_versioned"}

_exported = {}  # address of a tensor in a capsule that lives: what has to live with it


def _forget(name):
    @_Destructor
    def destructor(capsule):
        del _exported[_pointer_of_dying(capsule, name)]

    return destructor


_destructors = {is_versioned: _forget(name) for is_versioned, name in _NAMES.items()}


def export(array, stream, is_versioned):
    """A capsule, for work in `stream`: None for the default stream, -1 for nobody who wants to wait."""
    _let_wait(runtime.streamLegacy if stream is None else stream)
    managed = _Versioned(major=1) if is_versioned else _Managed()
    tensor = managed.tensor
    lengths = (ctypes.c_int64 * array.ndim)(*array.shape)
    strides = (ctypes.c_int64 * array.ndim)(*(stride // array.itemsize for stride in array.strides))
    tensor.data = array.data.ptr
    tensor.device_type, tensor.device_id = array.__dlpack_device__()
    tensor.ndim, tensor.lanes, tensor.bits = array.ndim, 1, 8 * array.itemsize
    tensor.code = 4 if array.dtype == _BFLOAT16 else _CODES[array.dtype.kind]
    tensor.shape = ctypes.cast(lengths, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
    address = ctypes.addressof(managed)
    _exported[address] = (array, managed, lengths, strides)
    return _new(address, _NAMES[is_versioned], _destructors[is_versioned])


def _let_wait(stream):
    current = get_current_stream()
    if stream < -1:
        raise ValueError(f"On CUDA, a valid stream for the DLPack protocol is -1, 1, 2, or larger, but not {stream}")
    if stream >= 0 and stream != (current.ptr or runtime.streamLegacy):
        event = Event(disable_timing=True)
        event.record(current)
        _driver.call("cuStreamWaitEvent", stream, event.ptr, 0)


def from_dlpack(array, *, device=None, copy=None):
    """An array in the memory of another library's, which is kept, in the order of the current stream."""
    device_type, device_id = array.__dlpack_device__()
    if device_type not in (2, 13):
        raise BufferError("unsupported device requested.")
    with Device(device_id):
        stream = get_current_stream().ptr or runtime.streamLegacy
        try:
            capsule = array.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:  # as CuPy does for older libraries
            capsule = array.__dlpack__(stream=stream)
    name = _name(capsule)
    kind = _Versioned if name == _NAMES[True] else _Managed
    tensor = kind.from_address(_pointer(capsule, name)).tensor
    dtype = _BFLOAT16 if tensor.code == 4 else _dtype_of(tensor)
    memory = UnownedMemory(tensor.data or 0, 0, (array, capsule), device_id)
    strides = tensor.strides and [stride * dtype.itemsize for stride in tensor.strides[: tensor.ndim]]
    return ndarray(tensor.shape[: tensor.ndim], dtype, MemoryPointer(memory, tensor.byte_offset), strides or None)


def _dtype_of(tensor):
    kind = {code: kind for kind, code in _CODES.items()}[tensor.code]
    return np.dtype(f"{kind}{tensor.bits // 8}")
