"""Lets in the processes of a job that know its secret, and listens to all of them in one thread."""

from __future__ import annotations

import contextlib
import errno
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ringtrain.job.rendezvous.protocol import (
    MOST_BYTES,
    MOST_BYTES_OF_A_RANK,
    Connection,
    Frames,
    StrangerError,
    packed,
)

# In which a connection must have proved that it is one of the job, and answered what it was asked.
ANSWER_S = 5.0
# So many at the same time; the others wait at the door.
MOST_STRANGERS = 256
# Pause after a connection that could not be taken, since there are no descriptors, memory or threads left.
_FULL_S = 0.1
_BACKLOG = 4096


class Listener:
    """Lets in until close().

    Args:
        serve: called on a thread of its own with each connection that has proved itself, and owns it.
    """

    def __init__(self, listener: socket.socket, secret: bytes, serve: Callable[[Connection], None]):
        self._listener = listener
        self._secret = secret
        self._serve = serve
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._is_closed = False
        threading.Thread(target=self._accept, name="ringtrain rendezvous", daemon=True).start()

    def close(self) -> None:
        """Lets no connection in any more."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._strangers.acquire()  # within ANSWER_S one of them has gone, or is none any more
            sock = None
            try:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._let_in, args=(sock,), daemon=True).start()
            except (OSError, RuntimeError, MemoryError):
                self._strangers.release()
                if sock is not None:
                    sock.close()
                if self._is_closed:
                    return
                time.sleep(_FULL_S)

    def _let_in(self, sock: socket.socket) -> None:
        try:
            connection = Connection(sock)
            connection.prove_as_server(self._secret, time.monotonic() + ANSWER_S)
        except (StrangerError, OSError):
            sock.close()
            return
        finally:
            self._strangers.release()
        try:
            self._serve(connection)
        except OSError:  # the connection has ended meanwhile
            sock.close()


def listen(host: str, ports: Sequence[int]) -> socket.socket | None:
    """On the first of these ports that is free, at that address alone if this host has it. None: all are taken."""
    for address in (host, ""):
        for port in ports:
            try:
                return bound(address, port)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                    break  # a name that others know this host by, such as that of a service, and maybe not yet
                if error.errno != errno.EADDRINUSE:
                    raise
        else:
            return None
    return None


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


# --- many connections, which one thread listens to and never waits for ------------------------------------------------


_PART = 1 << 16
# Errors that the kernel reports of a connection whose other host is silent or cannot be reached.
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


class Line:
    """The connection of one process. Of the hub's thread."""

    def __init__(self, sock: socket.socket, most_bytes: int):
        sock.setblocking(False)
        self.socket = sock
        self.name = ""  # what the listener calls its process
        self.send_error: OSError | None = None
        self._frames = Frames(most_bytes)
        self._unsent = bytearray()

    def receive(self) -> list[dict[str, Any]]:
        """Returns new messages. Raises OSError at the end of the connection, StrangerError for a stranger's bytes."""
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

    def is_open(self) -> bool:
        return self.socket.fileno() >= 0


class Receiver(Protocol):
    """Decides what messages mean. Called on the hub's thread; must not block."""

    def hear(self, line: Line, message: dict[str, Any]) -> None:
        """AttributeError, KeyError, TypeError and ValueError are mistakes of the other side, which is lost then."""

    def lose(self, line: Line, text: str) -> None:
        """The connection is closed, not by `drop`."""

    def tick(self) -> None: ...


class Hub:
    """Lets processes in and listens to them until close().

    Args:
        sock: where they connect; belongs to the hub.
        silent_s: a host is lost whose system has not answered for so long. It is asked when something is sent.
        tick_s: between two calls of `tick`.
        most_bytes: of one message.
    """

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        receiver: Receiver,
        silent_s: float,
        tick_s: float,
        most_bytes: int = MOST_BYTES_OF_A_RANK,
    ):
        self.port: int = sock.getsockname()[1]
        self._receiver = receiver
        self._silent_s = silent_s
        self._tick_s = tick_s
        self._most_bytes = most_bytes
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # from other threads
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._is_closed = False
        self._listener = Listener(sock, secret, self._let_in)
        self._thread = threading.Thread(target=self._run, name="ringtrain hub", daemon=True)

    def start(self) -> None:
        """From here on the listener is called."""
        self._thread.start()

    def close(self) -> None:
        """Cut all lines. Not from the hub's thread."""
        self._listener.close()
        self.call(self._end)
        self._thread.join()

    def call(self, function: Callable[[], object]) -> None:
        """Makes the hub's thread call it. Any thread."""
        self._calls.put(function)
        with contextlib.suppress(OSError):  # full: it will wake up; closed: nothing is left to wake
            self._wake.send(b"\0")

    def send(self, line: Line, message: dict[str, Any]) -> None:
        """If it is lost, the listener hears of it later."""
        try:
            line.send(message)
        except OSError as error:
            line.send_error = error
            with contextlib.suppress(OSError):
                line.socket.shutdown(socket.SHUT_RDWR)  # which will be read as its end
        self._watch(line)

    def drop(self, line: Line) -> None:
        if line.is_open():
            self._selector.unregister(line.socket)
            line.socket.close()

    def _let_in(self, connection: Connection) -> None:
        connection.notice_silence(self._silent_s)
        line = Line(connection.take_socket(), self._most_bytes)
        if self._is_closed:
            line.socket.close()
        else:
            self.call(lambda: self._add(line))

    def _add(self, line: Line) -> None:
        try:
            self._selector.register(line.socket, selectors.EVENT_READ, line)
        except (OSError, ValueError):  # out of memory for it, or closed: the other side comes again
            line.socket.close()

    def _end(self) -> None:
        self._is_closed = True

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._is_closed:
            for key, mask in self._selector.select(max(0.0, due_s - time.monotonic())):
                if key.data is None:
                    self._run_calls()
                elif key.data.is_open():  # not dropped by one before it
                    self._serve(key.data, mask)
            if time.monotonic() >= due_s:
                self._receiver.tick()
                due_s = time.monotonic() + self._tick_s
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

    def _serve(self, line: Line, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                line.send_rest()
                self._watch(line)
            if mask & selectors.EVENT_READ:
                for message in line.receive():
                    if line.is_open():  # nothing is expected behind what has it dropped
                        self._receiver.hear(line, message)
        except (OSError, StrangerError, AttributeError, KeyError, TypeError, ValueError) as error:
            self.drop(line)
            self._receiver.lose(line, self._why_lost(line.send_error or error))

    def _why_lost(self, error: Exception) -> str:
        """The kernel of a host that is up says when a process has ended; a host that is not up says nothing."""
        if isinstance(error, OSError) and error.errno in _SILENT:
            return (
                f"its host has not answered for {self._silent_s:g} s ({error.strerror}): look at its power and its link"
            )
        if isinstance(error, ConnectionResetError | BrokenPipeError) and error.errno is not None:
            return "its process has ended"
        return str(error) or "it has sent an invalid message"

    def _watch(self, line: Line) -> None:
        if line.is_open():
            more = selectors.EVENT_WRITE if line.has_unsent() else 0
            self._selector.modify(line.socket, selectors.EVENT_READ | more, line)
