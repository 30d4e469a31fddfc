"""The server of an elastic job: the connections of its processes, and what `Generations` makes of what they say."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection
from typing import Any

from ringtrain.job.rendezvous.generations import Arrival, Drop, Event, Generations, Limits, Output, Summary, Tell
from ringtrain.job.rendezvous.listener import Hub, Line

_TICK_S = 0.1
# A host is lost whose system has not answered for so long; it is asked at every beat.
_SILENT_S = 1.0
_BEAT_S = 0.25
_BEAT = {"kind": "beat"}  # packed once for all


class ElasticServer:
    """Serves the members of a job until close(). A thread of the launcher's process does all of it.

    Args:
        listener: where the processes connect; belongs to the server.
        on_event: called on that thread; must not block.
    """

    def __init__(self, listener: socket.socket, secret: bytes, limits: Limits, on_event: Callable[[Event], None]):
        self._generations = Generations(limits)
        self._on_event = on_event
        self._lines: dict[str, Line] = {}  # by member
        self._beat_s = time.monotonic()
        self._summary = self._generations.summary()
        self._hub = Hub(listener, secret, self, _SILENT_S, _TICK_S)
        self.port = self._hub.port
        self._hub.start()

    def close(self) -> None:
        """Closes all connections. Not from `on_event`."""
        self._hub.close()

    def summary(self) -> Summary:
        """Returns what has happened until now. Any thread."""
        return self._summary

    def hosts_changed(self) -> None:
        """The members are to come for another generation when it suits them. Any thread."""
        self._hub.call(lambda: self._do(self._generations.hosts_changed(time.monotonic())))

    def retire(self, members: Collection[str]) -> None:
        """These are to go as soon as the job can do without them, and all others stay. Any thread."""
        retired = list(members)
        self._hub.call(lambda: self._do(self._generations.retire(retired, time.monotonic())))

    def fail(self, text: str) -> None:
        """The job cannot go on: all members get this as an error. Any thread."""
        self._hub.call(lambda: self._do(self._generations.fail(text, time.monotonic())))

    def gone(self, member: str, text: str) -> None:
        """This process has ended, or its host is lost, as its starter knows better than its connection. Any thread."""
        self._hub.call(lambda: self._forget(member, text))

    # The hub's thread.

    def tick(self) -> None:
        self._do(self._generations.tick(time.monotonic()))
        if time.monotonic() >= self._beat_s:
            for line in list(self._lines.values()):
                self._hub.send(line, _BEAT)
            self._beat_s = time.monotonic() + _BEAT_S

    def hear(self, line: Line, message: dict[str, Any]) -> None:
        now_s = time.monotonic()
        kind = message["kind"]
        if kind == "come":
            self._know(line, str(message["member"]))
            host, pid, commits, patience_s, must_keep_state, has_state = message["arrival"]
            of_state = bool(must_keep_state), bool(has_state)
            arrival = Arrival(str(host), int(pid), int(commits), float(patience_s), *of_state)
            self._do(self._generations.come(line.name, arrival, now_s))
        elif kind == "say":
            self._do(self._generations.say(line.name, message["generation"], message["value"], now_s))
        elif kind == "joined":
            self._generations.joined(line.name, message["generation"], now_s)
        elif kind == "ready":
            commits, is_asking = int(message["commits"]), bool(message["is_asking"])
            self._do(self._generations.ready(line.name, message["generation"], commits, is_asking, now_s))
        elif kind == "committed":
            self._generations.committed(line.name)
        elif kind == "pong":
            self._generations.answer(line.name, now_s)
        elif kind == "failed":  # its script ends of an exception, as the end of the process will show
            self._cut(line, str(message["text"]))
        elif kind == "done":
            self._drop(line)
            self._do(self._generations.done(line.name, now_s))

    def lose(self, line: Line, text: str) -> None:
        if self._lines.get(line.name) is line:
            del self._lines[line.name]
            self._do(self._generations.lose(line.name, text, time.monotonic()))

    def _know(self, line: Line, member: str) -> None:
        """From its first message on. A process that was started in the place of another one has its name."""
        before = self._lines.get(member)
        if before is not None and before is not line:
            self._cut(before, "another process has taken its place")
        line.name = member
        self._lines[member] = line

    def _do(self, output: list[Output]) -> None:
        self._summary = self._generations.summary()
        for one in output:
            if isinstance(one, Tell):
                if one.member in self._lines:
                    self._hub.send(self._lines[one.member], one.message)
            elif isinstance(one, Drop):
                if one.member in self._lines:
                    self._drop(self._lines[one.member])
            else:
                self._on_event(one)

    def _drop(self, line: Line) -> None:
        if self._lines.get(line.name) is line:
            del self._lines[line.name]
        self._hub.drop(line)

    def _forget(self, member: str, text: str) -> None:
        if member in self._lines:
            self._cut(self._lines[member], text)

    def _cut(self, line: Line, text: str) -> None:
        self._hub.drop(line)
        self.lose(line, text)
