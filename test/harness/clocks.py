"""Limits of time that hold on a busy machine, too."""

from __future__ import annotations

import time

_WORK_S = 0.1


def require_within(limit_s: float, begin: float) -> None:
    """Raise AssertionError if more has passed since `begin`, of time.monotonic(), than work of `limit_s` may take here.

    That is `limit_s` on an idle machine, and on one that is busy as much more as it is busy.
    """
    took = time.monotonic() - begin
    assert took < limit_s or took < limit_s * pace(), f"{took:.2f} s instead of {limit_s:g} s"


def pace() -> float:
    """How many times longer than alone a little work takes now: 1 with a core of its own, 3 where three want one."""
    begin, end_of_work = time.monotonic(), time.thread_time() + _WORK_S
    while time.thread_time() < end_of_work:
        pass
    return max(1.0, (time.monotonic() - begin) / _WORK_S)
