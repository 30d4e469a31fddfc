"""A rendezvous: its server and a rank's side.

The server hands what each rank says to all ranks, round by round, and knows which ranks are missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from ringtrain import errors
from ringtrain.errors import list_of_ranks
from ringtrain.job.rendezvous import claim as claims
from ringtrain.job.rendezvous.listener import ANSWER_S, Listener, listen
from ringtrain.job.rendezvous.protocol import MOST_BYTES, MOST_BYTES_OF_A_RANK, Connection, StrangerError
from ringtrain.record.logger import logger

# --- the server -------------------------------------------------------------------------------------------------------


_LOOK_S = 0.1
WARNS_AFTER_S = 30.0  # of ranks that have not come


class Hello(NamedTuple):
    """The first message of a rank. Ranks that name the same `job` belong together."""

    job: str
    rank: int
    size: int
    host: str
    pid: int
    timeout_s: float  # 0: for ever
    batch_job: str  # of `Place`


class _Failed(Exception):
    """The reply to a rank instead of an answer: the name of an error of ringtrain, and its text."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.answer = {"error": kind, "text": text}


_REMEDY = (
    "If these are two jobs, give each a place of its own: another MASTER_PORT, or RINGTRAIN_RENDEZVOUS. If they are "
    "one, look at RANK and WORLD_SIZE, or RINGTRAIN_RANK and RINGTRAIN_SIZE"
)


def _named(hello: Hello) -> str:
    return f"rank {hello.rank} of {hello.size} (host {hello.host}, pid {hello.pid})"


def _two_processes(rank: int, pid: int, host: str, other_pid: int, other_host: str) -> str:
    pids = [str(one or "unknown") for one in (pid, other_pid)]  # one of another namespace is not known
    return f"two processes are rank {rank}: pid {pids[0]} on {host} and pid {pids[1]} on {other_host}. {_REMEDY}"


class _Room:
    """The ranks of one job, and what they have said in each round. Any thread."""

    def __init__(self, size: int):
        self.size = size
        self._changed = threading.Condition()
        self._members: dict[int, Hello] = {}
        self._finished: set[int] = set()
        self._refused = ""  # what the last process of another job was told
        self._rounds: list[dict[int, Any]] = []
        self._failed: _Failed | None = None
        self._warns_at = time.monotonic() + WARNS_AFTER_S

    def is_over_for(self, hello: Hello) -> bool:
        """Whether this rank has finished here, or its process comes again before its last message was read."""
        with self._changed:
            before = self._members.get(hello.rank)
            is_same_process = before is not None and (before.host, before.pid) == (hello.host, hello.pid)
            return is_same_process or hello.rank in self._finished

    def enter(self, hello: Hello) -> None:
        """Raises _Failed for a process of another job, and for one that may be of this or another: then all get it."""
        with self._changed:
            first = next(iter(self._members.values()), hello)
            if hello.size != self.size:
                self._refuse(f"{_named(hello)} came to a job of {self.size} ranks. {_REMEDY}")
            if hello.batch_job and first.batch_job and hello.batch_job != first.batch_job:
                jobs = f"{_named(hello)} is of {hello.batch_job}, and {_named(first)} of {first.batch_job}"
                self._refuse(f"{jobs}. {_REMEDY}")
            other = self._members.get(hello.rank)
            if not 0 <= hello.rank < self.size:
                self._failed = _Failed("ValueError", f"{_named(hello)}: ranks are numbered from 0. {_REMEDY}")
            elif other is not None:
                text = _two_processes(hello.rank, other.pid, other.host, hello.pid, hello.host)
                self._failed = _Failed("ValueError", text)
            else:
                self._members[hello.rank] = hello
                return
            self._changed.notify_all()
            raise self._failed

    def _refuse(self, text: str) -> NoReturn:
        self._refused = text
        logger.warning(text)
        raise _Failed("ValueError", text)

    def finish(self, rank: int) -> None:
        """The rank has said that it is done."""
        with self._changed:
            self._finished.add(rank)

    def leave(self, hello: Hello) -> None:
        """Without having said that it is done."""
        name = f"rank {hello.rank} (host {hello.host}, pid {hello.pid})"
        self.fail(_Failed("PeerLostError", f"{name} died while the others were in init()"))

    def fail(self, reason: _Failed) -> None:
        """All get the first reason instead of an answer."""
        with self._changed:
            self._failed = self._failed or reason
            self._changed.notify_all()

    def say(self, number: int, rank: int, value: Any) -> None:
        with self._changed:
            while len(self._rounds) <= number:
                self._rounds.append({})
            self._rounds[number][rank] = value
            if len(self._rounds[number]) == self.size:
                self._changed.notify_all()

    def answer(self, number: int, longest_s: float) -> list[Any] | None:
        """Returns what all have said in a round, or None if some have not yet after so many seconds."""
        with self._changed:
            said = self._rounds[number]
            self._changed.wait_for(lambda: len(said) == self.size or self._failed, longest_s)
            if len(said) == self.size:
                return [said[rank] for rank in range(self.size)]
            if self._failed:
                raise self._failed
            return None

    def warn_of_missing(self, timeout_s: float) -> None:
        """Warn once of the ranks that have not come for a while."""
        with self._changed:
            missing = [rank for rank in range(self.size) if rank not in self._members]
            if not missing or time.monotonic() < self._warns_at:
                return
            self._warns_at = float("inf")
        warn_of_missing(missing, timeout_s)

    def stalled(self, number: int, timeout_s: float) -> _Failed:
        with self._changed:
            waited = f"init() has waited {timeout_s:g} s (start_timeout_s) for all ranks"
            missing = [rank for rank in range(self.size) if rank not in self._members]
            if missing:
                refused = f" ({self._refused})" if self._refused else ""
                return _Failed("StalledError", f"{waited}: {list_of_ranks(missing)} did not come{refused}")
            silent = [rank for rank in range(self.size) if rank not in self._rounds[number]]
            return _Failed("StalledError", f"{waited}: {list_of_ranks(silent)} came, but is stopped since then")


