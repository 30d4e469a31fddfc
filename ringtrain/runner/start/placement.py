"""The slots of an elastic job, now and later, and an agent on each host with some: what a starter asks for processes.

| a starter asks | by |
| --- | --- |
| give me n processes | `hosts()`: how many each host has a slot for; what a slot is made of is known to the placement |
| run this in them | `open_agent(host)`: a Link. Its order {"start": number} starts one process |
| tell me of a death | the report {"ended": [number, code]} of that Link; a Link that closes has lost all processes |
| can there be more? | `watch()` delivers the hosts when they may have changed; `may_grow` |

Further orders to the Link of an elastic job are {"signal": number, "rank": number}, {"end": seconds of grace}, the
same with "rank": number, and {"finish": true} where no process is left. `HostPlacement` reaches hosts by ssh or a
launcher, and a job in an engine has a Placement of that engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ringtrain.runner.hosts import Host, UsageError, read_discovered
from ringtrain.runner.start.links import Link


class Placement(ABC):
    """Methods are for the thread of the starter."""

    @abstractmethod
    def hosts(self) -> list[Host]:
        """Returns the hosts with slots now; their names are unique."""

    @abstractmethod
    def open_agent(self, host: str) -> Link:
        """Starts the agent of a host. Raises OSError."""

    @property
    def may_grow(self) -> bool:
        """Whether there may be more slots one day than the hosts have now."""
        return False

    @abstractmethod
    def watch(self, deliver: Callable[[list[Host] | DiscoveryError], None]) -> None:
        """From now on calls `deliver`, in another thread, with the hosts of that moment, or why they are not known."""


# --- hosts ------------------------------------------------------------------------------------------------------------


class HostPlacement(Placement):
    """Hosts that the user has named, or those that a script of the user prints.

    Args:
        hosts: those at the beginning.
        open_agent: starts the agent of a host. May raise OSError.
        discovery: where further hosts come from, if anywhere.
        may_grow: also without that, as where hosts that were given up come back.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        open_agent: Callable[[str], Link],
        discovery: Discovery | None = None,
        may_grow: bool = False,
    ):
        self._hosts = list(hosts)
        self._open_agent = open_agent
        self._discovery = discovery
        self._may_grow = may_grow

    def hosts(self) -> list[Host]:
        return self._hosts

    def open_agent(self, host: str) -> Link:
        return self._open_agent(host)

    @property
    def may_grow(self) -> bool:
        return self._may_grow or self._discovery is not None

    def watch(self, deliver: Callable[[list[Host] | DiscoveryError], None]) -> None:
        if self._discovery is not None:
            self._discovery.watch(deliver)


_PERIOD_S = 1.0
# A script that hangs is one that has failed.
_LONGEST_S = 60.0


class DiscoveryError(Exception):
    """The hosts are not known; the message says why."""


class Discovery:
    """A script of the user that prints the hosts, lines such as `h1:2`. After the first time, a thread asks it."""

    def __init__(self, script: str, slots: int):
        """`slots` are those of a host that is named without a number. `script` is for a shell."""
        self._script = script
        self._slots = slots

    def ask(self) -> list[Host]:
        """Raises DiscoveryError."""
        source = f"--host-discovery-script {self._script}"
        # A file, not a pipe, which a process that the script leaves behind would hold open.
        with open(os.memfd_create("ringtrain-hosts"), "r+b") as file:
            process = subprocess.Popen(
                self._script, shell=True, stdin=subprocess.DEVNULL, stdout=file, start_new_session=True
            )
            try:
                process.wait(_LONGEST_S)
            except subprocess.TimeoutExpired:
                raise DiscoveryError(f"{source} has not ended within {_LONGEST_S:g} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            file.seek(0)
            try:
                printed = file.read().decode()
            except UnicodeDecodeError as error:
                raise DiscoveryError(f"{source} has printed no text: {error}") from None
        if process.returncode != 0:
            raise DiscoveryError(f"{source} has failed with exit code {process.returncode}")
        try:
            return read_discovered(printed, self._slots, source)
        except UsageError as error:
            raise DiscoveryError(str(error)) from error

    def watch(self, deliver: Callable[[list[Host] | DiscoveryError], None]) -> None:
        """Calls `deliver` in another thread with what the script says each second, as long as this process lives."""
        call_each_second(self.ask, deliver, threading.Event())


def call_each_second(
    ask: Callable[[], list[Host]],
    deliver: Callable[[list[Host] | DiscoveryError], None],
    has_ended: threading.Event,
) -> None:
    """Starts a thread that delivers what `ask` returns, or the DiscoveryError that it raises, until `has_ended`."""

    def go_on() -> None:
        while not has_ended.wait(_PERIOD_S):
            try:
                found: list[Host] | DiscoveryError = ask()
            except DiscoveryError as error:
                found = error
            deliver(found)

    threading.Thread(target=go_on, name="ringrun discovery", daemon=True).start()
