"""What workers, servers and the scheduler say of themselves, with option kv_verbose (PS_VERBOSE)."""

from __future__ import annotations

import sys


def say(verbose: int, who: str, text: str) -> None:
    """A line on standard error, from level 1 on."""
    if verbose >= 1:
        print(f"ringtrain kvstore {who}: {text}", file=sys.stderr, flush=True)
