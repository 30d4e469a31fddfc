"""Measurements and faults with arrays of CuPy."""

from __future__ import annotations

from typing import Any

import cupy

import ringtrain as hvd


def ones(count: int) -> Any:
    """float32[count] on this rank's GPU."""
    cupy.cuda.Device(hvd.local_rank() % cupy.cuda.runtime.getDeviceCount()).use()
    return cupy.ones(count, "float32")


def finish() -> None:
    """Wait for what is in the current stream."""
    cupy.cuda.get_current_stream().synchronize()
