"""A process that keeps one CPU busy, as a neighbour on a shared machine would."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

# It ends by itself when its parent has, however that ended.
_PROGRAM = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def busy_core(cpu: int | None) -> Iterator[None]:
    """Keep this CPU busy meanwhile; None keeps none."""
    if cpu is None:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", _PROGRAM, str(cpu)]) as process:
        try:
            yield
        finally:
            process.kill()
