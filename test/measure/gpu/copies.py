"""The bus between this rank's GPU and pinned memory of the host, used both ways at once."""

from __future__ import annotations

import ctypes
from typing import Any

from ringtrain.arrays.adapter import adapter_for

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class BothWays:
    """Copies one array to the host and another one of as many bytes from it, each in a stream of its own.

    The context of the arrays must be current in this thread.
    """

    def __init__(self, leaving: Any, arriving: Any) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._arrays = leaving, arriving  # kept alive
        self._leaving, self._arriving = (ctypes.c_uint64(adapter_for(one).view(one)[0]) for one in self._arrays)
        self._bytes = ctypes.c_size_t(leaving.nbytes)
        self._to, self._from = self._pinned(), self._pinned()
        self._down, self._up = self._stream(), self._stream()

    def run(self) -> None:
        """Both copies, from the beginning of the one to the end of the other."""
        self._call("cuMemcpyDtoHAsync_v2", self._to, self._leaving, self._bytes, self._down)
        self._call("cuMemcpyHtoDAsync_v2", self._arriving, self._from, self._bytes, self._up)
        self._call("cuStreamSynchronize", self._down)
        self._call("cuStreamSynchronize", self._up)

    def close(self) -> None:
        for memory in (self._to, self._from):
            self._call("cuMemFreeHost", memory)
        for stream in (self._down, self._up):
            self._call("cuStreamDestroy_v2", stream)

    def _pinned(self) -> ctypes.c_void_p:
        memory = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(memory), self._bytes, ctypes.c_uint(_PORTABLE))
        return memory

    def _stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        return stream

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} answers error {status}")
