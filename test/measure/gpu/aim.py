"""Aims: the value that a figure must reach, the one that it should, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass

from ringtrain.bench.report import spread_text
from ringtrain.bench.results import Spread


@dataclass(frozen=True)
class Aim:
    """Bounds of a median: upper ones where the goal is smaller than what must be, else lower ones."""

    figure: str
    must: float
    goal: float
    unit: str = ""
    digits: int = 2

    def is_reached(self, bound: float, value: Spread) -> bool:
        return value.median <= bound if self.goal < self.must else value.median >= bound

    def verdict(self, value: Spread) -> str:
        unit = f" {self.unit}" if self.unit else ""
        bounds = []
        for word, bound in (("must", self.must), ("goal", self.goal)):
            state = "reached" if self.is_reached(bound, value) else "not reached"
            bounds.append(f"{word} {bound:g}{unit}: {state}")
        return f"{self.figure}: {spread_text(value, self.digits)}{unit}; {', '.join(bounds)}"
