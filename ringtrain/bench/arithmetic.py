"""Plain arithmetic: scaling for peers, the floor of a step, and what is computed beside communication."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

import ringtrain._core as _core
from ringtrain.arrays.adapter import adapter_for
from ringtrain.bench.rounds import Array


def scaling(destination: Array, source: Array, factor: float) -> Callable[[], None]:
    """destination = source * factor, in one pass and as fast as ringtrain's own."""
    adapter = adapter_for(source)
    written, dtype = adapter.view(destination)[:2]
    read = adapter.view(source)[0]
    count = source.size
    return lambda: _core.scale(dtype, factor, written, read, count)


def floor(tensors: Sequence[Array]) -> Callable[[], None]:
    """Read and write each tensor once: what no average in place can do without. It changes the signs."""
    passes = [scaling(tensor, tensor, -1.0) for tensor in tensors]

    def run() -> None:
        for one_pass in passes:
            one_pass()

    return run


class Arithmetic:
    """Work for one thread, in units of some microseconds which hold neither the GIL nor more than the cache."""

    def __init__(self) -> None:
        self._values = np.ones(1 << 15, np.float32)
        self.unit_s = self._calibrate()

    def run(self, units: int) -> None:
        for _ in range(units):
            np.multiply(self._values, 1.0, out=self._values)

    def units_for(self, seconds: float) -> int:
        return max(1, round(seconds / self.unit_s))

    def _calibrate(self) -> float:
        """The shortest of several measurements: the others had the core for a part of the time only."""
        lengths = []
        for _ in range(20):
            begin = time.perf_counter()
            self.run(100)
            lengths.append(time.perf_counter() - begin)
        return min(lengths) / 100
