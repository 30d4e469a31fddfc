"""The CUDA driver through ctypes: what is called of it, which device a thread has, and kernels of Python."""

import atexit
import ctypes
import functools
import itertools
import threading
import time

from cupy._errors import CUDARuntimeError

_address = ctypes.c_uint64
_handle = ctypes.c_void_p
_size = ctypes.c_size_t
_out = ctypes.POINTER
_Kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_FUNCTIONS = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (_out(ctypes.c_int),),
    "cuDevicePrimaryCtxRetain": (_out(_handle), ctypes.c_int),
    "cuDevicePrimaryCtxGetState": (ctypes.c_int, _out(ctypes.c_uint), _out(ctypes.c_int)),
    "cuCtxGetCurrent": (_out(_handle),),
    "cuCtxSetCurrent": (_handle,),
    "cuStreamCreateWithPriority": (_out(_handle), ctypes.c_uint, ctypes.c_int),
    "cuStreamDestroy_v2": (_handle,),
    "cuStreamSynchronize": (_handle,),
    "cuStreamQuery": (_handle,),
    "cuStreamWaitEvent": (_handle, _handle, ctypes.c_uint),
    "cuEventCreate": (_out(_handle), ctypes.c_uint),
    "cuEventRecord": (_handle, _handle),
    "cuEventQuery": (_handle,),
    "cuEventSynchronize": (_handle,),
    "cuEventDestroy_v2": (_handle,),
    "cuMemAlloc_v2": (_out(_address), _size),
    "cuMemFree_v2": (_address,),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, _address, _size, _handle),
    "cuMemcpyDtoDAsync_v2": (_address, _address, _size, _handle),
    "cuMemsetD8Async": (_address, ctypes.c_ubyte, _size, _handle),
    "cuPointerGetAttribute": (ctypes.c_void_p, ctypes.c_int, _address),
    "cuLaunchHostFunc": (_handle, _Kernel, ctypes.c_void_p),
}
_NOT_READY = 600
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


@functools.cache
def _library():
    """Raises CUDARuntimeError where there is no driver, as CuPy does when it is used first."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise CUDARuntimeError(35, "cudaErrorInsufficientDriver: there is no CUDA driver") from None
    for name, arguments in _FUNCTIONS.items():
        getattr(library, name).argtypes = arguments
    library.gpu_double_host_view.restype = ctypes.c_void_p
    library.gpu_double_host_view.argtypes = (_address, _size)
    if code := library.cuInit(0):
        raise CUDARuntimeError(code, f"cuInit answered {code}")
    return library


def call(name, *arguments):
    """Raises CUDARuntimeError for what the driver refuses."""
    if code := getattr(_library(), name)(*arguments):
        raise CUDARuntimeError(code, f"{name} answered {code}")


def ask(name, *arguments):
    """Call a function that says "done" or "not yet"; returns whether it is done."""
    code = getattr(_library(), name)(*arguments)
    if code not in (0, _NOT_READY):
        raise CUDARuntimeError(code, f"{name} answered {code}")
    return code == 0


def made(kind, name, *arguments):
    """Returns what a function writes to its first argument."""
    place = kind()
    call(name, ctypes.byref(place), *arguments)
    return place.value


def host_view(address, size):
    """Where a kernel finds so many bytes of device memory. Raises RuntimeError where they are not all such memory."""
    found = _library().gpu_double_host_view(address, size)
    if found is None:
        raise RuntimeError(f"a kernel needs {size} bytes at {address:#x}, which are no device memory (any more)")
    return found


@functools.cache
def device_count():
    return made(ctypes.c_int, "cuDeviceGetCount")


def device_of_address(address):
    device = ctypes.c_int()
    call("cuPointerGetAttribute", ctypes.byref(device), _DEVICE_ORDINAL, address)
    return device.value


_contexts = {}
_making_contexts = threading.Lock()


def current_device():
    """Returns that of the context which is current in the thread, else the first."""
    context = made(_handle, "cuCtxGetCurrent")
    if context is None:
        return 0
    return next(device for device in range(device_count()) if _has_context(device) and _context(device) == context)


def _has_context(device):
    flags, is_active = ctypes.c_uint(), ctypes.c_int()
    call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(is_active))
    return is_active.value


def set_device(device):
    """Make the device that of the calling thread."""
    if not 0 <= device < device_count():
        raise CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")
    call("cuCtxSetCurrent", _context(device))


def _context(device):
    with _making_contexts:
        if device not in _contexts:
            _contexts[device] = made(_handle, "cuDevicePrimaryCtxRetain", device)
        return _contexts[device]


def enter_device():
    """Makes a context in the thread, before a call that works on a device."""
    if made(_handle, "cuCtxGetCurrent") is None:
        call("cuCtxSetCurrent", _context(0))


_numbers = itertools.count(1)
_waiting = {}  # kernels that no stream has called yet
_failures = []


@_Kernel
def _carry_out(number):
    try:
        _waiting.pop(number)()
    except BaseException as error:
        _failures.append(error)


def launch(stream, kernel):
    """Put a function without arguments into a stream. The next `synchronize` raises its exception."""
    enter_device()
    number = next(_numbers)
    _waiting[number] = kernel
    call("cuLaunchHostFunc", stream, _carry_out, number)


def synchronize(stream):
    """Wait on the host for all that is in a stream."""
    enter_device()
    call("cuStreamSynchronize", stream)
    if _failures:
        raise _failures.pop(0)


@atexit.register
def _let_kernels_end():
    """Streams cannot call Python when it has ended."""
    deadline = time.monotonic() + 10
    while _waiting and time.monotonic() < deadline:
        time.sleep(0.001)
