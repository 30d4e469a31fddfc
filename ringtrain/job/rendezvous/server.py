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
from ringtrain.job.rendezvous.columns import in_columns, of_columns
from ringtrain.job.rendezvous.lasting import GivenUpError, GoneError, LastingConnection
from ringtrain.job.rendezvous.listener import ANSWER_S, Hub, Line, listen, plain
from ringtrain.job.rendezvous.protocol import Connection, StrangerError, VersionError
from ringtrain.record.logger import logger

# --- the server -------------------------------------------------------------------------------------------------------


_TICK_S = 0.1
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


# The answer to a rank that has come to a server which ends.
_COME_AGAIN = {"again": True}
_REMEDY = (
    "If these are two jobs, give each a place of its own: another MASTER_PORT, or RINGTRAIN_RENDEZVOUS. If they are "
    "one, look at RANK and WORLD_SIZE, or RINGTRAIN_RANK and RINGTRAIN_SIZE"
)


def _named(hello: Hello) -> str:
    return f"rank {hello.rank} of {hello.size} (host {hello.host}, pid {hello.pid})"


def _two_processes(rank: int, pid: int, host: str, other_pid: int, other_host: str) -> str:
    pids = [str(one or "unknown") for one in (pid, other_pid)]  # one of another namespace is not known
    return f"two processes are rank {rank}: pid {pids[0]} on {host} and pid {pids[1]} on {other_host}. {_REMEDY}"


class _Rank(NamedTuple):
    """A rank that is connected."""

    hello: Hello
    line: Line
    room: _Room
    end_s: float  # when all must have said what it waits for


