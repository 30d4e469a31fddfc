"""The MXNet that is there: which one it is, and what the core has to know of it."""

from __future__ import annotations

import ctypes
import os

import numpy

import ringtrain.kvstore  # noqa: F401 a server or the scheduler stays here: MXNet would be one of its own

try:
    import mxnet
except AttributeError as error:
    raise ImportError(
        f"MXNet cannot be imported with NumPy {numpy.__version__} ({error}): install numpy==1.23.5, or set "
        "numpy.bool = numpy.bool_ before the first import of mxnet"
    ) from error
from mxnet.base import _LIB, register_error

import ringtrain._core as _core
from ringtrain import errors

if not mxnet.__version__.startswith("1."):
    raise ImportError(f"ringtrain.mxnet is for MXNet 1.x, tried with 1.9.1, and this is {mxnet.__version__}")

_FUNCTIONS = (
    "MXEnginePushAsyncND",
    "MXShallowCopyNDArray",
    "MXNDArrayFree",
    "MXNDArrayToDLPack",
    "MXGetLastError",
)
# It runs an operation where it is pushed, and so cannot wait for another rank.
IS_NAIVE = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"

_core.use_mxnet({name: ctypes.cast(getattr(_LIB, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS})

# Whoever reads an array whose operation has failed gets the exception that its text begins with.
for _name, _kind in vars(errors).items():
    if isinstance(_kind, type) and issubclass(_kind, errors.RingtrainError):
        register_error(_name, _kind)
