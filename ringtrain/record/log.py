"""What ringtrain says to the user beside its errors."""

from __future__ import annotations

import contextlib
import sys


def say(sentence: str) -> None:
    """Print it to standard error, if that is still there.

    A launcher that has ended has closed it. That must not put a BrokenPipeError in the place of what went wrong.
    """
    with contextlib.suppress(OSError, ValueError):
        print(f"ringtrain: {sentence}", file=sys.stderr, flush=True)