def warn_of_missing(ranks: Sequence[int], timeout_s: float) -> None:
    """Warn that init() has waited WARNS_AFTER_S for these ranks."""
    limit = f"after {timeout_s:g} s (start_timeout_s) it fails" if timeout_s else "it waits for ever"
    logger.warning(
        f"init() has waited {WARNS_AFTER_S:g} s for {list_of_ranks(ranks)}, which "
        f"{'has' if len(ranks) == 1 else 'have'} not called init() yet; {limit}. Has the script ended there, or does "
        "it call init() on some ranks only?"
    )


class Server:
    """Threads of this process that serve all jobs whose ranks know the secret, until close()."""

    def __init__(self, listener: socket.socket, secret: bytes):
        self.port: int = listener.getsockname()[1]
        self._changed = threading.Condition()
        self._rooms: dict[str, _Room] = {}
        self._failure: _Failed | None = None  # of all rooms
        self._served = 0  # ranks that may still get an answer
        self._listener = Listener(listener, secret, self._serve)

    def close(self, answer_s: float = 0.0) -> None:
        """Lets no process in any more. Those that are in get all answers as long as this process lives.

        Args:
            answer_s: a process that ends after an error waits so long for the others to get the reason.
        """
        self._listener.close()
        with self._changed:
            self._changed.wait_for(lambda: self._served == 0, answer_s)

    def fail(self, text: str) -> None:
        """From now on all that wait, and all that come, get a PeerLostError with this text."""
        with self._changed:
            self._failure = _Failed("PeerLostError", text)
            for room in self._rooms.values():
                room.fail(self._failure)

    def _serve(self, connection: Connection) -> None:
        with self._changed:
            self._served += 1
        try:
            self._answer(connection)
        finally:
            with self._changed:
                self._served -= 1
                self._changed.notify_all()

    def _answer(self, connection: Connection) -> None:
        with contextlib.closing(connection), contextlib.suppress(StrangerError, OSError, TypeError):
            hello = Hello(*connection.receive(MOST_BYTES_OF_A_RANK, time.monotonic() + ANSWER_S))
            try:
                self._serve_rank(connection, hello)
            except _Failed as failed:
                connection.send(failed.answer, time.monotonic() + ANSWER_S)

    def _serve_rank(self, connection: Connection, hello: Hello) -> None:
        room = self._room_for(hello)
        room.enter(hello)
        try:
            self._serve_rounds(connection, hello, room)
        except _Failed as failed:
            room.fail(failed)
            raise
        except (OSError, StrangerError):
            room.leave(hello)
            raise
        finally:
            self._forget(hello.job, room)

    def _serve_rounds(self, connection: Connection, hello: Hello, room: _Room) -> None:
        deadline = time.monotonic() + hello.timeout_s if hello.timeout_s > 0 else float("inf")
        number = 0
        while (message := connection.receive(MOST_BYTES_OF_A_RANK, float("inf"))) is not None:
            room.say(number, hello.rank, message["value"])
            while (values := room.answer(number, _LOOK_S)) is None:
                if connection.has_come(0):  # it has something to say that all get, or is lost
                    refusal = connection.receive(MOST_BYTES_OF_A_RANK, time.monotonic() + ANSWER_S)
                    if not isinstance(refusal, dict):
                        raise StrangerError
                    raise _Failed("ValueError", str(refusal.get("failed")))
                if time.monotonic() > deadline:
                    raise room.stalled(number, hello.timeout_s)
                room.warn_of_missing(hello.timeout_s)
            connection.send({"values": values}, time.monotonic() + ANSWER_S)
            number += 1
        room.finish(hello.rank)

    def _room_for(self, hello: Hello) -> _Room:
        """A room that is over for this rank belongs to an init() that is over, or almost."""
        with self._changed:
            room = self._rooms.get(hello.job)
            if room is None or room.is_over_for(hello):
                room = self._rooms[hello.job] = _Room(hello.size)
            if self._failure is not None:
                room.fail(self._failure)
            return room

    def _forget(self, job: str, room: _Room) -> None:
        with self._changed:
            if self._rooms.get(job) is room:
                del self._rooms[job]


# --- a rank's side ----------------------------------------------------------------------------------------------------


