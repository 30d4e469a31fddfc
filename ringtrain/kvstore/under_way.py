"""Requests to servers that are under way."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import ringtrain._core as _core
from ringtrain.errors import StalledError
from ringtrain.handles import report_failure
from ringtrain.kvstore.servers.counts import Counts
from ringtrain.record.logger import logger

_LOOK_S = 0.2


class Limits(NamedTuple):
    """For how long somebody waits before a warning, and before an error; 0 is for ever."""

    warning_s: float
    shutdown_s: float


class UnderWay:
    """A request to servers, which reads or writes `arrays` until it is over."""

    __slots__ = ("_arrays", "_core", "_counts", "_limits")

    def __init__(self, core: _core.StoreHandle, arrays: Any, limits: Limits, counts: Counts) -> None:
        self._core = core
        self._arrays = arrays
        self._limits = limits
        self._counts = counts

    def poll(self) -> bool:
        """Whether the arrays may be changed."""
        return self._core.wait(0.0)

    def wait(self) -> None:
        """Wait until the arrays may be changed. Ctrl-C interrupts it. Raises RingtrainError where it has failed."""
        began_s = time.monotonic()
        try:
            if not self._core.wait(_LOOK_S):
                self._wait_long()
        except BaseException as error:
            report_failure(error)
            raise
        finally:
            self._counts.waiting_s += time.monotonic() - began_s
        self._arrays = None

    def is_over(self) -> bool:
        """Whether nobody needs the arrays any more."""
        return self._core.is_memory_free()

    def _wait_long(self) -> None:
        """Come back to Python now and then, which looks for signals."""
        began_s = time.monotonic()
        warn_s = began_s + self._limits.warning_s
        while not self._core.wait(_LOOK_S):
            waited_s = time.monotonic() - began_s
            if time.monotonic() > warn_s:
                logger.warning(f"a store has waited {waited_s:.0f} s: {self._core.missing()}")
                warn_s = float("inf")
            if 0 < self._limits.shutdown_s < waited_s:
                missing = self._core.missing()
                raise StalledError(f"a store has waited {waited_s:.1f} s (stall_shutdown_time_s): {missing}")