class _Room:
    """The ranks of one job, and what they say in the present round: a rank says nothing more before it has the answer.

    Of the hub's thread, as all below. A round of n ranks costs one answer that is packed once, and n calls of the
    kernel to send it.
    """

    def __init__(self, size: int):
        self.size = size
        self.ranks: dict[int, _Rank] = {}
        self.finished: set[int] = set()
        self.failed: _Failed | None = None
        self.said: dict[int, Any] = {}
        self._refused = ""  # what the last process of another job was told
        self._warns_at = time.monotonic() + WARNS_AFTER_S
        self._first_end_s = float("inf")

    def is_over_for(self, hello: Hello) -> bool:
        """Whether this rank has finished here, or its process comes again before its last message was read."""
        before = self.ranks.get(hello.rank)
        is_same_process = before is not None and (before.hello.host, before.hello.pid) == (hello.host, hello.pid)
        return is_same_process or hello.rank in self.finished

    def enter(self, one: _Rank) -> None:
        """Raises _Failed for a process of another job, and for one that may be of this or another: then all get it."""
        hello, other = one.hello, self.ranks.get(one.hello.rank)
        first = next((known.hello for known in self.ranks.values()), hello)
        if hello.size != self.size:
            self._refuse(f"{_named(hello)} came to a job of {self.size} ranks. {_REMEDY}")
        if hello.batch_job and first.batch_job and hello.batch_job != first.batch_job:
            jobs = f"{_named(hello)} is of {hello.batch_job}, and {_named(first)} of {first.batch_job}"
            self._refuse(f"{jobs}. {_REMEDY}")
        if not 0 <= hello.rank < self.size:
            self.failed = _Failed("ValueError", f"{_named(hello)}: ranks are numbered from 0. {_REMEDY}")
        elif other is not None:
            text = _two_processes(hello.rank, other.hello.pid, other.hello.host, hello.pid, hello.host)
            self.failed = _Failed("ValueError", text)
        if self.failed is not None:
            raise self.failed
        self.ranks[hello.rank] = one
        self._first_end_s = min(self._first_end_s, one.end_s)

    def _refuse(self, text: str) -> NoReturn:
        self._refused = text
        logger.warning(text)
        raise _Failed("ValueError", text)

    def look(self, now_s: float) -> _Failed | None:
        """Warns once of ranks that have not come for a while. Returns why one has waited for too long, if it has."""
        if self.said and now_s >= self._warns_at:
            self._warns_at = float("inf")
            missing = [rank for rank in range(self.size) if rank not in self.ranks]
            if missing:
                warn_of_missing(missing, self.ranks[next(iter(self.said))].hello.timeout_s)
        if now_s <= self._first_end_s:
            return None
        late = next((self.ranks[rank].hello for rank in self.said if self.ranks[rank].end_s < now_s), None)
        return None if late is None else self._stalled(late.timeout_s)

    def _stalled(self, timeout_s: float) -> _Failed:
        waited = f"init() has waited {timeout_s:g} s (start_timeout_s) for all ranks"
        missing = [rank for rank in range(self.size) if rank not in self.ranks]
        if missing:
            refused = f" ({self._refused})" if self._refused else ""
            return _Failed("StalledError", f"{waited}: {list_of_ranks(missing)} did not come{refused}")
        silent = [rank for rank in range(self.size) if rank not in self.said]
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
    """A thread of this process that serves all jobs whose ranks know the secret, until close().

    A rank costs one connection, so `ulimit -n` must be greater than the number of ranks by some dozens.

    Args:
        is_of_rank_0: the ranks that have met once are those of the place, and others are refused.
    """

    def __init__(self, listener: socket.socket, secret: bytes, *, is_of_rank_0: bool = False):
        self._is_of_rank_0 = is_of_rank_0
        self._known: dict[int, Hello] = {}  # of these, by rank
        self._rooms: dict[str, _Room] = {}
        self._ranks: dict[Line, _Rank] = {}
        self._leaving: dict[Line, float] = {}  # that have got an error, and when they are cut
        self._failure: _Failed | None = None  # of all rooms
        self._is_closing = False
        self._has_sent, self._is_empty = threading.Event(), threading.Event()
        self._hub = Hub(listener, secret, self, silent_s=0, tick_s=_TICK_S)
        self._hub.is_idle = True
        self.port = self._hub.port
        self._hub.start()

    def close(self, answer_s: float = 0.0) -> None:
        """Lets no process in any more. Those that are in get all answers as long as this process lives.

        Args:
            answer_s: a process that ends after an error waits so long for the others to get the reason.
        """
        self._hub.close_door()
        self._hub.call(self._begin_to_close)
        self._has_sent.wait(ANSWER_S)  # the answers to others, which may be on their way when this process has its own
        if answer_s:
            self._is_empty.wait(answer_s)

    def settle(self) -> None:
        """Waits until the answers have been sent that may be on their way when this process has its own."""
        has_sent = threading.Event()
        self._hub.call(has_sent.set)
        has_sent.wait(ANSWER_S)

    def forget_in_child(self) -> None:
        """In a forked child, which would keep the port: closes it here."""
        self._hub.forget_in_child()

    def fail(self, text: str) -> None:
        """From now on all that wait, and all that come, get a PeerLostError with this text. Any thread."""
        self._hub.call(lambda: self._fail_all(_Failed("PeerLostError", text)))

    # The hub's thread.

    def tick(self) -> None:
        now_s = time.monotonic()
        for line in [line for line, end_s in self._leaving.items() if end_s < now_s]:
            del self._leaving[line]
            self._hub.drop(line)
        for job, room in list(self._rooms.items()):
            stalled = room.look(now_s)
            if stalled is not None:
                self._fail(job, room, stalled)
        self._end_if_empty()
        self._hub.is_idle = not (self._ranks or self._leaving)

    def hear(self, line: Line, message: Any) -> None:
        self._hub.is_idle = False
        one = self._ranks.get(line)
        if line in self._leaving:
            return
        if one is None:
            self._enter(line, Hello(*message))
        elif message is None:
            self._finish(one)
        elif "failed" in message:
            self._fail(one.hello.job, one.room, _Failed("ValueError", str(message["failed"])))
        else:
            self._say(one, message["value"])

    def lose(self, line: Line, text: str) -> None:
        self._leaving.pop(line, None)
        one = self._ranks.pop(line, None)
        if one is not None:
            name = f"rank {one.hello.rank} (host {one.hello.host}, pid {one.hello.pid})"
            reason = _Failed("PeerLostError", f"{name} died while the others were in init()")
            self._fail(one.hello.job, one.room, reason)
        self._end_if_empty()

    def _enter(self, line: Line, hello: Hello) -> None:
        end_s = time.monotonic() + hello.timeout_s if hello.timeout_s > 0 else float("inf")
        if self._is_closing and self._is_of_rank_0:
            self._answer(line, _COME_AGAIN)
            return
        if stranger := self._stranger(hello):
            logger.warning(f"a process was refused: {stranger}")
            self._answer(line, _Failed("ValueError", stranger).answer)
            return
        room = self._room_for(hello)
        one, is_told = _Rank(hello, line, room, end_s), room.failed is not None or bool(room.ranks)
        try:
            room.enter(one)
        except _Failed as failed:
            self._answer(line, failed.answer)
            if room.failed is not None:
                self._fail(hello.job, room, failed)
                if not is_told:  # the rank that comes next is told, perhaps that of the server itself
                    self._rooms[hello.job] = room
            return
        self._ranks[line] = one

    def _stranger(self, hello: Hello) -> str:
        """Returns why the process is none of those that have met here before; "" if it may be."""
        known = self._known.get(hello.rank)
        if not self._known or (known is not None and (known.host, known.pid) == (hello.host, hello.pid)):
            return ""
        if known is None or known.size != hello.size:
            return f"{_named(hello)} came to a running job of {len(self._known)} ranks. {_REMEDY}"
        return _two_processes(hello.rank, known.pid, known.host, hello.pid, hello.host)

    def _room_for(self, hello: Hello) -> _Room:
        """A room that is over for this rank belongs to an init() that is over, or almost."""
        room = self._rooms.get(hello.job)
        if room is None or room.is_over_for(hello):
            room = self._rooms[hello.job] = _Room(hello.size)
            room.failed = self._failure
        return room

    def _say(self, one: _Rank, value: Any) -> None:
        room = one.room
        room.said[one.hello.rank] = value
        if len(room.said) == room.size:
            answer = {"values": in_columns([room.said[rank] for rank in range(room.size)])}
            room.said = {}
            for rank in room.ranks.values():
                self._hub.send(rank.line, answer)

    def _finish(self, one: _Rank) -> None:
        """The rank has said that it is done."""
        if self._is_of_rank_0 and not self._known:
            self._known = {rank: known.hello for rank, known in one.room.ranks.items()}
        one.room.finished.add(one.hello.rank)
        self._forget(one.hello.job, one.room)
        del self._ranks[one.line]
        self._hub.drop(one.line)
        self._end_if_empty()

    def _fail(self, job: str, room: _Room, reason: _Failed) -> None:
        """All get the first reason instead of an answer."""
        room.failed = room.failed or reason
        self._forget(job, room)
        for one in room.ranks.values():
            if self._ranks.pop(one.line, None) is not None:
                self._answer(one.line, room.failed.answer)

    def _fail_all(self, reason: _Failed) -> None:
        self._failure = reason
        for job, room in list(self._rooms.items()):
            self._fail(job, room, reason)

    def _answer(self, line: Line, answer: dict[str, Any]) -> None:
        """The last message to a rank, which closes the connection when it has read it."""
        self._leaving[line] = time.monotonic() + ANSWER_S
        self._hub.send(line, answer)
        self._hub.finish(line)

    def _forget(self, job: str, room: _Room) -> None:
        if self._rooms.get(job) is room:
            del self._rooms[job]

    def _begin_to_close(self) -> None:
        self._is_closing = True
        if self._is_of_rank_0:
            self._send_on()
        self._has_sent.set()
        self._end_if_empty()

    def _send_on(self) -> None:
        """Ranks that already wait for the next init() of this process, which is rank 0, meet it at its next server."""
        for job, room in list(self._rooms.items()):
            if 0 in room.ranks or room.failed is not None:
                continue
            self._forget(job, room)
            for one in room.ranks.values():
                if self._ranks.pop(one.line, None) is not None:
                    self._answer(one.line, _COME_AGAIN)

    def _end_if_empty(self) -> None:
        if self._is_closing and not (self._ranks or self._leaving):
            self._is_empty.set()
            self._hub.end()


