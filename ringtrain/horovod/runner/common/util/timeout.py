"""`horovod.runner.common.util.timeout`: a limit of time for several steps."""

from __future__ import annotations

import time


class TimeoutException(Exception):
    """The time is over."""


class Timeout:
    """A limit that begins now.

    Args:
        timeout: in seconds.
        message: of the error; `{timeout}` and `{activity}` are filled in.
    """

    def __init__(self, timeout: float, message: str):
        self._timeout = timeout
        self._message = message
        self._end = time.monotonic() + timeout

    def remaining(self) -> float:
        """How many seconds are left, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Raises TimeoutException if the time is over."""
        if self.timed_out():
            raise TimeoutException(self._message.format(timeout=self._timeout, activity=activity))
