"""The scheduler: the connections of all workers and servers, whose messages go to a `Membership`."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from typing import Any

from ringtrain.job.rendezvous.listener import Hub, Line
from ringtrain.kvstore.servers.membership import Drop, Limits, Membership, Note, Output, Over, Tell
from ringtrain.record.logger import write_line


def say(verbose: int, who: str, text: str) -> None:
    """Prints a line on standard error, from level 1 on (option kv_verbose, PS_VERBOSE)."""
    if verbose >= 1:
        write_line(f"ringtrain kvstore {who}: {text}")


_TICK_S = 0.1
_BEAT = {"kind": "beat"}  # packed once for all that beat one after the other
# One message may have the directory of a large model.
_MOST_BYTES = 1 << 26
# A longer pause of this process counts as this much silence of the others, whose messages are still unread. With a
# short kv_timeout_s it is a part of that.
_LONGEST_PAUSE_S, _PART_OF_PAUSE = 1.0, 1 / 4
# The time for the other processes to read their last messages.
_FAREWELL_S = 2.0


class Scheduler:
    """Runs on threads of this process until close().

    Args:
        listener: the socket to which processes connect; owned by the scheduler.
        verbose: option kv_verbose.
    """

    def __init__(self, listener: socket.socket, secret: bytes, limits: Limits, verbose: int):
        self._membership = Membership(limits)
        self._lines: dict[int, Line] = {}
        self._members: dict[Line, int] = {}
        self._coming: dict[Line, dict[str, Any]] = {}  # who has no place yet, and what it asks for
        self._numbers = itertools.count()
        self._ran_s, self._looked_s = 0.0, time.monotonic()
        self._longest_pause_s = max(2 * _TICK_S, min(_LONGEST_PAUSE_S, _PART_OF_PAUSE * limits.timeout_s))
        self._verbose = verbose
        self._is_over = threading.Event()
        self.failure = ""  # why the job never began
        self._hub = Hub(listener, secret, self, limits.timeout_s, _TICK_S, _MOST_BYTES)
        self.port = self._hub.port
        self._hub.start()

    def wait(self, longest_s: float) -> bool:
        """Waits at most this long. Returns whether the job is over."""
        return self._is_over.wait(longest_s)

    def has(self, processes: int) -> bool:
        """Whether this many processes are connected."""
        return len(self._lines) >= processes

    def end(self, text: str = "the scheduler was told to end", error: str = "ShutDownError") -> None:
        """Ends the job; its processes raise this error."""
        self._hub.call(lambda: self._do(self._membership.end(text, error)))

    def close(self) -> None:
        """Closes all connections, once the processes have read their last messages."""
        end_s = time.monotonic() + _FAREWELL_S
        while self._lines and time.monotonic() < end_s:
            time.sleep(0.01)
        self._hub.close()

    # Called on the hub's thread.

    def _now_s(self) -> float:
        """Returns for how long this process has run, the clock of the membership."""
        now_s = time.monotonic()
        self._ran_s += min(now_s - self._looked_s, self._longest_pause_s)
        self._looked_s = now_s
        return self._ran_s

    def tick(self) -> None:
        self._let_in()
        self._do(self._membership.tick(self._now_s()))

    def hear(self, line: Line, message: dict[str, Any]) -> None:
        now_s = self._now_s()
        if message["kind"] == "come":
            self._coming[line] = message
            self._let_in()
        elif line in self._coming:
            pass  # a sign of life
        elif message["kind"] == "done":
            self._do(self._membership.done(self._members[line], now_s))
        elif message["kind"] == "failed":
            self._do(self._membership.lose(self._members[line], str(message["text"]), now_s))
        else:
            self._do(self._membership.hear(self._members[line], message, now_s))
        if message["kind"] == "beat":
            self._hub.send(line, _BEAT)

    def _let_in(self) -> None:
        """While a process has no connection, nobody gets a place: that one may be dead, and its place free."""
        while self._coming and not self._hub.are_some_away():
            line, message = next(iter(self._coming.items()))
            del self._coming[line]
            member = next(self._numbers)
            self._lines[member], self._members[line] = line, member
            self._do(self._membership.come(member, message, self._now_s()))

    def lose(self, line: Line, text: str) -> None:
        self._coming.pop(line, None)
        member = self._members.pop(line, None)
        if member is not None:
            self._lines.pop(member, None)
            self._do(self._membership.lose(member, text, self._now_s()))

    def _do(self, output: list[Output]) -> None:
        for one in output:
            if isinstance(one, Tell):
                if one.member in self._lines:
                    self._hub.send(self._lines[one.member], one.message)
            elif isinstance(one, Drop):
                self._drop(one.member)
            elif isinstance(one, Note):
                say(self._verbose, "scheduler", one.text)
            elif isinstance(one, Over):
                self.failure = one.failure
                self._is_over.set()

    def _drop(self, member: int) -> None:
        line = self._lines.pop(member, None)
        if line is not None:
            self._members.pop(line, None)
            self._hub.drop(line)
