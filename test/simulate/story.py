"""One story of a world in Python: its seed, its faults, its events in virtual time, and the rule that it broke."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any
from unittest import mock

_HASH_START, _HASH_FACTOR, _HASH_MASK = 14695981039346656037, 1099511628211, (1 << 64) - 1
_MOST_EVENTS = 300_000


class TimeIsUp(BaseException):
    """Unwinds what waits at the end of a story."""


class Story:
    """Events in virtual time. Also the clock that the product asks, in the place of the module `time`."""

    def __init__(self, seed: int, without: Collection[int] = (), trace: bool = False):
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.finding = ""
        self.faults: list[str] = []
        self._without = without
        self._trace = trace
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0
        self._hash = _HASH_START

    @property
    def hash(self) -> int:
        """Of all events."""
        return self._hash

    def monotonic(self) -> float:
        return self.now

    def add_fault(self, text: str) -> bool:
        """Whether the fault happens in this telling."""
        self.faults.append(text)
        return len(self.faults) - 1 not in self._without

    def find(self, text: str) -> None:
        """Note a broken rule. The first one counts, since others may follow from it."""
        if not self.finding:
            self.finding = text
            self.trace("checker", f"finding: {text}")

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._order, action))

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        self.at(self.now + seconds, action)

    def run_until(self, end_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let events happen until that time, or until `is_over` after one of them."""
        while self.step(end_s):
            if is_over():
                return

    def step(self, end_s: float) -> bool:
        """Carries out the next event. Returns False, and sets the clock to that time, if none is due until then."""
        if not self._heap or self._heap[0][0] > end_s:
            self.now = max(self.now, end_s)
            return False
        self.now, order, action = heapq.heappop(self._heap)
        self.events += 1
        mixed = ((self._hash ^ order) * _HASH_FACTOR) & _HASH_MASK
        self._hash = ((mixed ^ int(self.now * 1e6)) * _HASH_FACTOR) & _HASH_MASK
        if self.events > _MOST_EVENTS:
            self.find("no end of events")
            raise TimeIsUp
        action()
        return True

    def trace(self, who: str, text: str) -> None:
        """One line for an event."""
        if self._trace:
            print(f"{self.now:12.6f}  {who:<16} {text}")


@contextmanager
def replaced(*names: tuple[ModuleType, str, Any]) -> Iterator[None]:
    """Give modules of the product other clocks and transports meanwhile: (module, name, what it is)."""
    patches = [mock.patch.object(module, name, value) for module, name, value in names]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def run_replaced(world: Any, *names: tuple[ModuleType, str, Any]) -> None:
    """Run a world with these names replaced until it is over or its time is up. Its threads end then."""
    with suppress(TimeIsUp), replaced(*names):
        try:
            world.run()
        finally:
            world.threads.end()
