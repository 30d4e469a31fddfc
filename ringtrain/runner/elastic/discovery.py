"""The hosts of an elastic job as a script of the user's prints them: lines such as `h1:2`, asked again each second."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable

from ringtrain.runner.allocation.hosts import Host, UsageError, read_discovered

_PERIOD_S = 1.0
# A script that hangs is one that has failed.
_LONGEST_S = 60.0


class DiscoveryError(Exception):
    """The script has failed; the message says how."""


class Discovery:
    """Asks in a thread of its own, after the first time."""

    def __init__(self, script: str, slots: int):
        """`slots` are those of a host that is named without a number. `script` is for a shell."""
        self._script = script
        self._slots = slots
        self._has_ended = threading.Event()

    def ask(self) -> list[Host]:
        """Raises DiscoveryError."""
        source = f"--host-discovery-script {self._script}"
        process = subprocess.Popen(
            self._script,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            raise DiscoveryError(f"{source} has not ended within {_LONGEST_S:g} s") from None
        except UnicodeDecodeError as error:
            raise DiscoveryError(f"{source} has printed no text: {error}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode != 0:
            raise DiscoveryError(f"{source} has failed with exit code {process.returncode}")
        try:
            return read_discovered(printed, self._slots, source)
        except UsageError as error:
            raise DiscoveryError(str(error)) from error

    def watch(self, deliver: Callable[[list[Host] | DiscoveryError], None]) -> None:
        """Have `deliver` called in another thread with what the script says each second, until close()."""

        def go_on() -> None:
            while not self._has_ended.wait(_PERIOD_S):
                try:
                    found: list[Host] | DiscoveryError = self.ask()
                except DiscoveryError as error:
                    found = error
                deliver(found)

        threading.Thread(target=go_on, name="ringrun discovery", daemon=True).start()

    def close(self) -> None:
        self._has_ended.set()
