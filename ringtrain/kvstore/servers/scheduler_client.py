"""The connection of a process to the scheduler: its place in the job, its requests and the notices it gets."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ringtrain import errors
from ringtrain.job.rendezvous.columns import of_columns
from ringtrain.job.rendezvous.conversation import AWAY_S
from ringtrain.job.rendezvous.lasting import GivenUpError, GoneError, LastingConnection
from ringtrain.job.rendezvous.protocol import StrangerError
from ringtrain.job.rendezvous.server import Place, connect
from ringtrain.kvstore.servers.rounds import END

# A connection is made again when the scheduler's host has not answered for so long, or for a part of kv_timeout_s.
_SILENT_S, _PART_OF_SILENT = 3.0, 1 / 4
# How long the last word of a process waits for a connection, and a notice for its listener.
_FAREWELL_S, _HAND_ON_S = 5.0, 5.0
_LOOK_S = 0.2
# Added to a timeout, so that the scheduler, which knows the missing processes, reports first.
_GRACE_S = 5.0
_KINDS = {
    "StalledError": errors.StalledError,
    "DeadlockError": errors.DeadlockError,
    "PeerLostError": errors.PeerLostError,
    "RemoteError": errors.RemoteError,
    "ShutDownError": errors.ShutDownError,
    "ValueError": ValueError,
}

Notice = dict[str, Any]
# The interval of checks for silence of the scheduler; and how much of a longer pause counts, in which this process was
# stopped itself. With a short kv_timeout_s both are parts of that.
_WATCH_S, _PART_OF_WATCH = 0.25, 1 / 8
_LONGEST_WATCH_S, _PART_OF_LONGEST_WATCH = 1.0, 1 / 4


class Standing:
    """Whether this process still belongs to its job. Uses no sockets, threads or clock: time is an argument.

    It belongs to the job until the first of these events, which `end` describes from then on:

    - The process of the scheduler ends: PeerLostError, at once. A connection that the network breaks is made again.
    - The scheduler is silent for longer than `silent_s`: PeerLostError. Time in which this process did not run does not
      count.
    - The scheduler has expelled this process, which was silent for kv_timeout_s or was replaced: PeerLostError.
    - The scheduler reports that the job is over: ShutDownError, or the error that ended the job.
    """

    def __init__(self, silent_s: float, now_s: float):
        self._silent_limit_s = silent_s
        self._silent_s = 0.0
        self._looked_s = now_s
        self.end: tuple[str, str] | None = None  # the name of the error, and its text
        self.is_over = False  # the connection is still used to leave

    def hear(self, message: Notice, now_s: float) -> None:
        """Handles a message of the scheduler."""
        self._silent_s, self._looked_s = 0.0, now_s
        if message["kind"] == "expelled":
            self._finish("PeerLostError", message["text"])
        elif message["kind"] == "over":
            self.is_over = True
            self._finish(message.get("error", "ShutDownError"), f"the job of this store is over: {message['text']}")

    def look(self, now_s: float) -> None:
        """Called when no message has arrived. At most a second since the last call counts as silence."""
        longest_s = min(_LONGEST_WATCH_S, _PART_OF_LONGEST_WATCH * self._silent_limit_s)
        self._silent_s += min(now_s - self._looked_s, longest_s)
        self._looked_s = now_s
        if self._silent_s > self._silent_limit_s:
            self.cut(f"it has said nothing for {self._silent_s:.1f} s (kv_timeout_s)")

    def cut(self, text: object) -> None:
        """The connection to the scheduler has ended."""
        self._finish(
            "PeerLostError",
            f"the scheduler of this job is gone: {text}; nothing else knows which processes live, so the job has "
            "ended: start all its processes again",
        )

    def give_up(self) -> None:
        """The scheduler has given this process up, which was cut off from it."""
        self._finish(
            "PeerLostError",
            f"the network has kept this process from the scheduler for more than {AWAY_S:g} s, and the others take it "
            "for dead; start it again",
        )

    def require(self) -> None:
        """Raises the error that has ended the part of this process in the job, if any."""
        if self.end is not None:
            kind, text = self.end
            raise _KINDS[kind](text)

    def _finish(self, kind: str, text: str) -> None:
        self.end = self.end or (kind, text)


class World(NamedTuple):
    """The job as it is when this process has got its place."""

    number: int
    workers: int
    capacity: int
    servers: list[list[tuple[str, int]]]  # their addresses
    names: dict[int, str]  # of the workers: host and pid
    hosts: dict[int, str]
    living: list[int]  # workers
    restored: dict[int, float]  # servers that have restored a snapshot, and its age in seconds
    token: str
    is_recovery: bool
    terms: dict[int, int]  # of the workers: how many processes had the place of each before
    gone: dict[int, str]  # workers that are done or lost for good, and why


class SchedulerClient:
    """Until leave() or close(). Called by any thread; `come` and `world` are called first.

    Args:
        place: of the scheduler.
        timeout_s: how long to wait for the scheduler and all other processes; 0 waits for ever.
        heartbeat_s: the interval of heartbeats.
        silent_s: after this silence the scheduler counts as lost.
    """

    def __init__(self, place: Place, secret: bytes, timeout_s: float, heartbeat_s: float, silent_s: float):
        connection = connect(place, place.ports, secret, timeout_s, f"the scheduler of this job was not at {place} for")
        self._talk = LastingConnection(connection, secret, min(_SILENT_S, _PART_OF_SILENT * silent_s))
        self._timeout_s = timeout_s
        self._heartbeat_s, self._silent_s = heartbeat_s, silent_s
        self.own_address = self._talk.own_address()
        self._numbering = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[Notice]] = {}
        self._next_id = 1
        self._number, self._is_recovery = 0, False  # of the place of this process
        self._said: Notice = {}  # what all workers have said in the round whose answer comes next
        self._standing = Standing(silent_s, time.monotonic())
        self._world: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._notices: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        self._handing: threading.Thread | None = None
        self._heard = 0  # notices that have arrived, and those of them that were handed on
        self._handed = 0  # under _catching_up
        self._catching_up = threading.Condition()
        self._on_notice: Callable[[Notice], None] | None = None
        self._is_closed = False
        self._process = os.getpid()
        os.register_at_fork(after_in_child=self._talk.forget_in_child)  # else its death would not be noticed
        threading.Thread(target=self._listen, name="ringtrain scheduler client", daemon=True).start()

    def come(
        self,
        role: str,
        task: int | None,
        attempt: int,
        addresses: list[tuple[str, int]],
        size: tuple[int, int] | None = None,
    ) -> tuple[str, int]:
        """Takes a place. Returns its role and number. `size`: the workers and servers that the job is to have.

        Raises:
            ValueError: the job has no place for this process.
            PeerLostError: the scheduler is gone.
        """
        about = {"host": socket.gethostname(), "pid": os.getpid(), "attempt": attempt, "patience_s": self._timeout_s}
        about |= {"heartbeat_s": self._heartbeat_s, "size": size}
        answer = self._ask({"kind": "come", "role": role, "task": task, "addresses": addresses, **about}, _GRACE_S)
        self._number, self._is_recovery = int(answer["number"]), bool(answer["is_recovery"])
        return str(answer["role"]), self._number

    def world(self) -> World:
        """Waits for all workers and servers.

        Raises:
            StalledError: a process, which the error names, did not come in time; or the scheduler does not answer.
            ShutDownError: the job is over before it has begun.
            PeerLostError: the scheduler is gone.
        """
        end_s = time.monotonic() + self._timeout_s + _GRACE_S if self._timeout_s > 0 else float("inf")
        while True:
            with contextlib.suppress(queue.Empty):
                message = self._world.get(timeout=_LOOK_S)  # Ctrl-C interrupts it
                if message["kind"] != "world":
                    raise _error(message)
                return _world_of(message, self._number, self._is_recovery)
            self._require_scheduler()
            if time.monotonic() > end_s:
                raise errors.StalledError(f"the scheduler has not answered for {self._timeout_s + _GRACE_S:g} s")

    def listen_with(self, on_notice: Callable[[Notice], None]) -> None:
        """Call this with each notice, also with those that have arrived already, on a thread of the client."""
        self._on_notice = on_notice
        self._handing = threading.Thread(target=self._hand_on, name="ringtrain notices", daemon=True)
        self._handing.start()

    def say(
        self,
        label: str,
        value: Any = None,
        patience_s: float = 0,
        joins_only: bool = False,
        warning_s: float = 0,
        has_pushed: Callable[[], bool] = lambda: False,
    ) -> dict[int, Any]:
        """Holds a round of the workers. Returns the values of all, by number. A label has one round at a time.

        Args:
            patience_s: how long to wait for the others; 0 is for ever.
            joins_only: hold the round alone if no other worker waits in it and all have held one of this label.
            warning_s: after how long a notice "stalled" arrives, once; 0 is never.
            has_pushed: returns whether servers have all pushes of this worker.

        Raises:
            StalledError: not all have come in time.
            DeadlockError: another worker, for which this one waits, waits for this one elsewhere.
            PeerLostError: a worker is lost or has ended, or the scheduler is lost.
        """
        said = {"label": label, "value": value, "joins_only": joins_only}
        limits = {"patience_s": patience_s, "warning_s": warning_s}
        of_all: dict[str, Any] = self._ask({"kind": "say", **said, **limits}, patience_s, has_pushed)["said"]
        return dict(zip(of_all["numbers"], of_columns(of_all["values"]), strict=True))

    def publish(self, store: int, entries: dict[str, Any]) -> None:
        """Publishes entries in the directory; an entry has at least a "version"."""
        self._send({"kind": "publish", "store": store, "entries": entries})

    def find(
        self,
        store: int,
        versions: dict[str, int],
        patience_s: float,
        warning_s: float = 0,
        has_pushed: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Returns entries of the directory, at least of these versions; None for a missing entry of version 0.

        Args and errors as of `say`.
        """
        limits = {"patience_s": patience_s, "warning_s": warning_s}
        request = {"kind": "find", "store": store, "versions": versions, **limits}
        entries: dict[str, Any] = self._ask(request, patience_s, has_pushed)["value"]
        return entries

    def look_at_waits(self, what: str, awaited: list[int], known: dict[str, Any], patience_s: float) -> dict[str, Any]:
        """Returns where the other workers wait whose pushes servers have all: by number the member, the id, and words.

        Args:
            what: this worker waits for it.
            awaited: the workers for whose pushes it waits, seen after the last call.
            known: what the last call in this wait has returned.

        Raises:
            DeadlockError: workers wait for each other; all of them raise it.
        """
        request = {"kind": "stuck", "what": what, "awaited": awaited, "known": {n: one[:2] for n, one in known.items()}}
        seen: dict[str, Any] = self._ask(request, patience_s)["value"]
        return seen

    def count_dead(self, who: int, silent_s: float) -> int:
        """Returns how many processes were silent for that long. `who`: 2 for servers, 4 for workers, 6 for both."""
        return int(self._ask({"kind": "dead", "who": who, "silent_s": silent_s}, _GRACE_S)["value"])

    def command(self, head: int, body: str, patience_s: float) -> None:
        """Has all servers carry it out and waits. Raises RemoteError with the traceback of a server that failed."""
        self._ask({"kind": "command", "head": head, "body": body}, patience_s)

    def obeyed(self, order: int, text: str) -> None:
        """Reports that a command is carried out, or the error `text` with which it has failed."""
        self._send({"kind": "obeyed", "order": order, "text": text})

    def be_ready(self, snapshot_age_s: float) -> None:
        """Reports that a replacement of a server has the values of its predecessor, so workers may connect."""
        self._send({"kind": "ready", "snapshot_age_s": snapshot_age_s})

    def be_elastic(self) -> None:
        """Lets workers come and go from now on."""
        self._send({"kind": "elastic"})

    def leave(self, patience_s: float) -> None:
        """Leaves the job without an error. Waits for the other workers first, unless the scheduler is lost."""
        with contextlib.suppress(errors.RingtrainError):
            if patience_s > 0:
                self.say(END, None, patience_s)
        self._say_at_last({"kind": "done"})

    def fail(self, text: str) -> None:
        """Leaves the job with an error."""
        self._say_at_last({"kind": "failed", "text": text})

    def _say_at_last(self, message: Notice) -> None:
        self._talk.send(message)
        self._talk.await_sent(_FAREWELL_S)
        self.close()

    def close(self) -> None:
        """Closes the connection and hands on no further notices."""
        self._is_closed = True
        self._talk.shut()
        self._notices.put(None)
        if self._handing is not None and self._handing is not threading.current_thread():
            # A thread that returns from the core after the interpreter has ended would crash the process.
            self._handing.join(_HAND_ON_S)

    def _ask(self, request: Notice, patience_s: float, has_pushed: Callable[[], bool] = lambda: False) -> Notice:
        self._require_scheduler()
        answers: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        with self._numbering:
            number, self._next_id = self._next_id, self._next_id + 1
            self._answers[number] = answers
        end_s = time.monotonic() + patience_s + _GRACE_S if patience_s > 0 else float("inf")
        answer, has_told = None, False
        try:
            self._send({**request, "id": number})
            while True:
                with contextlib.suppress(queue.Empty):
                    answer = answers.get(timeout=_LOOK_S)  # Ctrl-C interrupts it
                    self._catch_up(answer["heard"])
                    if answer["kind"] == "error":
                        raise _error(answer)
                    return answer
                self._require_scheduler()
                if not has_told and has_pushed():
                    has_told = True
                    self._send({"kind": "pushed", "id": number})
                if time.monotonic() > end_s:
                    raise errors.StalledError(f"the scheduler has not answered for {patience_s + _GRACE_S:g} s")
        finally:
            del self._answers[number]
            if answer is None:  # Ctrl-C, or another exception of a signal handler
                self._talk.send({"kind": "interrupted", "id": number})

    def _catch_up(self, heard: int) -> None:
        """Waits for the notices that preceded an answer, such as the death that has ended a round."""
        if self._handing is not None and self._handing.is_alive():
            with self._catching_up:
                self._catching_up.wait_for(lambda: self._handed >= heard or self._is_closed, _HAND_ON_S)

    def _send(self, message: Notice) -> None:
        self._require_scheduler()
        self._talk.send(message)

    def _require_scheduler(self) -> None:
        if self._process != os.getpid():
            raise errors.NotInitializedError("this process was forked from one that has a place in a job; it has none")
        self._standing.require()

    def _listen(self) -> None:
        beat_s = time.monotonic() + self._heartbeat_s
        watch_s = min(_WATCH_S, _PART_OF_WATCH * self._silent_s)
        try:
            while not self._is_closed and (self._standing.end is None or self._standing.is_over):
                if time.monotonic() >= beat_s:
                    beat_s = time.monotonic() + self._heartbeat_s
                    self._talk.send({"kind": "beat"})
                if self._talk.has_come(min(watch_s, max(0.0, beat_s - time.monotonic()))):
                    was_cut_off = self._talk.broken_for_s() > 0
                    self._hear_some(time.monotonic() + watch_s)
                    if was_cut_off and not self._talk.broken_for_s():
                        beat_s = time.monotonic()  # the scheduler has heard nothing for a while
                elif not self._talk.has_come(0):  # a stopped process has missed the end of the wait
                    self._standing.look(time.monotonic())
        except GivenUpError:
            self._standing.give_up()
        except (OSError, StrangerError, ValueError) as error:
            self._standing.cut("its process has ended" if isinstance(error, GoneError) else error)
        if not self._is_closed and self._standing.end is not None:
            kind, text = self._standing.end
            self._put({"kind": "gone", "error": kind, "text": text})
        self._talk.close()

    def _hear_some(self, deadline: float) -> None:
        try:
            for message in self._talk.hear(deadline):
                self._hear(message)
        except TimeoutError:
            self._standing.look(time.monotonic())
            if self._talk.broken_for_s() > self._silent_s:
                self._standing.cut(f"there was no connection to it for {self._silent_s:g} s (kv_timeout_s)")

    def _hear(self, message: Notice) -> None:
        kind = message["kind"]
        self._standing.hear(message, time.monotonic())
        if kind in ("beat", "expelled"):
            return
        if kind == "said":
            self._said = message
        elif kind in ("answer", "error", "place"):
            answers = self._answers.get(message["id"])
            if answers is not None:
                answers.put({**message, "heard": self._heard, "said": self._said})
        elif kind in ("world", "failed"):
            self._world.put(message)
        elif kind == "over":
            assert self._standing.end is not None
            error, text = self._standing.end
            self._world.put({**message, "error": error, "text": text})
            self._put({**message, "error": error, "text": text})
        else:
            self._put(message)

    def _put(self, notice: Notice) -> None:
        self._heard += 1
        self._notices.put(notice)

    def _hand_on(self) -> None:
        assert self._on_notice is not None
        while (notice := self._notices.get()) is not None and not self._is_closed:
            self._on_notice(notice)
            with self._catching_up:
                self._handed += 1
                self._catching_up.notify_all()


def _world_of(message: Notice, number: int, is_recovery: bool) -> World:
    return World(
        number=number,
        workers=message["workers"],
        capacity=message["capacity"],
        servers=[[(str(host), int(port)) for host, port in of_one] for of_one in message["servers"]],
        names={int(number): str(name) for number, name in message["names"].items()},
        hosts={int(number): str(host) for number, host in message["hosts"].items()},
        living=message["living"],
        restored={int(number): float(age_s) for number, age_s in message["restored"].items()},
        token=message["token"],
        is_recovery=is_recovery,
        terms={int(number): int(term) for number, term in message["terms"].items()},
        gone={int(number): str(text) for number, text in message["gone"].items()},
    )


def _error(message: Notice) -> Exception:
    return _KINDS[message["error"]](message["text"])
