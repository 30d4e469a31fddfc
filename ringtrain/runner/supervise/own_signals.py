"""A signal that would end this Python at once lets it clean up first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class _Terminated(BaseException):
    """Unwinds the stack, as KeyboardInterrupt does for Ctrl-C."""


@contextlib.contextmanager
def unwinds_before_termination() -> Iterator[None]:
    """While this lasts, SIGTERM and SIGHUP run what cleans up within it before they end this process.

    Handlers of the caller are left alone, and so is everything outside the main thread, where there can be none.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # a second signal must not interrupt the cleaning
        if len(received) == 1:
            raise _Terminated

    is_main = threading.current_thread() is threading.main_thread()
    handled = [number for number in _SIGNALS if is_main and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in handled:
            signal.signal(number, handle)
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        if received:
            os.kill(os.getpid(), received[0])
