"""The installed MXNet: its version, and what the core must know of it."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy

import ringtrain.kvstore  # noqa: F401 a server or the scheduler stays here: MXNet would be one of its own

try:
    import mxnet
except AttributeError as error:
    raise ImportError(
        f"MXNet cannot be imported with NumPy {numpy.__version__} ({error}): install numpy==1.23.5, or set "
        "numpy.bool = numpy.bool_ before the first import of mxnet"
    ) from error
from mxnet import profiler
from mxnet.base import _LIB, MXNetError, register_error

import ringtrain._core as _core
from ringtrain import errors

if not mxnet.__version__.startswith("1."):
    raise ImportError(f"ringtrain.mxnet is for MXNet 1.x, tried with 1.9.1, and this is {mxnet.__version__}")

Function = TypeVar("Function", bound=Callable[..., Any])
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


_also_mxnet: dict[type[Exception], type[Exception]] = {}


def _as_mxnet_error(kind: type[Exception]) -> type[Exception]:
    """Returns a class of errors with the name of `kind` that is a subclass of `kind` and of MXNetError."""
    if kind not in _also_mxnet:
        _also_mxnet[kind] = type(
            kind.__name__, (kind, MXNetError), {"__doc__": kind.__doc__, "__module__": kind.__module__}
        )
    return _also_mxnet[kind]


def raises_mxnet_errors(function: Function) -> Function:
    """Decorates a function: its bad values, missing keys and failures of other ranks are MXNetErrors, too.

    MXNet and `horovod.mxnet` raise MXNetError for all of these.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except (ValueError, KeyError, errors.RingtrainError) as error:
            if isinstance(error, MXNetError):
                raise
            raise _as_mxnet_error(type(error))(*error.args).with_traceback(error.__traceback__) from error.__cause__

    return cast(Function, call)


def forwarded(holder: str, name: str) -> Callable[..., Any]:
    """Returns a method that calls the one of this name of the object that the attribute `holder` has."""
    return lambda self, *given, **named: getattr(getattr(self, holder), name)(*given, **named)


# A failed operation raises the class that the text of its error begins with, where its array is read.
for _name, _kind in vars(errors).items():
    if isinstance(_kind, type) and issubclass(_kind, errors.RingtrainError):
        register_error(_name, _as_mxnet_error(_kind))


def _refusing_servers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of mxnet.profiler that says why it cannot profile the servers of ringtrain."""

    @functools.wraps(function)
    def profile(*arguments: Any, **keywords: Any) -> Any:
        is_server = "server" in (keywords.get("profile_process"), *arguments[-1:])
        if is_server and not profiler.profiler_kvstore_handle:
            raise MXNetError(
                f'mx.profiler.{function.__name__}: profile_process="server" is for stores of MXNet; servers of '
                'ringtrain run without MXNet. Read hvd.metrics()["kvstore_server"] there, or set metrics_port'
            )
        return function(*arguments, **keywords)

    return profile


for _name in ("set_config", "set_state", "dump", "pause", "resume"):
    setattr(profiler, _name, _refusing_servers(getattr(profiler, _name)))
