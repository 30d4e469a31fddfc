"""Lets in the processes of a job that know its secret, and listens to all of them in one thread."""

from __future__ import annotations

import contextlib
import errno
import queue
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ringtrain.job.rendezvous.conversation import AWAY_S, Conversation, Conversations, is_counted, is_reset
from ringtrain.job.rendezvous.protocol import (
    MOST_BYTES,
    MOST_BYTES_OF_A_RANK,
    Connection,
    Frames,
    StrangerError,
    VersionError,
    packed,
)
from ringtrain.record.logger import logger

# In which a connection must have proved that it is one of the job, and answered what it was asked.
ANSWER_S = 5.0
# So many at the same time; the others wait at the door.
MOST_STRANGERS = 256
# So many are kept free while the soft limit can be raised.
_SPARE_DESCRIPTORS = 64
# A thread ends after so long without a connection.
_IDLE_S = 0.5
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
        self._has_warned = False
        self._lock = threading.Lock()
        self._idle = 0  # threads
        self._waiting: queue.SimpleQueue[tuple[socket.socket, str] | None] = queue.SimpleQueue()  # None: it is closed
        threading.Thread(target=self._accept, name="ringtrain rendezvous", daemon=True).start()

    def close(self) -> None:
        """Lets no connection in any more."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._waiting.put(None)

    def forget_in_child(self) -> None:
        """In a forked child."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._strangers.acquire()  # within ANSWER_S one of them has gone, or is none any more
            sock = None
            try:
                sock, address = self._listener.accept()
                allow_descriptors_beyond(sock.fileno())
                self._hand_on(sock, address[0])
            except (OSError, RuntimeError, MemoryError) as error:
                self._strangers.release()
                self._warn_of_descriptors(error)
                if sock is not None:
                    sock.close()
                if self._is_closed:
                    return
                time.sleep(_FULL_S)

    def _hand_on(self, sock: socket.socket, host: str) -> None:
        """To an idle thread, or a new one. Ranks that prove themselves at once need one or two threads in all."""
        with self._lock:
            is_idle = self._idle > 0
            self._idle -= is_idle
        if is_idle:
            self._waiting.put((sock, host))
        else:
            threading.Thread(target=self._work, args=(sock, host), daemon=True).start()

    def _work(self, sock: socket.socket, host: str) -> None:
        while True:
            self._let_in(sock, host)
            with self._lock:
                if self._is_closed:
                    return
                self._idle += 1
            try:
                next_one = self._waiting.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:
                        self._idle -= 1
                        return
                next_one = self._waiting.get()  # it is on its way
            if next_one is None:
                return
            sock, host = next_one

    def _let_in(self, sock: socket.socket, host: str) -> None:
        try:
            connection = Connection(sock)
            connection.prove_as_server(self._secret, time.monotonic() + ANSWER_S)
        except (StrangerError, OSError) as error:
            self._warn_of_version(host, error)
            sock.close()
            return
        finally:
            self._strangers.release()
        try:
            self._serve(connection)
        except OSError:  # the connection has ended meanwhile
            sock.close()

    def _warn_of_version(self, host: str, error: Exception) -> None:
        if isinstance(error, VersionError):
            self._warn(
                f"a process of another version of ringtrain has come to this job from {host}; install "
                "the same version on all hosts"
            )

    def _warn_of_descriptors(self, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._warn(
                f"this process has {most} open files, the most that it may have, and others wait for a connection to "
                "it: raise the hard limit (ulimit -Hn) above the number of ranks by some dozens"
            )

    def _warn(self, text: str) -> None:
        """Warns of the first reason: it comes again and again."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(text)


def allow_descriptors_beyond(descriptor: int) -> None:
    """Raises the soft limit of this process to the hard one when this new descriptor comes near to it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < descriptor + _SPARE_DESCRIPTORS and soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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


def plain(host: str) -> str | bytes:
    """Returns the name of a host as the system takes it. Of text Python would import the slow codec "idna"."""
    return host.encode() if host.isascii() else host


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(
        plain(host) or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
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
    """The connection of one process, or one after the other. Of the hub's thread."""

    def __init__(self, sock: socket.socket, most_bytes: int):
        sock.setblocking(False)
        self.socket = sock
        self.name = ""  # what the listener calls its process
        self.conversation: Conversation | None = None  # of a process that makes another connection after a reset
        self.send_error: OSError | None = None
        self.is_writing = False  # the hub watches whether more can be sent
        self.is_finished = False  # nothing else will be sent
        self._frames = Frames(most_bytes)
        self._unsent: deque[memoryview] = deque()  # a message to many lines is one object in all of these
        self._unsent_bytes = 0

    def move(self, other: Line) -> None:
        """Goes on with the connection of `other`, which is new."""
        self.socket, self._frames = other.socket, other._frames
        self.send_error, self.is_writing = None, False
        self._unsent.clear()
        self._unsent_bytes = 0

    def receive(self) -> list[dict[str, Any]]:
        """Returns new messages. Raises OSError at the end of the connection, StrangerError for a stranger's bytes."""
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(_PART)
            if not data:
                raise ConnectionResetError("its process has ended")
            return list(self._frames.take(data))
        return []

    def send(self, data: bytes) -> None:
        """As much as goes; the rest goes with `send_rest`. Raises OSError."""
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        if self._unsent_bytes > MOST_BYTES:
            raise ConnectionResetError("it does not take what it is told")
        self.send_rest()

    def send_rest(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self.socket.send(self._unsent[0])
                self._unsent_bytes -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
            if self.is_finished:
                self.socket.shutdown(socket.SHUT_WR)

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
        silent_s: a host is lost whose system has not answered for so long. It is asked when something is sent. 0 is for
            ever.
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
        self.is_idle = False  # the receiver needs no ticks until it hears something; of the hub's thread
        self._packed: tuple[object, bytes] = (None, b"")  # the last message
        self._conversations: Conversations[Line] = Conversations()
        self._listener = Listener(sock, secret, self._let_in)
        self._thread = threading.Thread(target=self._run, name="ringtrain hub", daemon=True)

    def start(self) -> None:
        """From here on the listener is called."""
        self._thread.start()

    def close(self) -> None:
        """Cut all lines. Not from the hub's thread."""
        self.close_door()
        self.call(self.end)
        self._thread.join()

    def close_door(self) -> None:
        """Lets no process in any more. Any thread."""
        self._listener.close()

    def forget_in_child(self) -> None:
        """In a forked child, which has no thread of the hub: closes here what the parent has open."""
        self._listener.forget_in_child()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]

    def call(self, function: Callable[[], object]) -> None:
        """Makes the hub's thread call it. Any thread."""
        self._calls.put(function)
        with contextlib.suppress(OSError):  # full: it will wake up; closed: nothing is left to wake
            self._wake.send(b"\0")

    def send(self, line: Line, message: dict[str, Any]) -> None:
        """If it is lost, the listener hears of it later.

        A message that is sent to one line after the other is packed once, and must not change meanwhile: n lines cost
        one encoding and n calls of the kernel.
        """
        if self._packed[0] is not message:
            self._packed = message, packed(message)
        if line.conversation is not None and is_counted(message):
            line.conversation.keep(self._packed[1])
        self._send(line, self._packed[1])

    def _send(self, line: Line, data: bytes) -> None:
        if not line.is_open():  # what is kept is sent when the process is back
            return
        try:
            line.send(data)
        except OSError as error:
            line.send_error = line.send_error or error
            with contextlib.suppress(OSError):
                line.socket.shutdown(socket.SHUT_RDWR)  # which will be read as its end
        self._watch(line)

    def finish(self, line: Line) -> None:
        """Sends what is left, then tells the other side that this is all. That side closes the line."""
        line.is_finished = True
        if line.is_open() and not line.has_unsent():
            with contextlib.suppress(OSError):  # the receiver hears of its end
                line.send_rest()

    def are_some_away(self) -> bool:
        """Whether a process has no connection that may make another one."""
        return self._conversations.are_some_away()

    def drop(self, line: Line) -> None:
        self._conversations.forget(line)
        self._cut(line)

    def _cut(self, line: Line) -> None:
        if line.is_open():
            self._selector.unregister(line.socket)
            line.socket.close()

    def _let_in(self, connection: Connection) -> None:
        if self._silent_s:
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

    def end(self) -> None:
        """Cuts all lines, soon. The hub's thread."""
        self._is_closed = True

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._is_closed:
            for key, mask in self._selector.select(None if self.is_idle else max(0.0, due_s - time.monotonic())):
                if key.data is None:
                    self._run_calls()
                elif key.data.is_open():  # not dropped by one before it
                    self._serve(key.data, mask)
            if not self.is_idle and time.monotonic() >= due_s:
                for line in self._conversations.overdue(time.monotonic()):
                    self.drop(line)
                    again = f"it has not made another one for {AWAY_S:g} s"
                    self._receiver.lose(line, f"the network has broken its connection, and {again}")
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
                    if isinstance(message, dict) and "talk" in message:
                        line = self._resume(line, message)
                    elif line.is_open():  # nothing is expected behind what has it dropped
                        self._hear(line, message)
        except (OSError, StrangerError, AttributeError, KeyError, TypeError, ValueError) as error:
            why = line.send_error or error
            if self._conversations.is_awaited(line, why, time.monotonic()):
                self._cut(line)
            else:
                self.drop(line)
                self._receiver.lose(line, self._why_lost(why))

    def _resume(self, new: Line, hello: dict[str, Any]) -> Line:
        """Returns the line of the conversation that a new connection belongs to: see conversation.py."""
        line = self._conversations.find(str(hello["talk"]), new, bool(hello["is_new"]))
        if line is None:
            self._send(new, packed({"heard": None}))
            return new
        line.conversation = line.conversation or Conversation()
        lacking = line.conversation.lacking(int(hello["heard"]))
        if line is not new:
            self._cut(line)
            line.move(new)
            self._selector.modify(line.socket, selectors.EVENT_READ, line)
            self._conversations.back(line)
        self._send(line, b"".join([packed(line.conversation.tell()), *lacking]))
        return line

    def _hear(self, line: Line, message: Any) -> None:
        if line.conversation is not None:
            if isinstance(message, dict) and "heard" in message:
                line.conversation.forget(int(message["heard"]))
                return
            if is_counted(message) and line.conversation.hear():
                self._send(line, packed(line.conversation.tell()))
        self._receiver.hear(line, message)

    def _why_lost(self, error: Exception) -> str:
        """The kernel of a host that is up says when a process has ended; a host that is not up says nothing."""
        if isinstance(error, OSError) and error.errno in _SILENT:
            return (
                f"its host has not answered for {self._silent_s:g} s ({error.strerror}): look at its power and its link"
            )
        if isinstance(error, BrokenPipeError) or is_reset(error):
            return "its process has ended"
        return str(error) or "it has sent an invalid message"

    def _watch(self, line: Line) -> None:
        if line.is_open() and line.has_unsent() != line.is_writing:
            line.is_writing = line.has_unsent()
            more = selectors.EVENT_WRITE if line.is_writing else 0
            self._selector.modify(line.socket, selectors.EVENT_READ | more, line)
