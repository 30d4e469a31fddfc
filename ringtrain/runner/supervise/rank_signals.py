"""Brings a signal to every rank of a job, once: through the launcher, which reaches all hosts, or past it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess

from ringtrain.runner.launchers.command_lines import Launcher
from ringtrain.runner.supervise.frames import Ended, Started

_SCANCEL_S = 10.0


class Courier:
    """Knows where the ranks run. For the thread that supervises the job."""

    def __init__(self, launcher: Launcher, process: subprocess.Popen[bytes]):
        self._launcher = launcher
        self._process = process
        self._running: dict[int, Started] = {}

    def note(self, event: Started | Ended) -> None:
        if isinstance(event, Started):
            self._running[event.rank] = event
        else:
            self._running.pop(event.rank, None)

    @property
    def running(self) -> list[int]:
        """The ranks that have started and not ended."""
        return sorted(self._running)

    def send(self, number: int) -> list[int]:
        """Signal the process groups of all ranks that run, as launchers do. Returns the ranks that it cannot reach."""
        if number in self._launcher.passes_on:
            self._process.send_signal(self._launcher.passes_on[number])
            return []
        if self._launcher.scancel is not None:
            return [] if self._signal_step(self._launcher.scancel, number) else self.running
        here = [started for started in self._running.values() if started.host == socket.gethostname()]
        for started in here:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(started.pid), number)
        return sorted(self._running.keys() - {started.rank for started in here})

    def _signal_step(self, scancel: str, number: int) -> bool:
        """Returns whether that could be done."""
        steps = {started.slurm_step for started in self._running.values() if started.slurm_step is not None}
        if not steps:
            return False
        command = [scancel, f"--signal={number}", *steps]
        try:
            return subprocess.run(command, capture_output=True, timeout=_SCANCEL_S, check=False).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False
