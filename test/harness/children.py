"""Children that a rank forks, as the workers of a DataLoader are."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def fork(body: Callable[[], object]) -> int:
    """The pid of a child that runs `body` and ends without what a rank does at its end; SIGALRM ends one that hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        body()
        os._exit(0)
    return child


def require_good_end(child: int) -> None:
    """Raise AssertionError if it hung or raised."""
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
