"""The server of an elastic job: the tethers of its processes, and what `Generations` makes of what they say."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from ringtrain.job.rendezvous.door import Door
from ringtrain.job.rendezvous.generations import Arrival, Drop, Event, Generations, Limits, Output, Summary, Tell
from ringtrain.job.rendezvous.protocol import (
    MOST_BYTES,
    MOST_BYTES_OF_A_RANK,
    Connection,
    Frames,
    StrangerError,
    packed,
)

_TICK_S = 0.1
# A host is lost whose system has not answered for so long; it is asked at every beat.
_SILENT_S = 1.0
_BEAT_S = 0.25
_PART = 1 << 16


class _Tether:
    """The one connection of a process. It is never waited for."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.socket = sock
        self.member = ""  # until it has come for the first time
        self._frames = Frames(MOST_BYTES_OF_A_RANK)
        self._unsent = bytearray()

    def receive(self) -> list[dict[str, Any]]:
        """What has come. Raises OSError at the end of the connection and StrangerError where it is no message."""
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(_PART)
            if not data:
                raise ConnectionResetError("its process has ended")
            return list(self._frames.take(data))
        return []

    def send(self, message: dict[str, Any]) -> None:
        """As much as goes; the rest goes with `send_rest`. Raises OSError."""
        self._unsent += packed(message)
        if len(self._unsent) > MOST_BYTES:
            raise ConnectionResetError("it does not take what it is told")
        self.send_rest()

    def send_rest(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent[:_PART])]

    def has_unsent(self) -> bool:
        return bool(self._unsent)


class ElasticServer:
    """Who belongs to the job, until close(). A thread of the launcher's process does all of it.

    Args:
        listener: where the processes connect; belongs to the server.
        on_event: called on that thread; must not block.
    """

    def __init__(self, listener: socket.socket, secret: bytes, limits: Limits, on_event: Callable[[Event], None]):
        self.port: int = listener.getsockname()[1]
        self._generations = Generations(limits)
        self._on_event = on_event
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # from other threads
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._tethers: dict[str, _Tether] = {}
        self._is_closed = False
        self._summary = self._generations.summary()
        self._door = Door(listener, secret, self._let_in)
        self._thread = threading.Thread(target=self._run, name="ringtrain elastic", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cut all tethers. Not from `on_event`."""
        self._door.close()
        self._call(self._end)
        self._thread.join()

    def summary(self) -> Summary:
        """What has happened until now. Any thread."""
        return self._summary

    def hosts_changed(self) -> None:
        """The members are to come for another generation when it suits them. Any thread."""
        self._call(lambda: self._do(self._generations.hosts_changed(time.monotonic())))

    def retire(self, members: Collection[str]) -> None:
        """As hosts_changed(), and the next generation is formed without these, which then wait. Any thread."""
        self._call(lambda: self._do(self._generations.retire(members, time.monotonic())))

    def gone(self, member: str, text: str) -> None:
        """This process has ended, or its host is lost, as somebody knows better than its tether. Any thread."""
        self._call(lambda: self._forget(member, text))

    def _let_in(self, connection: Connection) -> None:
        connection.notice_silence(_SILENT_S)
        tether = _Tether(connection.take_socket())
        if self._is_closed:
            tether.socket.close()
        else:
            self._call(lambda: self._selector.register(tether.socket, selectors.EVENT_READ, tether))

    def _call(self, function: Callable[[], object]) -> None:
        self._calls.put(function)
        with contextlib.suppress(OSError):  # full: it will wake up; closed: nobody wants to know
            self._wake.send(b"\0")

    def _end(self) -> None:
        self._is_closed = True

    def _run(self) -> None:
        tick_s = beat_s = time.monotonic()
        while not self._is_closed:
            for key, mask in self._selector.select(max(0.0, tick_s - time.monotonic())):
                if key.data is None:
                    self._run_calls()
                elif key.fileobj.fileno() >= 0:  # type: ignore[union-attr]  # not dropped by one before it
                    self._serve(key.data, mask)
            if time.monotonic() >= tick_s:
                self._do(self._generations.tick(time.monotonic()))
                tick_s = time.monotonic() + _TICK_S
            if time.monotonic() >= beat_s:
                for tether in list(self._tethers.values()):
                    self._send(tether, {"kind": "beat"})
                beat_s = time.monotonic() + _BEAT_S
        self._run_calls()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake.close()

    def _run_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(_PART)
        while not self._calls.empty():
            self._calls.get()()

    def _serve(self, tether: _Tether, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                tether.send_rest()
                self._watch(tether)
            if mask & selectors.EVENT_READ:
                for message in tether.receive():
                    if tether.socket.fileno() >= 0:  # nothing is expected behind "done"
                        self._hear(tether, message)
        except (OSError, StrangerError, KeyError, TypeError, ValueError) as error:
            self._lose(tether, str(error) or "it has said what nobody understands")

    def _hear(self, tether: _Tether, message: dict[str, Any]) -> None:
        now_s = time.monotonic()
        kind = message["kind"]
        if kind == "come":
            self._know(tether, str(message["member"]))
            host, pid, commits, patience_s = message["arrival"]
            arrival = Arrival(str(host), int(pid), int(commits), float(patience_s))
            self._do(self._generations.come(tether.member, arrival, now_s))
        elif kind == "say":
            self._do(self._generations.say(tether.member, message["generation"], message["value"], now_s))
        elif kind == "pong":
            self._generations.answer(tether.member, now_s)
        elif kind == "failed":  # its script ends of an exception, as the end of the process will show
            self._lose(tether, str(message["text"]))
        elif kind == "done":
            member = tether.member
            self._drop(tether)
            self._do(self._generations.done(member, now_s))

    def _know(self, tether: _Tether, member: str) -> None:
        """From its first message on. A process that was started in the place of another one has its name."""
        before = self._tethers.get(member)
        if before is not None and before is not tether:
            self._lose(before, "another process has taken its place")
        tether.member = member
        self._tethers[member] = tether

    def _do(self, output: list[Output]) -> None:
        for one in output:
            if isinstance(one, Tell):
                self._tell(one)
            elif isinstance(one, Drop):
                if one.member in self._tethers:
                    self._drop(self._tethers[one.member])
            else:
                self._summary = self._generations.summary()
                self._on_event(one)

    def _tell(self, one: Tell) -> None:
        tether = self._tethers.get(one.member)
        if tether is not None:
            self._send(tether, one.message)

    def _send(self, tether: _Tether, message: dict[str, Any]) -> None:
        try:
            tether.send(message)
        except OSError:
            with contextlib.suppress(OSError):
                tether.socket.shutdown(socket.SHUT_RDWR)  # which will be read as its end
        self._watch(tether)

    def _watch(self, tether: _Tether) -> None:
        more = selectors.EVENT_WRITE if tether.has_unsent() else 0
        self._selector.modify(tether.socket, selectors.EVENT_READ | more, tether)

    def _drop(self, tether: _Tether) -> None:
        if self._tethers.get(tether.member) is tether:
            del self._tethers[tether.member]
        if tether.socket.fileno() >= 0:
            self._selector.unregister(tether.socket)
            tether.socket.close()

    def _forget(self, member: str, text: str) -> None:
        if member in self._tethers:
            self._lose(self._tethers[member], text)

    def _lose(self, tether: _Tether, text: str) -> None:
        is_known = self._tethers.get(tether.member) is tether
        self._drop(tether)
        if is_known:
            self._do(self._generations.lose(tether.member, text, time.monotonic()))
