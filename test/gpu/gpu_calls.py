"""The CUDA driver and NCCL through ctypes, as far as tests call them themselves. Needs no GPU to be imported.

Pointers, streams, events and communicators are ints. A refused call raises Refused.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import ml_dtypes
import numpy as np

NON_BLOCKING = 1
DISABLE_TIMING = 2
NOT_READY = 600
# numbered as NCCL does
NCCL_DTYPES = [
    np.dtype(name)
    for name in (
        *("int8", "uint8", "int32", "uint32", "int64", "uint64"),
        *("float16", "float32", "float64", ml_dtypes.bfloat16),
    )
]
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_KINDS = {"p": ctypes.c_void_p, "z": ctypes.c_size_t, "i": ctypes.c_int, "u": ctypes.c_uint}
# The arguments of each call; * is where the result goes.
_DRIVER_CALLS = {
    "cuInit": "u",
    "cuDeviceGetCount": "*",
    "cuDevicePrimaryCtxRetain": "*i",
    "cuDevicePrimaryCtxRelease_v2": "i",
    "cuCtxGetCurrent": "*",
    "cuCtxPushCurrent_v2": "p",
    "cuCtxPopCurrent_v2": "*",
    "cuCtxSetCurrent": "p",
    "cuStreamCreate": "*u",
    "cuStreamDestroy_v2": "p",
    "cuStreamWaitEvent": "ppu",
    "cuStreamSynchronize": "p",
    "cuStreamQuery": "p",
    "cuStreamIsCapturing": "p*",
    "cuThreadExchangeStreamCaptureMode": "p",
    "cuEventCreate": "*u",
    "cuEventRecord": "pp",
    "cuEventQuery": "p",
    "cuEventSynchronize": "p",
    "cuEventDestroy_v2": "p",
    "cuMemAlloc_v2": "*z",
    "cuMemFree_v2": "p",
    "cuMemHostAlloc": "*zu",
    "cuMemcpyDtoHAsync_v2": "ppzp",
    "cuMemcpyHtoDAsync_v2": "ppzp",
    "cuMemcpyDtoDAsync_v2": "ppzp",
    "cuMemcpyAsync": "ppzp",
    "cuMemsetD8Async": "pizp",
    "cuPointerGetAttribute": "*ip",
    "cuLaunchHostFunc": "ppp",
}
_NCCL_CALLS = {
    "ncclCommSplit": "pii*p",
    "ncclCommDestroy": "p",
    "ncclCommAbort": "p",
    "ncclCommGetAsyncError": "p*",
    "ncclMemAlloc": "*z",
    "ncclCommRegister": "ppz*",
    "ncclAllReduce": "ppziipp",
    "ncclReduce": "ppziiipp",
    "ncclReduceScatter": "ppziipp",
    "ncclAllGather": "ppzipp",
    "ncclBroadcast": "ppziipp",
    "ncclSend": "pziipp",
    "ncclRecv": "pziipp",
    "ncclGroupStart": "",
    "ncclGroupEnd": "",
}


class Refused(Exception):
    """A call answered other than success."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} answered {code}")
        self.code = code


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


@functools.cache
def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(name)


def call(name: str, *arguments: Any) -> int:
    """Returns what the call gives; 0 if it gives nothing. Raises Refused."""
    library = _library("libcuda.so.1" if name in _DRIVER_CALLS else "libnccl.so.2")
    kinds = _DRIVER_CALLS.get(name) or _NCCL_CALLS[name]
    result = ctypes.c_uint64()
    left = list(arguments)
    values = [ctypes.byref(result) if kind == "*" else _KINDS[kind](left.pop(0)) for kind in kinds]
    if left:
        raise TypeError(f"{name}: too many arguments")
    _require_success(name, getattr(library, name)(*values))
    return result.value


def code_of(name: str, *arguments: Any) -> int:
    """The code that the call answers, 0 for success."""
    try:
        call(name, *arguments)
    except Refused as refused:
        return refused.code
    return 0


def new_unique_id() -> bytes:
    """For `new_communicator`."""
    made = _UniqueId()
    _require_success("ncclGetUniqueId", _library("libnccl.so.2").ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


def new_communicator(unique_id: bytes, rank: int, size: int) -> int:
    """Of the current context. Waits for all ranks. Raises Refused."""
    made = ctypes.c_void_p()
    init = _library("libnccl.so.2").ncclCommInitRankConfig
    _require_success("init", init(ctypes.byref(made), size, _UniqueId.from_buffer_copy(unique_id), rank, None))
    return made.value or 0


def last_error() -> str:
    """NCCL's sentence about it."""
    ask = _library("libnccl.so.2").ncclGetLastError
    ask.restype = ctypes.c_char_p
    return str(ask(None).decode())


def open_gpu(device: int = 0) -> int:
    """Make the primary context of a GPU current in this thread. Returns the context."""
    call("cuInit", 0)
    context = call("cuDevicePrimaryCtxRetain", device)
    call("cuCtxSetCurrent", context)
    return context


def put(array: np.ndarray) -> int:
    """A copy of the array in new memory of the current GPU, which has arrived."""
    memory = call("cuMemAlloc_v2", max(array.nbytes, 1))
    call("cuMemcpyHtoDAsync_v2", memory, array.ctypes.data, array.nbytes, 0)
    call("cuStreamSynchronize", 0)
    return memory


def get(memory: int, shape: Any, dtype: Any, stream: int = 0) -> np.ndarray:
    """Returns the memory there after all work of `stream`."""
    array = np.empty(shape, dtype)
    call("cuMemcpyDtoHAsync_v2", array.ctypes.data, memory, array.nbytes, stream)
    call("cuStreamSynchronize", stream)
    return array


def _require_success(name: str, code: int) -> None:
    if code != 0:
        raise Refused(name, code)
