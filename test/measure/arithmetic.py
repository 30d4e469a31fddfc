"""Arithmetic that takes as long as asked: what is computed beside communication."""

from __future__ import annotations

import time

import numpy as np


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
