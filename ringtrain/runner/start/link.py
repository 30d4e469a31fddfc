"""What the starter has of an agent: the way that leads to it, what goes there and what comes from it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple

from ringtrain.runner.launchers.remote_shell import remote_shell
from ringtrain.runner.start import agent
from ringtrain.runner.start.agent import REPORT, Lines, write_lines

# A host that has vanished is found out in half a minute.
_SSH_ALIVE = ("-oServerAliveInterval=10", "-oServerAliveCountMax=3")
# Stands for a host in a command line that starts an agent.
ANY_HOST = "{host}"
_REAP_S = 0.5
_WORDS = [sys.executable, "-I", "-S", agent.__file__]


class Share(NamedTuple):
    """The ranks of one host: `first`, `first + 1`, ..., `ranks` of them."""

    host: str
    first: int
    ranks: int
    is_remote: bool


def command_of_agent(
    share: Share, environ: Mapping[str, str], ssh_options: Sequence[str], ssh_alive: Sequence[str] = _SSH_ALIVE
) -> list[str]:
    """Everything else goes through its standard input, where no other user can see it."""
    if not share.is_remote:
        return _WORDS
    # Python itself may need it
    libraries = [f"LD_LIBRARY_PATH={environ['LD_LIBRARY_PATH']}"] if environ.get("LD_LIBRARY_PATH") else []
    return [*remote_shell(environ, ssh_options, ssh_alive), share.host, shlex.join(["env", *libraries, *_WORDS])]


def command_by_launcher(share: Share, words: Sequence[str]) -> list[str]:
    """The same by a launcher's command line, whose host is ANY_HOST."""
    if not share.is_remote:
        return _WORDS
    return [*(word.replace(ANY_HOST, share.host) for word in words), *_WORDS]


class Link(ABC):
    """One thread. `running` are the ranks of whose end the agent has not told."""

    def __init__(self, share: Share, open_streams: int):
        """`open_streams` is how many streams there are to be read."""
        self.running = set(range(share.first, share.first + share.ranks))
        self.open_streams = open_streams
        self._share = share
        self._orders = b""
        self._output = Lines()
        self._reports: list[dict[str, Any]] = []

    @property
    def is_open(self) -> bool:
        return self.open_streams > 0

    @property
    @abstractmethod
    def orders(self) -> IO[bytes] | socket.socket:
        """What they are written to."""

    @property
    def has_orders(self) -> bool:
        return bool(self._orders) and self.is_open

    @abstractmethod
    def streams(self) -> list[tuple[int, Callable[[bytes], None]]]:
        """Descriptors to be read, each with what takes the data, the end too."""

    def order(self, order: Mapping[str, object]) -> None:
        self._orders += json.dumps(order).encode() + b"\n"

    def write_orders(self) -> None:
        """As much as can be written now."""
        try:
            self._orders = self._orders[os.write(self.orders.fileno(), self._orders) :]
        except BlockingIOError:
            pass
        except OSError:  # its end is seen elsewhere
            self._orders = b""

    def take_reports(self) -> list[dict[str, Any]]:
        reports, self._reports = self._reports, []
        return reports

    def say(self, text: str) -> None:
        """To whoever reads this process's standard error."""
        write_lines(2, [text.encode()])

    @abstractmethod
    def end_in_words(self) -> str:
        """How it ended, for a link that is open no more."""

    @abstractmethod
    def close(self) -> None:
        """Whatever still runs sees that nobody gives orders any more."""

    def _take_line(self, line: bytes, to: int) -> None:
        """A report, or what is handed on to the descriptor `to`."""
        if line.startswith(REPORT):
            self._reports.append(json.loads(line.removeprefix(REPORT)))
        else:
            write_lines(to, [line])


class ProcessLink(Link):
    """Through a process, such as ssh, whose pipes lead there."""

    def __init__(self, share: Share, command: list[str]):
        """Raises OSError where the command cannot be started."""
        super().__init__(share, open_streams=2)
        self._program = command[0]
        self._errors = Lines()
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C for all would end ssh
        )
        os.set_blocking(self.orders.fileno(), False)

    @property
    def orders(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def streams(self) -> list[tuple[int, Callable[[bytes], None]]]:
        assert self._process.stdout is not None and self._process.stderr is not None
        return [(self._process.stdout.fileno(), self._take_output), (self._process.stderr.fileno(), self._take_errors)]

    def end_in_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        code = self._process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else "has ended"
        if not self._share.is_remote:
            return f"what starts the ranks of {self._share.host} {how}"
        exit_code = f" ({self._program}: exit code {code})" if code is not None and code >= 0 else ""
        return f"the connection to {self._share.host} {how}{exit_code}"

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _take_errors(self, data: bytes) -> None:
        write_lines(2, self._errors.feed(data) if data else self._errors.close())

    def _take_output(self, data: bytes) -> None:
        for line in self._output.feed(data) if data else self._output.close():
            self._take_line(line, 1)
