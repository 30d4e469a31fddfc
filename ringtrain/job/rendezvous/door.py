"""The door of a rendezvous: whoever proves to know the secret is let in, and no stranger keeps it from opening."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence

from ringtrain.job.rendezvous.protocol import Connection, StrangerError

# In which a connection must have proved that it is one of the job, and answered what it was asked.
ANSWER_S = 5.0
# So many at the same time; the others wait at the door.
MOST_STRANGERS = 256
# Pause after a connection that could not be taken, for want of descriptors, memory or threads.
_FULL_S = 0.1
_BACKLOG = 4096


class Door:
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
        """Let nobody in any more."""
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
