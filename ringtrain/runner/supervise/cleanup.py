"""Ending what a launcher has left behind on this host: every process of a job has a mark in its environment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from ringtrain.runner.supervise.rank_wrapper import JOB_VARIABLE

_KILL_S = 10.0


def processes_of(job: str) -> list[int]:
    """Process ids of the job, zombies excepted: these have no environment any more."""
    entry = f"{JOB_VARIABLE}={job}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # it has just ended, or is another user's
        with contextlib.suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def kill(job: str, within_s: float = _KILL_S) -> list[int]:
    """Kill all processes of the job and wait for their end. Returns those that outlive it for `within_s` seconds.

    A process does so while it waits in the kernel, for a file server or a GPU.
    """
    deadline = time.monotonic() + within_s
    while remaining := processes_of(job):
        if time.monotonic() > deadline:
            break
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return remaining
