"""An application of YARN that consists of containers alone: Hadoop's own DistributedShell, by its client."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ringtrain.runner.supervise import rank_wrapper
from ringtrain.runner.yarn import container

_CLIENT = "org.apache.hadoop.yarn.applications.distributedshell.Client"
# The client ends a job by itself after ten minutes unless it is given more: the most that it takes, 24 days.
_LONGEST_MS = 2**31 - 1
_LAST_LINES = 20
_REMOVE_S = 30.0
_END_S = 5.0


class Application:
    """From its submission to close(). `identity` is YARN's name of it, and empty until YARN has taken it."""

    def __init__(self, hadoop: str, jar: str, name: str, containers: int, words: Sequence[str], script: str):
        """
        Args:
            name: that of the application, and of a folder in the user's home of the cluster's file system.
            words: the user's, for the client.
            script: what each container runs. It holds the secret of the job, so nobody else may read that folder.
        """
        self.identity = ""
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._hadoop, self._name = hadoop, name
        descriptor, self._script = tempfile.mkstemp(".sh", "ringtrain-")  # for its owner alone
        with os.fdopen(descriptor, "w") as file:
            file.write(script)
        words = [jar, _CLIENT, "-jar", jar, "-appname", name, "-num_containers", str(containers), *words]
        client = [hadoop, "jar", *words, "-timeout", str(_LONGEST_MS), "-shell_script", self._script]
        folder = [[hadoop, "fs", "-mkdir", name], [hadoop, "fs", "-chmod", "700", name]]
        line = " && ".join([*map(shlex.join, folder), f"exec {shlex.join(client)}"])
        self._process = subprocess.Popen(
            ["sh", "-c", line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for whoever decides what becomes of the job
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """That of the client, which ends with the application, or None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(_END_S)
        return code

    def close(self) -> None:
        """Wait for the client of an application that has ended, and leave nothing in the cluster's file system."""
        with contextlib.suppress(OSError):
            os.unlink(self._script)
        remover = self._start_remover()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            remover.wait(_REMOVE_S)

    def _start_remover(self) -> subprocess.Popen[bytes]:
        """It may outlive a job that is ended from outside, which leaves no time for another start of Java."""
        return subprocess.Popen(
            ["timeout", str(_REMOVE_S), self._hadoop, "fs", "-rm", "-r", "-f", "-skipTrash", self._name],
            env={name: value for name, value in os.environ.items() if name != rank_wrapper.JOB_VARIABLE},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last_lines.append(line.rstrip())
            found = re.search(r"\bapplication_\d+_\d+\b", line)
            if found and not self.identity:
                self.identity = found[0]


def script_for(address: str, port: int, secret: bytes) -> str:
    """What goes to `address` from each container. The secret is in no command line, where all users could read it."""
    # Python itself may need it
    libraries = os.environ.get("LD_LIBRARY_PATH")
    variables = [f"export LD_LIBRARY_PATH={shlex.quote(libraries)}"] if libraries else []
    words = [sys.executable, str(Path(container.__file__).resolve()), address, str(port)]
    return "\n".join(["#!/bin/bash", *variables, f"exec {shlex.join(words)} <<'END'", secret.hex(), "END", ""])
