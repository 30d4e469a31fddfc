"""Devices, streams and memory."""

from cupy import _driver
from cupy.cuda import memory, runtime, stream
from cupy.cuda.device import Device
from cupy.cuda.memory import MemoryPointer, UnownedMemory
from cupy.cuda.stream import Event, Stream, get_current_stream


def is_available():
    try:
        return _driver.device_count() > 0
    except runtime.CUDARuntimeError:
        return False


__all__ = [
    "Device",
    "Event",
    "MemoryPointer",
    "Stream",
    "UnownedMemory",
    "get_current_stream",
    "is_available",
    "memory",
    "runtime",
    "stream",
]
