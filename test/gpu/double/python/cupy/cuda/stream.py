"""Streams, events, and which stream is the current one of a thread on each device."""

import ctypes
import threading

from cupy import _driver
from cupy.cuda import runtime

_NON_BLOCKING = 1
_DISABLE_TIMING = 2


class _OfThread:
    def __init__(self):
        self.current = [Stream.null] * runtime.getDeviceCount()
        self.entered = []  # devices, and what was current on them before


class Event:
    """A place in a stream."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.ptr = 0
        _driver.enter_device()
        self.ptr = _driver.made(ctypes.c_void_p, "cuEventCreate", _DISABLE_TIMING if disable_timing else 0)

    def __del__(self):
        if self.ptr:
            _driver.enter_device()
            _driver.call("cuEventDestroy_v2", self.ptr)

    @property
    def done(self):
        return _driver.ask("cuEventQuery", self.ptr)

    def record(self, stream=None):
        _driver.enter_device()
        _driver.call("cuEventRecord", self.ptr, (stream or get_current_stream()).ptr)

    def synchronize(self):
        _driver.call("cuEventSynchronize", self.ptr)


class Stream:
    """A stream of its own, or with `null` the default one."""

    null = None
    ptds = None

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.device_id = -1
        self.ptr = 0
        if null or ptds:
            self.ptr = 0 if null else runtime.streamPerThread
            return
        _driver.enter_device()
        flags = _NON_BLOCKING if non_blocking else 0
        self.ptr = _driver.made(ctypes.c_void_p, "cuStreamCreateWithPriority", flags, priority or 0)
        self.device_id = runtime.getDevice()
        runtime._streams.add(self)

    def __del__(self):
        if self.ptr not in (0, runtime.streamLegacy, runtime.streamPerThread):
            _driver.enter_device()
            _driver.call("cuStreamDestroy_v2", self.ptr)

    def __eq__(self, other):
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self):
        return self.ptr

    def __enter__(self):
        device = self._require_current_device()
        of_thread = _of_thread()
        of_thread.entered.append((device, of_thread.current[device]))
        of_thread.current[device] = self
        return self

    def __exit__(self, *raised):
        of_thread = _of_thread()
        device, before = of_thread.entered.pop()
        of_thread.current[device] = before

    def use(self):
        _of_thread().current[self._require_current_device()] = self
        return self

    @property
    def done(self):
        return _driver.ask("cuStreamQuery", self.ptr)

    def synchronize(self):
        _driver.synchronize(self.ptr)

    def record(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        _driver.enter_device()
        _driver.call("cuStreamWaitEvent", self.ptr, event.ptr, 0)

    def launch_host_func(self, callback, arg):
        _driver.launch(self.ptr, lambda: callback(arg))

    def _require_current_device(self):
        current = runtime.getDevice()
        if self.device_id not in (-1, current):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device "
                f"({current})"
            )
        return current


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)

_threads = threading.local()


def _of_thread():
    if not hasattr(_threads, "streams"):
        _threads.streams = _OfThread()
    return _threads.streams


def get_current_stream(device_id=-1):
    return _of_thread().current[runtime.getDevice() if device_id == -1 else device_id]
