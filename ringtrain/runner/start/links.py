"""The links of a starter to its agents, and the loop that waits for them, for signals and for other events."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any, NamedTuple, Protocol

from ringtrain.job.rendezvous.listener import allow_descriptors_beyond
from ringtrain.runner.hosts import remote_shell
from ringtrain.runner.start import agent
from ringtrain.runner.start.agent import REPORT, Lines, write_lines
from ringtrain.runner.supervise import process_tree
from ringtrain.runner.supervise.rank_wrapper import speaker

# --- links: the connection to an agent, with orders to it and reports from it -----------------------------------------


# ssh ends the connection to a lost host after 30 s.
_SSH_ALIVE = ("-oServerAliveInterval=10", "-oServerAliveCountMax=3")
# A host that is just starting refuses connections for a while.
_REFUSED = b"Connection refused"
_PATIENCE_S = 60
_A_SECOND_LATER = ("sh", "-c", 'sleep 1; exec "$0" "$@"')
# The placeholder of a host in a command line that starts an agent.
ANY_HOST = "{host}"
_REAP_S = 0.5
_WORDS = [sys.executable, "-I", "-S", agent.__file__]


class HasDescriptor(Protocol):
    """A file, or what has one."""

    def fileno(self) -> int: ...


class Share(NamedTuple):
    """The ranks of one host: `first`, `first + 1`, ..., `ranks` of them."""

    host: str
    first: int
    ranks: int
    is_remote: bool


def command_of_agent(share: Share, environ: Mapping[str, str], ssh_options: Sequence[str]) -> list[str]:
    """Returns the command that starts an agent. All else goes to its standard input, which other users cannot see."""
    if not share.is_remote:
        return _WORDS
    # Python itself may need the variable.
    libraries = [f"LD_LIBRARY_PATH={environ['LD_LIBRARY_PATH']}"] if environ.get("LD_LIBRARY_PATH") else []
    return [*remote_shell(environ, ssh_options, _SSH_ALIVE), share.host, shlex.join(["env", *libraries, *_WORDS])]


class Link(ABC):
    """The connection to an agent. One thread.

    `running`: ranks not reported as ended. `has_begun`: its agent runs, and may have started ranks.
    """

    def __init__(self, share: Share, open_streams: int):
        """`open_streams`: the number of streams to read."""
        self.running = set(range(share.first, share.first + share.ranks))
        self.open_streams = open_streams
        self.has_begun = False
        self._share = share
        self._output = Lines()
        self._reports: list[dict[str, Any]] = []

    @property
    def is_open(self) -> bool:
        return self.open_streams > 0

    @abstractmethod
    def order(self, order: Mapping[str, object]) -> None:
        """Gives the agent an order, without waiting for it."""

    def unwritten(self) -> Mapping[HasDescriptor, Callable[[], object]]:
        """Returns the files that orders wait for to be writable, each with the function that then writes them."""
        return {}

    @abstractmethod
    def streams(self) -> list[tuple[int, Callable[[bytes], None]]]:
        """Returns the descriptors to read, each with the function that gets the data; no data at the end."""

    def take_reports(self) -> list[dict[str, Any]]:
        reports, self._reports = self._reports, []
        return reports

    @abstractmethod
    def end_in_words(self) -> str:
        """Returns how a link that is closed ended, in words."""

    @abstractmethod
    def close(self) -> None:
        """Closes the link. A process that still runs at the other end reads the end of its orders."""

    def again(self) -> Link | None:
        """Returns a link in the place of this one, which is closed, if the host has refused it and may be starting."""
        return None

    def _take_line(self, line: bytes, to: int) -> None:
        """Keeps a report; passes on anything else, also what a start-up file has written without the end of a line."""
        said, found, text = line.rpartition(REPORT)
        report = _report_of(text) if found else None
        if report is None:
            self._pass_on(line, to)
            return
        if "began" in report:
            self.has_begun = True
        else:
            self._reports.append(report)
        if said:
            self._pass_on(said, to)

    def _pass_on(self, line: bytes, to: int) -> None:
        """Hands a line that is not a report to the descriptor `to`."""
        write_lines(to, [line])


def _report_of(text: bytes) -> dict[str, Any] | None:
    """Returns the report, or None of bytes that a process has written itself."""
    try:
        report = json.loads(text)
    except ValueError:
        return None
    return report if isinstance(report, dict) and not agent.KINDS_OF_REPORTS.isdisjoint(report) else None


class StreamLink(Link):
    """Orders are lines of a stream."""

    def __init__(self, share: Share, open_streams: int):
        super().__init__(share, open_streams)
        self._orders = b""

    @property
    @abstractmethod
    def orders(self) -> IO[bytes] | socket.socket:
        """The file that orders are written to."""

    def order(self, order: Mapping[str, object]) -> None:
        self._orders += json.dumps(order).encode() + b"\n"

    def unwritten(self) -> Mapping[HasDescriptor, Callable[[], object]]:
        return {self.orders: self._write_orders} if self._orders and self.is_open else {}

    def _write_orders(self, most: int | None = None) -> int:
        """Writes as many orders as possible without waiting, and at most `most` bytes. Returns the number of bytes."""
        try:
            written = os.write(self.orders.fileno(), self._orders[:most])
        except BlockingIOError:
            return 0
        except OSError:  # the end of the link is noticed elsewhere
            written = len(self._orders)
        self._orders = self._orders[written:]
        return written


class ProcessLink(StreamLink):
    """Through a process, such as ssh, whose pipes lead there."""

    def __init__(self, share: Share, command: list[str], before: Sequence[str] = ()):
        """`before`: words before those of the command. Raises OSError where the command cannot be started."""
        super().__init__(share, open_streams=2)
        self._command = command
        self._errors = Lines()
        self._refusals: list[bytes] = []  # lines that are not printed yet
        self._given: list[Mapping[str, object]] = []  # orders, until the agent has begun
        self._patience_until: float | None = None  # once the host has refused the first link
        self._process = subprocess.Popen(
            [*before, *command],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C for all would end ssh
        )
        allow_descriptors_beyond(self.orders.fileno())  # each host has three
        os.set_blocking(self.orders.fileno(), False)

    def order(self, order: Mapping[str, object]) -> None:
        super().order(order)
        if not self.has_begun:
            self._given.append(order)

    def again(self) -> Link | None:
        now = time.monotonic()
        until = self._patience_until or now + _PATIENCE_S
        if self.has_begun or not self._refusals or now >= until:
            write_lines(2, self._refusals)
            return None
        if self._patience_until is None:
            sentence = (
                f"{self._share.host} refuses the connection; it may be starting, so it is asked for {_PATIENCE_S} s"
            )
            write_lines(2, [f"{speaker()}: {sentence}".encode()])
        link = self._anew()
        link.running, link._patience_until = self.running, until
        for order in self._given:
            link.order(order)
        return link

    def _anew(self) -> ProcessLink:
        return ProcessLink(self._share, self._command, _A_SECOND_LATER)

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
        exit_code = f" ({self._command[0]}: exit code {code})" if code is not None and code >= 0 else ""
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
        lines = self._errors.feed(data) if data else self._errors.close()
        if not self.has_begun:
            self._refusals += [line for line in lines if _REFUSED in line]
            lines = [line for line in lines if _REFUSED not in line]
        write_lines(2, lines)

    def _take_output(self, data: bytes) -> None:
        for line in self._output.feed(data) if data else self._output.close():
            self._take_line(line, 1)


class LaunchedLink(ProcessLink):
    """Through the launcher of an MPI. Few bytes are on their way to the agent, which tells what it has read.

    The mpirun of Open MPI 5 loses a part of its standard input on the way to another host, if it reads more at once.
    """

    # PRTE_IOF_BASE_MSG_MAX of PRRTE, whose daemons have a buffer of this size
    _MOST_UNREAD = 4096

    def __init__(self, share: Share, words: Sequence[str], before: Sequence[str] = ()):
        """`words`: the beginning of the launcher's command line, with ANY_HOST in the place of the host.

        Raises OSError where the launcher cannot be started.
        """
        launcher = [word.replace(ANY_HOST, share.host) for word in words]
        super().__init__(share, [*launcher, *_WORDS, agent.TELL_READ_BYTES], before)
        self._words = words
        self._room = self._MOST_UNREAD

    def _anew(self) -> ProcessLink:
        return LaunchedLink(self._share, self._words, _A_SECOND_LATER)

    def unwritten(self) -> Mapping[HasDescriptor, Callable[[], object]]:
        return super().unwritten() if self._room > 0 else {}

    def _write_orders(self, most: int | None = None) -> int:
        written = super()._write_orders(self._room)
        self._room -= written
        return written

    def take_reports(self) -> list[dict[str, Any]]:
        reports = super().take_reports()
        self._room += sum(report["read"] for report in reports if "read" in report)
        return [report for report in reports if "read" not in report]


class ContainerLink(StreamLink):
    """Output from there comes in one stream: under ringrun both outputs of a rank are frames of its wrapper."""

    def __init__(self, share: Share, way: socket.socket, container: str):
        super().__init__(share, open_streams=1)
        self._container = container
        self._reading = way
        # a selector needs another descriptor for this
        self._writing = way.dup()
        way.setblocking(False)

    @property
    def orders(self) -> socket.socket:
        return self._writing

    def streams(self) -> list[tuple[int, Callable[[bytes], None]]]:
        return [(self._reading.fileno(), self._take)]

    def end_in_words(self) -> str:
        return f"the connection to container {self._container} on {self._share.host} has ended"

    def close(self) -> None:
        self._reading.close()
        self._writing.close()

    def _take(self, data: bytes) -> None:
        for line in self._output.feed(data) if data else self._output.close():
            self._take_line(line, 2)


# --- the loop ---------------------------------------------------------------------------------------------------------


class Loop:
    """Links are read, and written to, from `add` until they are closed at both ends, or `forget`."""

    def __init__(self, on_report: Callable[[Link, dict[str, Any]], None]):
        """`on_report` takes what an agent reports."""
        self._selector = selectors.PollSelector()  # that of epoll takes no files
        self._on_report = on_report
        self._links: list[Link] = []

    def add(self, link: Link) -> None:
        self._links.append(link)
        for stream, handle in link.streams():
            self._selector.register(stream, selectors.EVENT_READ, self._reader(link, stream, handle))

    def forget(self, link: Link) -> None:
        """Nothing that it may still say is of interest."""
        self._links.remove(link)
        for stream, _ in link.streams():
            if stream in self._selector.get_map():
                self._selector.unregister(stream)

    def handle_signals(self, numbers: Iterable[int], handle: Callable[[bytes], None], own: Iterable[int]) -> None:
        """`handle` takes those that have come. A signal that is ignored stays ignored, but for ringrun's `own` ones."""
        wake_up = process_tree.wake_up_by_signals()
        self.register(wake_up, lambda: handle(os.read(wake_up, 4096)))
        for number in {*numbers, *own}:
            if number in own or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)

    def register(self, stream: int | HasDescriptor, read: Callable[[], None]) -> None:
        """Call `read` whenever there is something to read, for ever."""
        self._selector.register(stream, selectors.EVENT_READ, read)

    def wait(self, longest_s: float, also: Mapping[HasDescriptor, Callable[[], object]] | None = None) -> None:
        """Wait until there is something, and handle it. `also` are to be read this time alone."""
        orders = {stream: write for link in self._links for stream, write in link.unwritten().items()}
        for stream, write in orders.items():
            self._selector.register(stream, selectors.EVENT_WRITE, write)
        for source, read in (also or {}).items():
            self._selector.register(source, selectors.EVENT_READ, read)
        ready = self._selector.select(longest_s)
        for passing in (*orders, *(also or {})):
            self._selector.unregister(passing)
        for key, _ in ready:
            key.data()

    def _reader(self, link: Link, stream: int, handle: Callable[[bytes], None]) -> Callable[[], None]:
        def read() -> None:
            try:
                data = os.read(stream, 1 << 16)
            except (ConnectionError, TimeoutError):  # of a host that has vanished
                data = b""
            handle(data)
            if not data:
                self._selector.unregister(stream)
                link.open_streams -= 1
            for report in link.take_reports():
                self._on_report(link, report)

        return read
