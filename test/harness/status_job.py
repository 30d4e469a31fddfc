"""A job that is asked how it is by `ringrun status`, and hangs or is slow in a script of a test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.hosts import SimulatedHosts
from harness.ringrun_job import ROOT, TIMEOUT_S, wait_until

# An operation waits for long from 2 s on.
LONG_S = 2.3
START = """
import ctypes, os, sys, threading, time
import numpy as np
import ringtrain as hvd

hvd.init()
# As in many jobs, a thread lives on that could submit something: no deadlock is certain.
threading.Thread(target=threading.Event().wait, daemon=False).start()

def tell():
    open(os.environ["FOLDER"] + f"/rank {hvd.rank()}", "w").close()

for _ in range(5):
    hvd.allreduce(np.ones(4), name="loss")
"""

# Other jobs of this user run on this machine while tests do.
_STATUS_OF_JOBS_BELOW = """
import runpy, sys
from ringtrain.job import job_file
folder, folders = sys.argv.pop(1), job_file._folders_for_reading
job_file._folders_for_reading = lambda: [one for one in folders() if one.startswith(folder)]
runpy.run_module("ringtrain.run", run_name="__main__", alter_sys=True)
"""


class Planted:
    """A job that runs, and what is said about it."""

    def __init__(self, folder: Path, hosts: SimulatedHosts | None, runtime: Path | None = None):
        self.folder, self._hosts = folder, hosts
        self.environ = {
            **os.environ,
            "PYTHONPATH": ROOT,
            "XDG_RUNTIME_DIR": str(runtime or folder),
            "FOLDER": str(folder),
            "RINGTRAIN_PEER_TIMEOUT_S": "60",
        }

    def status(self, *flags: str) -> subprocess.CompletedProcess[str]:
        below = os.path.realpath(self.environ["XDG_RUNTIME_DIR"])
        command = [sys.executable, "-c", _STATUS_OF_JOBS_BELOW, below, "status", *flags]
        if self._hosts is not None:
            command = self._hosts.command_on(0, command)
        options: Any = {"capture_output": True, "text": True, "timeout": TIMEOUT_S, "env": self.environ}
        return subprocess.run(command, check=False, cwd=self.folder, **options)

    def told(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.status("--json").stdout)
        return answer

    def verdict(self) -> tuple[str, str]:
        verdict = self.told()["verdict"]
        return verdict["kind"], verdict["sentence"]

    def wait_for(self, *ranks: int) -> None:
        """Until these ranks have come to the line of the script where the job begins to hang."""
        wait_until(lambda: all((self.folder / f"rank {rank}").exists() for rank in ranks))
        time.sleep(LONG_S)


@contextlib.contextmanager
def planted(
    folder: Path,
    script: str,
    size: int = 3,
    hosts: SimulatedHosts | None = None,
    *,
    runtime: Path | None = None,
    network: str = "sockets",
    flags: Sequence[str] = (),
) -> Iterator[Planted]:
    """Runs it until the end of the block.

    Args:
        script: goes on behind `START`.
        runtime: the folder of the user, where it is not `folder`.
        flags: of ringrun.
    """
    (folder / "train.py").write_text(START + script)
    folder.chmod(0o700)
    job = Planted(folder, hosts, runtime)
    words = ["-m", "ringtrain.run", "--no-prefix-output", "--network", network, "--grace-s", "1", *flags]
    if hosts is not None:
        words += ["-H", ",".join(hosts.names)]
        job.environ.update(hosts.environment)
    command = [sys.executable, *words, "-np", str(size), sys.executable, "train.py"]
    command = command if hosts is None else hosts.command_on(0, command)
    with subprocess.Popen(command, cwd=folder, env=job.environ) as ringrun:
        try:
            yield job
        finally:
            ringrun.send_signal(signal.SIGTERM)
            ringrun.wait(TIMEOUT_S)