# --- a rank's side ----------------------------------------------------------------------------------------------------


_PROOF_S = 5.0
# A rank connects again when the host of the server has not answered for so long.
_SILENT_S = 30.0
# How often a rank that waits looks whether its launcher is still there.
_PARENT_S = 1.0
# How much longer than the server, which knows who is missing.
_GRACE_S = 5.0
# How long a rank waits for the next server where one ends before all have met.
_NEXT_SERVER_S = 3.0
# Rank 0, which serves, gives the others so long to get the reason of an error before it ends. A stopped one gets none.
_ANSWER_AFTER_AN_ERROR_S = 1.0
# A rank that cannot be one looks so long for others to tell them.
_TELL_S = 1.0
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

    def __init__(self, come: Callable[[float | None], LastingConnection], rank: int, end: float):
        """`come`: connects to the server, which has so many seconds to come, and says who this rank is."""
        self._come = come
        self._has_met = False  # the others
        self._connection = connection = come(None)
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
        while True:
            try:
                answer = self._answer_to({"value": value}, end)
            except GoneError as error:
                if self._has_met:
                    raise self._died(error) from None
                self._come_again(error)
            except GivenUpError:
                raise errors.PeerLostError(
                    "the network has kept this rank from the rendezvous for so long that the others have given it up"
                ) from None
            except (OSError, StrangerError) as error:
                raise self._died(error) from None
            else:
                if "again" not in answer:
                    break
                self._come_again(None)
        self._has_met = True
        if "error" in answer:
            raise _KINDS[answer["error"]](answer["text"])
        return of_columns(answer["values"])

    def _come_again(self, why_ended: GoneError | None) -> None:
        """The server was that of the init() before, of which rank 0 has ended the job: another one follows."""
        self._connection.close()
        try:
            self._connection = self._come(None if why_ended is None else _NEXT_SERVER_S)
        except errors.StalledError:
            if why_ended is None:
                raise
            raise self._died(why_ended) from None

    @staticmethod
    def _died(error: Exception) -> errors.PeerLostError:
        return errors.PeerLostError(
            f"the server of the rendezvous, rank 0 or the launcher, died while this rank was in init(): {error}"
        )

    def _answer_to(self, message: Any, end: float) -> Any:
        self._connection.send(message)
        answers: list[Any] = []
        while not answers:
            while not self._has_come(end):
                if os.getppid() != self._launcher:
                    raise errors.PeerLostError(
                        "the launcher has ended while this rank was in init(): another rank has failed; see its output"
                    )
                if time.monotonic() > end:
                    raise errors.StalledError("init() got no answer from the rendezvous in time (start_timeout_s)")
            answers = self._connection.hear(end)
        return answers[0]

    def _has_come(self, end: float) -> bool:
        """Whether there is an answer, within _PARENT_S. Raises ValueError as soon as a second process has come."""
        longest_s = min(_PARENT_S, max(0.0, end - time.monotonic()))
        has_come, has_second = self._connection.has_come_here_or(longest_s, claims.descriptors())
        if has_second:
            self._require_no_second()
        return has_come

    def _require_no_second(self) -> None:
        try:
            _require_no_second(self._rank)
        except ValueError as error:  # the others get it as well
            self._connection.send({"failed": str(error)})
            raise

    def round_trip_s(self) -> float:
        """The shortest round trip to the rendezvous."""
        return self._connection.round_trip_s()

    def finish(self) -> None:
        """All has been said."""
        self._connection.send(None)

    def close(self) -> None:
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
    hello = Hello(job, rank, size, socket.gethostname(), os.getpid(), timeout_s, place.batch_job)
    first_pid = claims.claim(str(place), secret, rank, size)
    if first_pid is not None:
        second = _second_process(rank, first_pid, os.getpid())
        _tell(place, secret, hello, second)
        raise second
    server = _serve(place, secret) if rank == 0 else None
    try:
        ports = place.ports if server is None else [server.port]
        place_s = timeout_s if place_timeout_s is None else place_timeout_s

        def come(longest_s: float | None) -> LastingConnection:
            within_s = place_s if longest_s is None else longest_s
            proven = connect(place, ports, secret, within_s, look=lambda: _require_no_second(rank))
            connection = LastingConnection(proven, secret, _SILENT_S)
            connection.send(hello)
            return connection

        member = Member(come, rank, end)
        try:
            yield member
            member.finish()
        finally:
            member.close()
    except BaseException:
        leave(_ANSWER_AFTER_AN_ERROR_S)
        raise
    if server is not None:
        server.settle()


