"""Ends a job in three steps: its ranks are asked, its launcher is told, and what is left on this host is killed."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable

from ringtrain.runner.supervise.names import RANKS, Names
from ringtrain.runner.supervise.rank_signals import Courier

# How long a launcher may take to end what still runs, also on other hosts.
_LAUNCHER_S = 3.0
# A launcher that outlives SIGKILL for so long waits in the kernel, perhaps for ever.
_KILLED_S = 10.0


class Shutdown:
    """For the thread that supervises the job, which calls `go_on` several times in a second."""

    def __init__(
        self, process: subprocess.Popen[bytes], courier: Courier, say: Callable[[str], None], names: Names = RANKS
    ):
        self._process = process
        self._courier = courier
        self._say = say
        self._names = names
        self._grace_s: float | None = None
        self._launcher_at = float("inf")
        self._kill_at = float("inf")

    @property
    def has_told_launcher(self) -> bool:
        return self._kill_at < float("inf")

    @property
    def has_failed(self) -> bool:
        """The launcher outlives everything."""
        return time.monotonic() > self._kill_at + _KILLED_S

    def ask_ranks(self, grace_s: float) -> None:
        """Send SIGTERM to the ranks. The launcher is told once all have ended, in `grace_s` at the latest."""
        if self._grace_s is None:
            self._grace_s = 0.0 if self._courier.send(signal.SIGTERM) else grace_s
            self._launcher_at = min(self._launcher_at, time.monotonic() + self._grace_s)

    def tell_launcher(self) -> None:
        """Have the launcher end the job, which gives the ranks as much time as it pleases."""
        self._launcher_at = min(self._launcher_at, time.monotonic())

    def kill(self) -> None:
        self._kill_at = min(self._kill_at, time.monotonic())

    def go_on(self) -> None:
        """Take the next step if it is due."""
        now, running = time.monotonic(), self._courier.running
        if not self.has_told_launcher and (now >= self._launcher_at or (self._grace_s is not None and not running)):
            if self._grace_s and running:
                late = self._names.listed(running)
                self._say(f"{late} did not end within {self._grace_s:g} s of SIGTERM, see --grace-s")
            self._process.terminate()
            self._kill_at = now + _LAUNCHER_S
        if now >= self._kill_at:
            self._process.kill()
