"""What a worker has asked of servers, for `hvd.metrics()`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Counts:
    """Of all stores of a worker."""

    pushes: int = 0  # values
    push_bytes: int = 0
    pulls: int = 0
    pull_bytes: int = 0
    waiting_s: float = 0.0

    def pushed(self, arrays: Iterable[Any]) -> None:
        """They are on their way."""
        for array in arrays:
            self.pushes += 1
            self.push_bytes += array.nbytes

    def pulled(self, arrays: Iterable[Any]) -> None:
        """They are asked for."""
        for array in arrays:
            self.pulls += 1
            self.pull_bytes += array.nbytes

    def with_traffic(self, traffic: dict[str, float]) -> dict[str, float]:
        """All that there is to tell."""
        return {**asdict(self), **traffic}
