"""New arrays."""

import numpy as np

from cupy import _driver
from cupy._ndarray import compute, ndarray
from cupy.cuda.memory import MemoryPointer, UnownedMemory


def array(obj, dtype=None, copy=True):
    """A copy on the current device."""
    if isinstance(obj, ndarray):
        return obj.copy() if dtype is None else obj.astype(dtype)
    if hasattr(obj, "__cuda_array_interface__"):
        return _of_interface(obj).copy()
    return _from_host(np.array(obj, dtype))


def asarray(a, dtype=None):
    """The array itself where it is one on the current device."""
    if isinstance(a, ndarray):
        return a if dtype is None else a.astype(dtype, copy=False)
    if hasattr(a, "__cuda_array_interface__"):
        return _of_interface(a)
    return _from_host(np.array(a, dtype))


def _from_host(values):
    """`values`: an array that nobody else changes. As with CuPy's pinned memory, the host does not wait."""
    target = ndarray(values.shape, values.dtype)
    return compute(lambda: values, out=target)


def _of_interface(foreign):
    interface = foreign.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise ValueError("CuPy currently does not support masked arrays.")
    if interface.get("stream") is not None:
        _driver.synchronize(interface["stream"])
    dtype, address = np.dtype(interface["typestr"]), interface["data"][0]
    device = -1 if address else _driver.current_device()
    memory = UnownedMemory(address, 0, foreign, device)
    return ndarray(interface["shape"], dtype, MemoryPointer(memory, 0), interface.get("strides"))


def asnumpy(a):
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def ascontiguousarray(a, dtype=None):
    values = asarray(a, dtype)
    values = values if values._c_contiguous else values.copy()
    return values.ravel() if values.ndim == 0 else values


def empty(shape, dtype=float):
    return ndarray(shape, dtype)


def full(shape, fill_value, dtype=None):
    target = ndarray(shape, np.asarray(fill_value).dtype if dtype is None else dtype)
    return compute(lambda: fill_value, out=target)


def zeros(shape, dtype=float):
    return full(shape, 0, dtype)


def ones(shape, dtype=float):
    return full(shape, 1, dtype)


def empty_like(prototype, dtype=None):
    return ndarray(prototype.shape, dtype or prototype.dtype)


def zeros_like(a, dtype=None):
    return full(a.shape, 0, dtype or a.dtype)


def ones_like(a, dtype=None):
    return full(a.shape, 1, dtype or a.dtype)


def arange(*bounds, dtype=None):
    return compute(lambda: np.arange(*bounds, dtype=dtype))


def eye(N, M=None, k=0, dtype=float):
    return compute(lambda: np.eye(N, M, k, dtype=dtype))


def broadcast_to(array, shape):
    return array._view_of(np.broadcast_to(array._layout(), shape))
