"""The steps of the optimizers of this rank, and functions to be called as each of them begins."""

from __future__ import annotations

from collections.abc import Callable

import ringtrain._core as _core

_count = 0
_listeners: list[Callable[[bool], None]] = []


def at_begin(listener: Callable[[bool], None]) -> None:
    """Has `listener(is_of_all)` called at the beginning of each step, when `count()` has that step."""
    _listeners.append(listener)


def begin(is_of_all: bool = True) -> None:
    """Called by the optimizers at the beginning of each step, on all ranks alike.

    Args:
        is_of_all: whether all ranks take this step, and none has joined.
    """
    set_count(_count + 1)
    for listener in _listeners:
        listener(is_of_all)


def count() -> int:
    """How many steps the optimizers have begun since init()."""
    return _count


def set_count(steps: int) -> None:
    """Steps are counted on from this number."""
    global _count
    _count = steps
    _core.note_step(steps)
