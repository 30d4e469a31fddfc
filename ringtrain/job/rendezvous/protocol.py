"""A connection between a rank and the server of its rendezvous: proofs first, then messages of JSON.

    rank                                server
    magic, a nonce                ->
                                  <-    a nonce, and its proof
    its proof                     ->

As between the ranks (csrc/network/handshake.h), a proof is the HMAC of all that was said until then. The last byte of
the magic is the version of all that follows it.

A message is a byte that says whether it is compressed, its length in seven bytes, and JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from ringtrain._core import hmac_sha256, is_hmac_sha256

_NAME, _VERSION = b"ringtrv", b"\x03"
_MAGIC = _NAME + _VERSION
_NONCE, _PROOF = 16, 32
_LENGTH = 8
_PLAIN, _COMPRESSED = b"\x00", b"\x01"
# Shorter messages are not compressed. The fastest level halves what the others gain, and takes a third of their time.
_COMPRESSED_FROM_BYTES, _LEVEL = 1024, 1
# Of one rank, and of all of them together.
MOST_BYTES_OF_A_RANK = 1 << 20
MOST_BYTES = 1 << 30


class StrangerError(Exception):
    """The other side does not know the secret, or is something else."""


class VersionError(StrangerError):
    """The other side is another version of ringtrain."""


_MIN_RTT_AT, _NO_RTT = 148, 0xFFFFFFFF  # tcpi_min_rtt in struct tcp_info of Linux, and its value before a measurement


class Connection:
    """Messages over a socket. Every call has a deadline, on the clock of time.monotonic()."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._come = bytearray()  # of what is read next
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prove_as_rank(self, secret: bytes, deadline: float) -> None:
        """Raises StrangerError, and OSError where the connection is lost or the time over."""
        said = _MAGIC + os.urandom(_NONCE)
        self._send(said, deadline)
        answer = self._read(_NONCE + _PROOF, deadline)
        if answer.startswith(_NAME):
            raise VersionError
        said += answer[:_NONCE]
        _require(answer[_NONCE:], secret, b"server", said)
        self._send(hmac_sha256(secret, b"rank" + said), deadline)

    def prove_as_server(self, secret: bytes, deadline: float) -> None:
        """Raises as prove_as_rank()."""
        said = self._read(len(_MAGIC) + _NONCE, deadline)
        if not said.startswith(_MAGIC):
            if said.startswith(_NAME):
                self._send(_MAGIC.ljust(_NONCE + _PROOF), deadline)
                raise VersionError
            raise StrangerError
        nonce = os.urandom(_NONCE)
        said += nonce
        self._send(nonce + hmac_sha256(secret, b"server" + said), deadline)
        _require(self._read(_PROOF, deadline), secret, b"rank", said)

    def send(self, message: Any, deadline: float) -> None:
        self.send_packed(packed(message), deadline)

    def send_packed(self, data: bytes, deadline: float) -> None:
        self._send(data, deadline)

    def receive(self, most_bytes: int, deadline: float) -> Any:
        """Raises StrangerError where it is not a message of at most so many bytes.

        A part that has come when the time is over is the beginning of what the next call returns.
        """
        self._await(_LENGTH, deadline)
        head = bytes(self._come[:_LENGTH])
        message = self._read(_LENGTH + _size_of(head, most_bytes), deadline)
        return _unpacked(head, message[_LENGTH:], most_bytes)

    def notice_silence(self, after_s: float) -> None:
        """Makes the system call the connection lost when the other host does not answer. Processes may be silent.

        It is noticed so long after something was sent, else a second or two later.
        """
        for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * after_s))

    def twin(self) -> Connection:
        """The same connection for another thread, which may send while this one receives."""
        return Connection(self._socket.dup())

    def take_socket(self) -> socket.socket:
        """The socket, which belongs to the caller now."""
        return self._socket

    def has_come(self, longest_s: float) -> bool:
        """Whether there is something to read, or the connection is lost."""
        return self.has_come_here_or(longest_s, ())[0]

    def has_come_here_or(self, longest_s: float, others: Sequence[int]) -> tuple[bool, bool]:
        """As `has_come`, and whether one of these descriptors can be read."""
        poll = select.poll()  # select() takes no descriptor from 1024 on
        for descriptor in (self._socket.fileno(), *others):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * longest_s)}
        return self._socket.fileno() in ready, not ready.isdisjoint(others)

    def own_address(self) -> str:
        """Returns the address of this host, as the other side sees it."""
        return str(self._socket.getsockname()[0])

    def round_trip_s(self) -> float:
        """The shortest round trip so far, as the kernel has measured it; 0 where it does not tell."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
        shortest_us = int.from_bytes(info[_MIN_RTT_AT:], sys.byteorder)
        return 0.0 if len(info) < _MIN_RTT_AT + 4 or shortest_us == _NO_RTT else 1e-6 * shortest_us

    def shut(self) -> None:
        """Ends reads and writes, in other threads as well; what was sent arrives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _send(self, data: bytes, deadline: float) -> None:
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(data)

    def _read(self, size: int, deadline: float) -> bytes:
        self._await(size, deadline)
        data = bytes(self._come)
        self._come.clear()
        return data

    def _await(self, size: int, deadline: float) -> None:
        """Memory grows with what comes, not with what was announced."""
        while len(self._come) < size:
            self._socket.settimeout(_left(deadline))
            part = self._socket.recv(min(size - len(self._come), 1 << 16))
            if not part:
                raise ConnectionResetError("the other side has closed the connection")
            self._come += part


class Frames:
    """Messages out of the bytes of a connection, as they come."""

    def __init__(self, most_bytes: int):
        self._most_bytes = most_bytes
        self._data = bytearray()

    def take(self, data: bytes) -> Iterator[Any]:
        """Returns the messages that are whole with these bytes. Raises StrangerError where it is not a message."""
        self._data += data
        while len(self._data) >= _LENGTH:
            head = bytes(self._data[:_LENGTH])
            size = _size_of(head, self._most_bytes)
            if len(self._data) < _LENGTH + size:
                return
            content = bytes(self._data[_LENGTH : _LENGTH + size])
            del self._data[: _LENGTH + size]
            yield _unpacked(head, content, self._most_bytes)


def packed(message: Any) -> bytes:
    data = json.dumps(message).encode()
    kind = _PLAIN
    if len(data) >= _COMPRESSED_FROM_BYTES:
        kind, data = _COMPRESSED, zlib.compress(data, _LEVEL)
    return kind + len(data).to_bytes(_LENGTH - 1, "big") + data


def _size_of(head: bytes, most_bytes: int) -> int:
    size = int.from_bytes(head[1:], "big")
    if head[:1] not in (_PLAIN, _COMPRESSED) or size > most_bytes:
        raise StrangerError
    return size


def _unpacked(head: bytes, data: bytes, most_bytes: int) -> Any:
    try:
        if head[:1] == _COMPRESSED:
            unpacking = zlib.decompressobj()
            data = unpacking.decompress(data, most_bytes)
            if not unpacking.eof:
                raise StrangerError
        return json.loads(data)
    except (ValueError, RecursionError, zlib.error) as error:
        raise StrangerError from error


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other side did not answer in time")
    return min(left, 1e6)


def _require(proof: bytes, secret: bytes, role: bytes, said: bytes) -> None:
    if not is_hmac_sha256(proof, secret, role + said):
        raise StrangerError
