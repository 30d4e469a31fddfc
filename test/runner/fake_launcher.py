"""A launcher of ringrun's that is a few lines of Python, for what real ones do only when a host is lost."""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection, Mapping

from ringtrain.runner.job import Job

# Starts the ranks as a launcher of Open MPI's kind would, in process groups of their own.
_START = """
import os, signal, subprocess, sys, time
count, command = int(sys.argv[1]), sys.argv[2:]
ranks = [
    subprocess.Popen(command, env={**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)}, start_new_session=True)
    for rank in range(count)
]
"""


class FakeLauncher:
    """Starts the ranks on this host, as `ranks`, and goes on with `script`."""

    passes_on: Mapping[int, int] = {}
    scancel = None
    last_signal = stop_signal = signal.SIGTERM
    shielded: Collection[int] = ()
    proxies_end_s = 0.0
    keeps_end_rule = makes_wrappers = False

    def __init__(self, script: str):
        self._script = script

    def arguments(self, job: Job) -> list[str]:
        return [sys.executable, "-c", _START + self._script, str(job.num_proc), *job.command]

    def environment(self, job: Job) -> dict[str, str]:
        return dict(job.environment)
