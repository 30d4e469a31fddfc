"""What init() has loaded before it begins: the floors above it, some of which have a part in it."""

from __future__ import annotations

from collections.abc import Callable

_loads: list[Callable[[], object]] = []


def load_with(load: Callable[[], object]) -> None:
    """Have `load` called by init(), which a script may call by the name of an adapter alone."""
    _loads.append(load)


def load_all() -> None:
    """To be called by init() before it does anything. What is loaded already takes no time."""
    for load in _loads:
        load()
