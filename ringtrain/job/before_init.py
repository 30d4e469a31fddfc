"""Loads the floors above init() before it begins, since some of them have a part in it."""

from __future__ import annotations

from collections.abc import Callable

_loads: list[Callable[[], object]] = []


def load_with(load: Callable[[], object]) -> None:
    """Have `load` called by init(), which a script may call by the name of an adapter alone."""
    _loads.append(load)


def load_all() -> None:
    """Called by init() before it does anything. Modules that are loaded already take no time."""
    for load in _loads:
        load()
