"""The connection of a process to a Hub, made again when the network has broken it: see conversation.py."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from ringtrain.job.rendezvous.conversation import AWAY_S, Conversation, is_counted
from ringtrain.job.rendezvous.protocol import MOST_BYTES, Connection, StrangerError, packed

# One attempt to connect again, and the pauses between two attempts.
_ATTEMPT_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
# A message that the other side takes no byte of for so long is sent again over another connection.
_SEND_S = 5.0
_LOOK_S = 0.05


class GoneError(OSError):
    """The process of the server has ended: it has closed the connection, or its host refuses another one."""


class GivenUpError(Exception):
    """The server has taken this process for lost. The connection works, and nothing was said over it yet."""


class LastingConnection:
    """One thread hears; any may send.

    Args:
        connection: to the server; belongs to this one.
        silent_s: the connection is broken when the server's host has not answered for so long.
    """

    def __init__(self, connection: Connection, secret: bytes, silent_s: float):
        self._secret = secret
        self._silent_s = silent_s
        sock = connection.take_socket()
        self._family, self._address = sock.family, sock.getpeername()
        self._lock = threading.Lock()  # of all below
        self._broken_s: float | None = None  # since when
        self._is_over = False  # nobody makes it again
        self._begin()
        self._greet(connection)

    def send(self, message: Any) -> Conversation:
        """Returns the conversation that the message belongs to: if it is not the last one, nobody hears the message."""
        data = packed(message)
        with self._lock:
            if is_counted(message):
                self._conversation.keep(data)
            if self._broken_s is None:
                self._send(data)
            return self._conversation

    def hear(self, deadline: float = float("inf")) -> list[Any]:
        """Returns the next message; none where the connection was made again, or the message was for the connection.

        Raises:
            GoneError, GivenUpError: see there.
            TimeoutError: it is later than `deadline`, and there is no whole message, or no connection: call it again.
            StrangerError: what comes is not a message.
        """
        try:
            message = self._connection.receive(MOST_BYTES, deadline)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None and time.monotonic() >= deadline:
                raise  # but not what the kernel calls so
            with self._lock:  # of two threads the kernel tells one of a reset, and the other one of an end
                is_end = isinstance(error, ConnectionResetError) and error.errno is None and not self._is_cut
            if is_end:
                raise self._gone() from None
            self._connect_again(deadline)
            return []
        with self._lock:
            if isinstance(message, dict) and "heard" in message:
                self._is_known = True
                self._conversation.forget(message["heard"])
                return []
            if is_counted(message) and self._conversation.hear():
                self._send(packed(self._conversation.tell()))
        return [message]

    @property
    def conversation(self) -> Conversation:
        """The one that messages belong to now. Any thread."""
        return self._conversation

    def broken_for_s(self) -> float:
        """How long there has been no connection. Any thread."""
        since_s = self._broken_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def has_come(self, longest_s: float) -> bool:
        """Whether there is something to hear or to mend. Of the thread that hears."""
        return self._broken_s is not None or self._connection.has_come(longest_s)

    def has_come_here_or(self, longest_s: float, others: Sequence[int]) -> tuple[bool, bool]:
        """As that of Connection."""
        return self._connection.has_come_here_or(longest_s, others)

    def own_address(self) -> str:
        """Returns the address of this host, as the server sees it."""
        return self._connection.own_address()

    def round_trip_s(self) -> float:
        """The shortest round trip to the server."""
        return self._connection.round_trip_s()

    def await_sent(self, longest_s: float) -> None:
        """Waits while there is no connection that could take what was said. Not of the thread that hears."""
        end_s = time.monotonic() + longest_s
        while self._broken_s is not None and not self._is_over and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def shut(self) -> None:
        """Ends what the other thread hears; what was sent arrives."""
        self._connection.shut()

    def close(self) -> None:
        self._is_over = True
        self._cut()

    def forget_in_child(self) -> None:
        """In a forked child, which would keep the connection open: closes it here."""
        self._lock = threading.Lock()  # another thread may have held it
        self.close()

    def _cut(self) -> None:
        self._connection.close()
        self._outgoing.close()

    def _begin(self) -> None:
        self._token = os.urandom(16).hex()
        self._conversation = Conversation()
        self._is_known = False  # to the server

    def _greet(self, connection: Connection) -> None:
        """Goes on with this one."""
        connection.notice_silence(self._silent_s)
        self._connection, self._outgoing = connection, connection.twin()
        self._is_cut = False  # by this side
        self._send(packed({"talk": self._token, "heard": self._conversation.heard, "is_new": not self._is_known}))

    def _send(self, data: bytes) -> None:
        """The thread that hears notices what has failed."""
        try:
            self._outgoing.send_packed(data, time.monotonic() + _SEND_S)
        except OSError as error:
            self._is_cut |= not isinstance(error, BrokenPipeError)  # which the end of the other side is
            with contextlib.suppress(OSError):
                self._outgoing.take_socket().shutdown(socket.SHUT_RD)  # wakes the thread that hears

    def _gone(self) -> GoneError:
        """Of the process of the server, or of the wish for a connection."""
        self._is_over = True
        return GoneError("it has ended")

    def _connect_again(self, deadline: float) -> None:
        """Raises as `hear`."""
        with self._lock:
            self._broken_s = self._broken_s or time.monotonic()
            _close_by_reset(self._connection.take_socket())
            self._cut()
        pause_s = _FIRST_PAUSE_S
        while not self._is_over:
            try:
                return self._resume()
            except (ConnectionRefusedError, GoneError):
                raise self._gone() from None
            except (OSError, StrangerError):
                if time.monotonic() + pause_s > deadline:
                    raise TimeoutError from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise self._gone()

    def _resume(self) -> None:
        end_s = time.monotonic() + _ATTEMPT_S
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            _close_by_reset(sock)
            sock.settimeout(_ATTEMPT_S)
            sock.connect(self._address)
            connection = Connection(sock)
            connection.prove_as_rank(self._secret, end_s)
            self._greet(connection)
            answer = connection.receive(MOST_BYTES, end_s)
            _close_by_reset(sock, False)
        except BaseException:
            sock.close()
            self._cut()
            raise
        with self._lock:
            if self._is_over:  # since this attempt began
                self._cut()
                raise self._gone()
            self._broken_s = None
            if answer["heard"] is None:
                self._begin()
                self._greet(connection)
                raise GivenUpError(f"the network has kept this process from it for more than {AWAY_S:g} s")
            self._is_known = True
            for data in self._conversation.lacking(answer["heard"]):
                self._send(data)


def _close_by_reset(sock: socket.socket, on: bool = True) -> None:
    """Sets how the socket is closed: the usual way says that this process has ended."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", on, 0))
