"""The exact data of `exact.py` as CuPy arrays, on the rank's own GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from harness.exact import data_of_ranks, require_equal
from harness.gpu_arrays import cupy

import ringtrain as hvd


def device_count() -> int:
    return int(cupy.cuda.runtime.getDeviceCount())


def use_own_gpu() -> None:
    """From now on arrays of this thread are made on the GPU of this rank."""
    cupy.cuda.Device(hvd.local_rank() % device_count()).use()


def on_gpu(array: Any) -> cupy.ndarray:
    """A copy on this rank's GPU."""
    use_own_gpu()
    return cupy.asarray(np.asarray(array))


def arrays_of_ranks(size: int, shape: Sequence[int], dtype: Any = "float32", **how: Any) -> list[cupy.ndarray]:
    """Returns the inputs of all ranks of a job of `size`; see `exact.data_of_ranks`."""
    return [on_gpu(array) for array in data_of_ranks(size, shape, dtype, **how)]


def empty(count: int, dtype: str) -> cupy.ndarray:
    """A new array, full of rubbish."""
    return cupy.full(count, 77, dtype)


def require_on_gpu(actual: Any, expected: Any) -> None:
    """Raise AssertionError unless it is a CuPy array on this rank's GPU of the same dtype, shape and elements."""
    assert type(actual) is cupy.ndarray, f"{type(actual)} instead of a CuPy array"
    assert actual.device.id == hvd.local_rank() % device_count()
    require_equal(actual.get(), np.asarray(expected))


def keep_busy(seconds: float) -> None:
    """Put a kernel into the current stream that takes so long."""
    cupy.cuda.get_current_stream().launch_host_func(time.sleep, seconds)


def new_stream() -> AbstractContextManager[Any]:
    """Current within `with`."""
    return cupy.cuda.Stream(non_blocking=True)


def synchronize() -> None:
    """Wait on the host for the current stream."""
    cupy.cuda.get_current_stream().synchronize()


def is_done() -> bool:
    """Whether nothing is left to do in the current stream."""
    return bool(cupy.cuda.get_current_stream().done)


def wait_for(stream: Any) -> None:
    """Makes the current stream wait for another one."""
    cupy.cuda.get_current_stream().wait_event(stream.record())
