"""The functions of CUDA's runtime API."""

import ctypes
import weakref

from cupy import _driver
from cupy._errors import CUDARuntimeError as CUDARuntimeError

streamLegacy = 1
streamPerThread = 2

getDevice = _driver.current_device
getDeviceCount = _driver.device_count
setDevice = _driver.set_device

# Those of this process that live, for deviceSynchronize.
_streams = weakref.WeakSet()


def deviceSynchronize():
    device = getDevice()
    for handle in (0, *(stream.ptr for stream in list(_streams) if stream.device_id == device)):
        _driver.synchronize(handle)


def malloc(size):
    _driver.enter_device()
    return _driver.made(ctypes.c_uint64, "cuMemAlloc_v2", size)


def free(address):
    _driver.enter_device()
    _driver.call("cuMemFree_v2", address)