_PROOF_S = 5.0
# How much longer than the server, which knows who is missing.
_GRACE_S = 5.0
# Rank 0, which serves, gives the others so long to get the reason of an error before it ends. A stopped one gets none.
_ANSWER_AFTER_AN_ERROR_S = 1.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_KINDS = {"StalledError": errors.StalledError, "PeerLostError": errors.PeerLostError, "ValueError": ValueError}


class Place(NamedTuple):
    """Says where the ranks meet. Rank 0 serves on the first free port, unless a server listens there already."""

    host: str
    ports: Sequence[int]
    batch_job: str = ""  # such as "SLURM_JOB_ID=7": who meets there may be in one and not in one, but not in two

    def __str__(self) -> str:
        ports = str(self.ports[0]) if len(self.ports) == 1 else f"{self.ports[0]}-{self.ports[-1]}"
        return f"{self.host}:{ports}"


class Member:
    """This rank at the rendezvous, until close(). One thread."""

    def __init__(self, connection: Connection, rank: int, end: float):
        self._connection = connection
        self._rank = rank
        self._end = end
        self._launcher = os.getppid()
        self.own_address = connection.own_address()

    def exchange(self, value: Any, within_s: float = float("inf")) -> list[Any]:
        """Returns what all ranks say in this round, by rank.

        Args:
            within_s: a limit for this round alone.

        Raises:
            ValueError: what is wrong with the place of a rank.
            StalledError: not all ranks came in time; says which.
            PeerLostError: a rank has died, or the launcher or the server has ended.
        """
        end = min(self._end, time.monotonic() + within_s)
        try:
            self._connection.send({"value": value}, end)
            while not self._connection.has_come(_LOOK_S):
                self._require_no_second()
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

    def _require_no_second(self) -> None:
        try:
            _require_no_second(self._rank)
        except ValueError as error:  # the others get it as well
            self._connection.send({"failed": str(error)}, time.monotonic() + _GRACE_S)
            raise

    def round_trip_s(self) -> float:
        """The shortest round trip to the rendezvous."""
        return self._connection.round_trip_s()

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
        ValueError: another process is this rank; all ranks that wait get it, too.
        StalledError: no server there knows the secret.
    """
    end = time.monotonic() + timeout_s + _GRACE_S if timeout_s > 0 else float("inf")
    first_pid = claims.claim(str(place), secret, rank, size)
    if first_pid is not None:
        raise _second_process(rank, first_pid, os.getpid())
    server = _serve(place, secret) if rank == 0 else None
    answer_s = _ANSWER_AFTER_AN_ERROR_S
    try:
        ports = place.ports if server is None else [server.port]
        place_s = timeout_s if place_timeout_s is None else place_timeout_s
        connection = connect(place, ports, secret, place_s, look=lambda: _require_no_second(rank))
        try:
            hello = Hello(job, rank, size, socket.gethostname(), os.getpid(), timeout_s, place.batch_job)
            connection.send(hello, end)
            member = Member(connection, rank, end)
            yield member
            member.close()
            answer_s = 0.0
        finally:
            connection.close()
    except BaseException:
        claims.release()
        raise
    finally:
        if server is not None:
            server.close(answer_s)


def _second_process(rank: int, first_pid: int, second_pid: int) -> ValueError:
    host = socket.gethostname()
    return ValueError(_two_processes(rank, first_pid, host, second_pid, host))


def _require_no_second(rank: int) -> None:
    """Raises ValueError if another process of this host has asked for the rank of this one since it has claimed it."""
    second_pid = claims.second_pid()
    if second_pid is not None:
        raise _second_process(rank, os.getpid(), second_pid)


def _serve(place: Place, secret: bytes) -> Server | None:
    listener = listen(place.host, place.ports)
    return None if listener is None else Server(listener, secret)


def connect(
    place: Place,
    ports: Sequence[int],
    secret: bytes,
    timeout_s: float,
    whom: str = "",
    look: Callable[[], None] = lambda: None,
) -> Connection:
    """Connects to the server there that knows the secret. A stranger there is not a reason to give up.

    Args:
        look: called again and again meanwhile; what it raises ends the attempt.
        whom: the waiting process and the other one, for errors; by default a rank for rank 0.

    Raises:
        StalledError: the right one has not come in `timeout_s`; 0 waits for ever.
    """
    end = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
    pause_s = 0.01
    reason: object = "nothing listens there"
    while time.monotonic() < end:
        look()
        for port in ports:
            try:
                return _prove(socket.create_connection((place.host, port), timeout=_PROOF_S), secret, end)
            except StrangerError:
                reason = (
                    f"who is at port {port} does not know this job's secret: it belongs to another job or user, or to "
                    "a host that does not share this home folder; then set RINGTRAIN_SECRET_FILE to a file of all hosts"
                )
            except ConnectionRefusedError:
                pass
            except OSError as error:
                reason = error
                if error.errno == errno.ENETUNREACH and place.host in _LOOPBACK:
                    remedy = "is loopback down? `ip link set lo up` starts it"
                    raise errors.StalledError(f"{place} cannot be reached: {error.strerror}; {remedy}") from None
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
