"""Ending a job so that nothing of it stays: neither ranks nor a launcher's daemons, which leave its process group.

Every process of a job inherits one environment variable with the name of the job; /proc shows who has it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

_MARK = "PYTEST_RANKS_JOB"
_TERMINATE_S = 5.0
_KILL_S = 10.0


def mark(environment: Mapping[str, str], job: str) -> dict[str, str]:
    """`environment` for the first process of the job."""
    return {**environment, _MARK: job}


def end(first: subprocess.Popen[bytes], job: str) -> None:
    """End all processes of `job`; SIGTERM first, so that a launcher may clean up. Raises RuntimeError if any stays."""
    if first.poll() is None:
        first.terminate()
        try:
            first.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            first.kill()
    deadline = time.monotonic() + _KILL_S
    while remaining := of_job(job):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {remaining} of the job {job} outlive SIGKILL")
        for pid in remaining:
            _kill(pid)
        first.poll()
        time.sleep(0.02)
    first.wait()


def of_job(job: str) -> list[int]:
    """Process ids of `job`, zombies excepted: these have no environment any more."""
    entry = f"{_MARK}={job}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has just ended, or it is another user's
    return found


def state(pid: int) -> str:
    """Returns what /proc says of a process, such as "S (sleeping)", or "gone"."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("State:"))


def describe_status(returncode: int | None) -> str:
    """A return code in words; launchers and shells give 128 + signal for a process that a signal ended."""
    if returncode is None:
        return "still running"
    number = -returncode if returncode < 0 else returncode - 128
    if number in signal.valid_signals():
        return f"exit status {returncode}, {signal.Signals(number).name}"
    return f"exit status {returncode}"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
