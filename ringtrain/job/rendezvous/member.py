"""A rank's side of the rendezvous."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ringtrain import errors
from ringtrain.job.rendezvous.listener import listen
from ringtrain.job.rendezvous.protocol import MOST_BYTES, Connection, StrangerError
from ringtrain.job.rendezvous.server import Hello, Server

_LOOK_S = 0.1
_PROOF_S = 5.0
# How much longer than the server, which knows who is missing.
_GRACE_S = 5.0
_KINDS = {"StalledError": errors.StalledError, "PeerLostError": errors.PeerLostError, "ValueError": ValueError}


class Place(NamedTuple):
    """Where the ranks meet. Rank 0 serves on the first port that is free, unless one serves there already."""

    host: str
    ports: Sequence[int]

    def __str__(self) -> str:
        ports = str(self.ports[0]) if len(self.ports) == 1 else f"{self.ports[0]}-{self.ports[-1]}"
        return f"{self.host}:{ports}"


class Member:
    """This rank at the rendezvous, until close(). One thread."""

    def __init__(self, connection: Connection, end: float):
        self._connection = connection
        self._end = end
        self._launcher = os.getppid()
        self.own_address = connection.own_address()

    def exchange(self, value: Any, within_s: float = float("inf")) -> list[Any]:
        """Returns what all ranks say in this round, by rank.

        Args:
            within_s: a limit for this round alone.

        Raises:
            StalledError: not all ranks came in time; says which.
            PeerLostError: a rank has died, or the launcher or the server has ended.
        """
        end = min(self._end, time.monotonic() + within_s)
        try:
            self._connection.send({"value": value}, end)
            while not self._connection.has_come(_LOOK_S):
                if os.getppid() != self._launcher:
                    raise errors.PeerLostError(
                        "the launcher has ended while this rank was in init(): another rank has failed; see its output"
                    )
                if time.monotonic() > end:
                    raise errors.StalledError("init() got no answer from the rendezvous in time (start_timeout_s)")
            answer = self._connection.receive(MOST_BYTES, end)
        except (OSError, StrangerError) as error:
            raise errors.PeerLostError(
                f"the server of the rendezvous, rank 0 or the launcher, died while this rank was in init(): {error}"
            ) from None
        if "error" in answer:
            raise _KINDS[answer["error"]](answer["text"])
        values: list[Any] = answer["values"]
        return values

    def close(self) -> None:
        """All has been said."""
        with contextlib.suppress(OSError):
            self._connection.send(None, time.monotonic() + _GRACE_S)
        self._connection.close()


@contextlib.contextmanager
def meet(
    place: Place, secret: bytes, job: str, rank: int, size: int, timeout_s: float, place_timeout_s: float | None = None
) -> Iterator[Member]:
    """Come to the rendezvous.

    Args:
        job: names those who belong together, among all that meet there.
        timeout_s: for all ranks to come, and all that they say; 0 waits for ever.
        place_timeout_s: for somebody to serve there, if it is not the same.

    Raises:
        StalledError: nobody who knows the secret serves there.
    """
    end = time.monotonic() + timeout_s + _GRACE_S if timeout_s > 0 else float("inf")
    server = _serve(place, secret) if rank == 0 else None
    try:
        ports = place.ports if server is None else [server.port]
        connection = connect(place, ports, secret, timeout_s if place_timeout_s is None else place_timeout_s)
        try:
            connection.send(Hello(job, rank, size, socket.gethostname(), os.getpid(), timeout_s), end)
            member = Member(connection, end)
            yield member
            member.close()
        finally:
            connection.close()
    finally:
        if server is not None:
            server.close()


def _serve(place: Place, secret: bytes) -> Server | None:
    listener = listen(place.host, place.ports)
    return None if listener is None else Server(listener, secret)


def connect(place: Place, ports: Sequence[int], secret: bytes, timeout_s: float, whom: str = "") -> Connection:
    """Connects to the server there that knows the secret. A stranger there is not a reason to give up.

    Args:
        whom: the waiting process and the other one, for errors; by default a rank for rank 0.

    Raises:
        StalledError: the right one has not come in `timeout_s`; 0 waits for ever.
    """
    end = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
    pause_s = 0.01
    reason: object = "nobody is there"
    while time.monotonic() < end:
        for port in ports:
            try:
                return _prove(socket.create_connection((place.host, port), timeout=_PROOF_S), secret, end)
            except StrangerError:
                reason = f"who is at port {port} does not know this job's secret: it belongs to another job or user"
            except ConnectionRefusedError:
                pass
            except OSError as error:
                reason = error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)
    whom = whom or f"init() has waited for rank 0 at {place}, where the ranks meet,"
    raise errors.StalledError(f"{whom} {timeout_s:g} s (start_timeout_s): {reason}")


def _prove(sock: socket.socket, secret: bytes, end: float) -> Connection:
    try:
        connection = Connection(sock)
        connection.prove_as_rank(secret, min(end, time.monotonic() + _PROOF_S))
    except BaseException:
        sock.close()
        raise
    return connection
