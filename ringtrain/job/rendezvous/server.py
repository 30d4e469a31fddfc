"""The server of a rendezvous: it hands what each rank says to all ranks, round by round, and knows who is missing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any, NamedTuple

from ringtrain.failure.ranks_in_words import list_of_ranks
from ringtrain.job.rendezvous.listener import ANSWER_S, Listener
from ringtrain.job.rendezvous.protocol import MOST_BYTES_OF_A_RANK, Connection, StrangerError

_LOOK_S = 0.1


class Hello(NamedTuple):
    """The first message of a rank. Ranks that name the same `job` belong together."""

    job: str
    rank: int
    size: int
    host: str
    pid: int
    timeout_s: float  # 0: for ever


class _Failed(Exception):
    """The reply to a rank instead of an answer: the name of an error of ringtrain, and its text."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.answer = {"error": kind, "text": text}


class _Room:
    """The ranks of one job, and what they have said in each round. Any thread."""

    def __init__(self, size: int):
        self.size = size
        self._changed = threading.Condition()
        self._members: dict[int, Hello] = {}
        self._rounds: list[dict[int, Any]] = []
        self._failed: _Failed | None = None

    def is_full(self) -> bool:
        return len(self._members) == self.size

    def enter(self, hello: Hello) -> None:
        with self._changed:
            if hello.size != self.size or not 0 <= hello.rank < self.size:
                text = f"rank {hello.rank} of {hello.size} came to a job of {self.size} ranks"
                raise _Failed("ValueError", f"{text} (on {hello.host}, pid {hello.pid})")
            other = self._members.get(hello.rank)
            if other is not None:
                text = f"two processes are rank {hello.rank}: pid {other.pid} on {other.host} and pid {hello.pid} on"
                raise _Failed("ValueError", f"{text} {hello.host}")
            self._members[hello.rank] = hello

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

    def stalled(self, number: int, timeout_s: float) -> _Failed:
        with self._changed:
            waited = f"init() has waited {timeout_s:g} s (start_timeout_s) for all ranks"
            missing = [rank for rank in range(self.size) if rank not in self._members]
            if missing:
                return _Failed("StalledError", f"{waited}: {list_of_ranks(missing)} did not come")
            silent = [rank for rank in range(self.size) if rank not in self._rounds[number]]
            return _Failed("StalledError", f"{waited}: {list_of_ranks(silent)} came, but is stopped since then")


class Server:
    """Threads of this process that serve all jobs whose ranks know the secret, until close()."""

    def __init__(self, listener: socket.socket, secret: bytes):
        self.port: int = listener.getsockname()[1]
        self._lock = threading.Lock()
        self._rooms: dict[str, _Room] = {}
        self._listener = Listener(listener, secret, self._serve)

    def close(self) -> None:
        """Lets no process in any more. Those that are in get all answers."""
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
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
                if connection.has_come(0):  # nothing is due from it
                    raise ConnectionResetError
                if time.monotonic() > deadline:
                    raise room.stalled(number, hello.timeout_s)
            connection.send({"values": values}, time.monotonic() + ANSWER_S)
            number += 1

    def _room_for(self, hello: Hello) -> _Room:
        """One that is full belongs to an init() that is over, or almost."""
        with self._lock:
            room = self._rooms.get(hello.job)
            if room is None or room.is_full():
                room = self._rooms[hello.job] = _Room(hello.size)
            return room

    def _forget(self, job: str, room: _Room) -> None:
        with self._lock:
            if self._rooms.get(job) is room:
                del self._rooms[job]
