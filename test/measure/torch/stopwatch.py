"""The time that work takes on the GPU itself, while the host is ahead of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_CYCLES = 20_000_000
_CALIBRATIONS = 5


class Time(NamedTuple):
    """Of one run: on the GPU from when it comes to it until it has done it; of the host to submit it; and how long the
    GPU was busy with something else meanwhile. The host was ahead all the time if it took no longer than that."""

    gpu_s: float
    host_s: float
    lead_s: float


class Stopwatch:
    """For work in the current stream. `lead_s`: how long the GPU is to be kept busy before it."""

    def __init__(self, lead_s: float) -> None:
        self._before, self._begin, self._end = _event(), _event(), _event()
        self._cycles = _CYCLES
        # an idle GPU has a slow clock, so only the last one counts
        for _ in range(_CALIBRATIONS):
            seconds = self.time(lambda: None).lead_s
        self._cycles = max(1, round(lead_s * _CYCLES / seconds))

    def time(self, run: Callable[[], object]) -> Time:
        self._before.record()
        _keep_busy(self._cycles)
        self._begin.record()
        host_begin = time.perf_counter()
        run()
        host_s = time.perf_counter() - host_begin
        self._end.record()
        self._end.synchronize()
        gpu_ms, lead_ms = self._begin.elapsed_time(self._end), self._before.elapsed_time(self._begin)
        return Time(1e-3 * gpu_ms, host_s, 1e-3 * lead_ms)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _keep_busy(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
