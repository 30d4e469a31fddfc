"""ringrun as a user starts it, and what of it still runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ringtrain.job import launched_by
from ringtrain.runner import command

TIMEOUT_S = 60
ROOT = str(Path(command.__file__).parents[2])

needs_mpi = pytest.mark.skipif(
    launched_by.detect() is not None, reason="a launcher cannot be started by a rank of another one"
)

# with the launcher of this environment's MPI, and with ringrun's own starter
on_each_network = pytest.mark.usefixtures("network")
# of the ranks of any launcher
RANK_VARIABLES = ("RINGTRAIN_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def ringrun(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run ringrun to its end."""
    return subprocess.run(
        [sys.executable, "-m", "ringtrain.run", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": ROOT, **more},
    )


def wait_until(is_true: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def processes_with(name: str, value: str) -> list[int]:
    """Process ids, not of zombies, that have this variable in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{name}={value}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has just ended
    return found


def zombies_of(parent: int) -> list[int]:
    """Children of a process that have ended without being waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent_of_it = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z" and int(parent_of_it) == parent:
            found.append(int(path.parent.name))
    return found
