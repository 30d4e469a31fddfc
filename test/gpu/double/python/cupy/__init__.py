"""A stand-in for CuPy on the fake CUDA driver: as much of CuPy as ringtrain, its examples and tests use.

Memory is the driver's; a kernel is a function of NumPy that a stream calls, so what does not wait for a stream sees
that it is not done yet. Nothing here knows or allows what CuPy 14 does not, underscored names aside.
"""

import numpy as _numpy

from cupy import cuda
from cupy._capsule import from_dlpack  # noqa: F401
from cupy._creation import (  # noqa: F401
    arange,
    array,
    asarray,
    ascontiguousarray,
    asnumpy,
    broadcast_to,
    empty,
    empty_like,
    eye,
    full,
    ones,
    ones_like,
    zeros,
    zeros_like,
)
from cupy._ndarray import compute as _compute, ndarray

__version__ = "14.2.0"

for _name in (
    *("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "newaxis"),
):
    globals()[_name] = getattr(_numpy, _name)


def _like_numpy(function):
    def on_gpu(*arguments, **keywords):
        return _compute(function, *arguments, **keywords)

    return on_gpu


for _name in (
    *("abs", "add", "subtract", "multiply", "divide", "negative", "power", "sqrt", "exp", "log", "tanh", "isfinite"),
    *("equal", "less", "greater", "maximum", "minimum", "where", "argmax", "dot", "matmul"),
):
    globals()[_name] = _like_numpy(getattr(_numpy, _name))


def concatenate(arrays, axis=0):
    return _compute(lambda *parts: _numpy.concatenate(parts, axis), *arrays)


def stack(arrays, axis=0):
    return _compute(lambda *parts: _numpy.stack(parts, axis), *arrays)


def get_array_module(*arrays):
    """This module if one of the arrays is on a GPU, else NumPy."""
    import cupy

    return cupy if any(isinstance(one, ndarray) for one in arrays) else _numpy


def is_available():
    return cuda.is_available()
