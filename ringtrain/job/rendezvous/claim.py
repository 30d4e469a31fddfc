"""A process claims its rank of a job: the kernel refuses a second process of this host with the same rank.

Two jobs that were told the same place know the same secret, so neither a port nor a proof keeps them apart. A claim is
a name in the kernel, an abstract Unix socket: it needs no file and ends with its process, also by SIGKILL.
"""

from __future__ import annotations

import errno
import os
import socket
import struct

from ringtrain._core import hmac_sha256

_BACKLOG = 16
_claims: dict[tuple[str, bytes], socket.socket] = {}  # of this process, by place and secret


def claim(place: str, secret: bytes, rank: int, size: int) -> int | None:
    """Claims the rank until `release`, once for all meetings of this process at a place.

    Returns None if the rank is this process's now, else the pid of the process that has it, 0 if it cannot be told; and
    `second_pid` of that process returns the pid of this one then.
    """
    if (place, secret) in _claims:
        return None
    # Only one job at a time can have its rank 0 here, which serves; ranks of jobs of other sizes are told apart there.
    words = f"{place} rank {rank}" + (f" of {size}" if rank else "")
    name = "\0ringtrain-" + hmac_sha256(secret, words.encode()).hex()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(name)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return _pid_of(name)
    _claims[place, secret] = sock
    return None


def release() -> None:
    """Gives up all claims of this process."""
    while _claims:
        _claims.popitem()[1].close()


def descriptors() -> list[int]:
    """Returns what can be read when another process has tried to claim the rank of this one."""
    return [sock.fileno() for sock in _claims.values()]


def second_pid() -> int | None:
    """Returns the pid of another process that has tried to claim the rank of this one; None if none has."""
    for sock in _claims.values():
        try:
            second, _ = sock.accept()
        except OSError:
            continue
        with second:
            return _peer_of(second)
    return None


def _pid_of(name: str) -> int:
    """Returns the process that listens there, and lets it know that this one has come."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(name)
            return _peer_of(sock)
        except OSError:  # it ends just now
            return 0


def _peer_of(sock: socket.socket) -> int:
    return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


os.register_at_fork(after_in_child=release)  # a forked child may outlive the rank
