"""What the first init() of a process has loaded before: the floors above it, some of which have a part in it."""

from __future__ import annotations

from collections.abc import Callable

_loads: list[Callable[[], object]] = []


def load_with(load: Callable[[], object]) -> None:
    """Have `load` called by the first init(), which a script may call by the name of an adapter alone."""
    _loads.append(load)


def load_all() -> None:
    """To be called by init() before it does anything."""
    while _loads:
        _loads.pop()()
