"""Memory of a device, and the pool that keeps what was freed for the stream in which it was taken."""

import ctypes
import threading

from cupy import _driver
from cupy._errors import CUDARuntimeError, OutOfMemoryError
from cupy.cuda import stream as _stream

_UNIT_BYTES = 512
_POISON = 0xA5

_free = {}  # (device, stream, bytes): addresses
_taken_bytes = 0
_lock = threading.Lock()


class UnownedMemory:
    """Memory that somebody else owns; `owner` is kept."""

    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr = ptr
        self.size = size
        self.device_id = _driver.device_of_address(ptr) if device_id < 0 else device_id
        self._owner = owner


class _PooledMemory:
    """The result of `alloc`."""

    def __init__(self, address, size, place):
        self.ptr = address
        self.size = size
        self.device_id = place[0]
        self._place = place

    def __del__(self):
        if self.ptr:
            with _lock:
                _free.setdefault(self._place, []).append(self.ptr)


class MemoryPointer:
    """A place in device memory, which stays as long as this does."""

    def __init__(self, mem, offset):
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    @property
    def device(self):
        from cupy.cuda.device import Device

        return Device(self.device_id)


def alloc(size):
    """Memory on the current device, full of rubbish once the current stream has come here."""
    device, stream = _driver.current_device(), _stream.get_current_stream().ptr
    place = (device, stream, -(-size // _UNIT_BYTES) * _UNIT_BYTES)
    if size == 0:
        return MemoryPointer(_PooledMemory(0, 0, place), 0)
    _driver.enter_device()
    address = _take(place)
    _driver.call("cuMemsetD8Async", address, _POISON, place[2], stream)
    return MemoryPointer(_PooledMemory(address, size, place), 0)


def _take(place):
    global _taken_bytes
    with _lock:
        if _free.get(place):
            return _free[place].pop()
    try:
        address = _driver.made(ctypes.c_uint64, "cuMemAlloc_v2", place[2])
    except CUDARuntimeError as error:
        if error.status != 2:
            raise
        raise OutOfMemoryError(place[2], _taken_bytes) from None
    _taken_bytes += place[2]
    return address