_servers: dict[tuple[str, bytes], Server] = {}  # of this process as rank 0, by place and secret


def leave(answer_s: float = 0.0) -> None:
    """Gives up all places of this process. `answer_s` as of `Server.close`."""
    claims.release()
    stop_serving(answer_s)


def stop_serving(answer_s: float = 0.0) -> None:
    """Refuses no more processes: the job of this one has failed, and they may be ranks of the next one."""
    while _servers:
        _servers.popitem()[1].close(answer_s)


def _forget_in_child() -> None:
    while _servers:
        _servers.popitem()[1].forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)


def _second_process(rank: int, first_pid: int, second_pid: int) -> ValueError:
    host = socket.gethostname()
    return ValueError(_two_processes(rank, first_pid, host, second_pid, host))


def _tell(place: Place, secret: bytes, hello: Hello, error: ValueError) -> None:
    """Lets ranks that wait for this one hear why it does not come. Those of a job that has begun hear nothing."""
    with contextlib.suppress(errors.RingtrainError, OSError, StrangerError):
        connection = connect(place, place.ports, secret, _TELL_S)
        try:
            connection.send(hello, time.monotonic() + _TELL_S)
            connection.send({"failed": str(error)}, time.monotonic() + _TELL_S)
            connection.has_come(_TELL_S)
        finally:
            connection.close()


def _require_no_second(rank: int) -> None:
    """Raises ValueError if another process of this host has asked for the rank of this one since it has claimed it."""
    second_pid = claims.second_pid()
    if second_pid is not None:
        raise _second_process(rank, os.getpid(), second_pid)


def _serve(place: Place, secret: bytes) -> Server | None:
    """Returns the server of this process there, until `leave`: it refuses ranks of other jobs while this one runs."""
    key = str(place), secret
    if key not in _servers:
        listener = listen(place.host, place.ports)
        if listener is None:
            return None
        _servers[key] = Server(listener, secret, is_of_rank_0=True)
    return _servers[key]


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
                at: Any = plain(place.host), port
                return _prove(socket.create_connection(at, timeout=_PROOF_S), secret, end)
            except VersionError:
                reason = f"another version of ringtrain is at port {port}; install the same one on all hosts"
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
