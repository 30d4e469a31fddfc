"""The connection of a process of an elastic job to its rendezvous, which stays from its first init() to its end."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ringtrain import errors
from ringtrain.job.rendezvous.generations import Arrival
from ringtrain.job.rendezvous.member import Place, connect
from ringtrain.job.rendezvous.protocol import MOST_BYTES, StrangerError

_SEND_S = 5.0
_LOOK_S = 0.5
# Longer than the rendezvous waits for this host: it is the end of this process, and not of one among many.
_SILENT_S = 3.0
# How long the network may take to notice a loss by itself.
_NETWORK_S = 0.2


class Seat(NamedTuple):
    """The place of this process in a generation."""

    generation: int
    rank: int
    size: int
    slot: int  # among the processes of its host, some of which may be lost
    has_newcomers: bool  # some of its ranks were not in the generation before
    may_be_cut: bool  # it has hosts that have never worked together, or have just failed to
    may_have_lost_state: bool  # there were commits, and no rank has the state from training
    seconds_lost: float  # between all generations until now


class AgainError(Exception):
    """Another process of the generation has left it, so this one has to come for the next."""


class OverError(Exception):
    """The job has come to its end without this process."""


class Tether:
    """One in a process. The methods are for the thread that calls init(), unless they say otherwise.

    Args:
        member: the name of this process among all of the job.
        timeout_s: for the rendezvous to be there; 0 waits for ever.
        on_lost: called when another process of this one's generation is gone and this one has not come for the next
            within a moment. The network mostly knows it earlier, and why; not of a host that is silent.
        on_awaited: called when the others have waited so many seconds for this process to train.
    """

    def __init__(
        self,
        place: Place,
        secret: bytes,
        member: str,
        timeout_s: float,
        on_lost: Callable[[str], None],
        on_awaited: Callable[[float], None],
    ):
        self._incoming = connect(place, place.ports, secret, timeout_s)
        self._incoming.notice_silence(_SILENT_S)
        self._outgoing = self._incoming.twin()
        self.secret = secret
        self._on_lost = on_lost
        self._on_awaited = on_awaited
        self._reporting = threading.Lock()
        self._report: threading.Timer | None = None
        self.own_address = self._incoming.own_address()
        self._member = member
        self._sending = threading.Lock()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._has_news = False
        self._seconds_lost = 0.0
        self._has_told_of_commit = False
        os.register_at_fork(after_in_child=self._close)  # else nobody would notice that this process has died
        threading.Thread(target=self._listen, name="ringtrain tether", daemon=True).start()

    def come(self, arrival: Arrival) -> Seat:
        """Wait for the next generation.

        Raises:
            OverError: there is none any more.
            RingtrainError: the job has failed, or its rendezvous is gone.
        """
        self._send({"kind": "come", "member": self._member, "arrival": arrival})
        while True:
            answer = self._answer()
            if answer["kind"] == "world":  # what else there is belongs to the generation before
                return Seat(**{name: answer[name] for name in Seat._fields})

    def exchange(self, generation: int, value: Any) -> list[Any]:
        """What all ranks of the generation say, by rank. Raises AgainError, and as `come`."""
        self._send({"kind": "say", "generation": generation, "value": value})
        answer = self._answer()
        if answer["kind"] == "again":
            raise AgainError
        values: list[Any] = answer["values"]
        return values

    def has_news(self) -> bool:
        """Whether processes wait for the next generation, or the hosts have changed. Any thread."""
        return self._has_news

    def seconds_lost(self) -> float:
        """In which ranks had been lost and the next generation had not begun to train. Any thread."""
        return self._seconds_lost

    def joined(self, generation: int) -> None:
        """This process is in the generation: its init() returns."""
        self._send({"kind": "joined", "generation": generation})

    def ready(self, generation: int, commits: int) -> None:
        """This process waits for the others of the generation to train, with a state that has so many commits."""
        self._send({"kind": "ready", "generation": generation, "commits": commits, "is_asking": False})

    def verdict(self, generation: int, commits: int) -> int:
        """As `ready`, where the generation may have lost the state. Returns how many commits the newest one has.

        Raises AgainError, and RingtrainError where the training must not begin anew.
        """
        self._send({"kind": "ready", "generation": generation, "commits": commits, "is_asking": True})
        answer = self._answer()
        if answer["kind"] == "again":
            raise AgainError
        return int(answer["commits"])

    def committed(self) -> None:
        """This process has the state from training. Only the first call says so."""
        if not self._has_told_of_commit:
            self._has_told_of_commit = True
            self._send({"kind": "committed"})

    def fail(self, text: str) -> None:
        """The script of this process ends of an exception."""
        with contextlib.suppress(errors.RingtrainError):
            self._send({"kind": "failed", "text": text})

    def done(self) -> None:
        """The script of this process has ended well."""
        with contextlib.suppress(errors.RingtrainError):
            self._send({"kind": "done"})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            with self._sending:
                self._outgoing.send(message, time.monotonic() + _SEND_S)
        except OSError as error:
            raise errors.RingtrainError(_gone(error)) from None

    def _answer(self) -> dict[str, Any]:
        while True:
            try:
                answer = self._answers.get(timeout=_LOOK_S)  # Ctrl-C interrupts it
            except queue.Empty:
                continue
            if answer["kind"] == "over":
                raise OverError
            if answer["kind"] == "failed":
                self._answers.put(answer)  # for ever
                raise errors.RingtrainError(answer["text"])
            return answer

    def _listen(self) -> None:
        try:
            while True:
                message = self._incoming.receive(MOST_BYTES, float("inf"))
                kind = message["kind"]
                if kind == "ping":
                    self._send({"kind": "pong"})
                elif kind == "beat":  # whether it arrives is what the rendezvous wants to know, and TCP tells it
                    continue
                elif kind == "news":
                    self._has_news = True
                elif kind == "begun":
                    self._seconds_lost = message["seconds_lost"]
                elif kind == "awaited":
                    self._on_awaited(message["seconds"])
                elif kind == "lost":
                    self._report_soon(message["text"])
                else:
                    if kind == "world":
                        self._forget_lost()
                        self._seconds_lost = message["seconds_lost"]
                    self._has_news = self._has_news and kind != "world"
                    self._answers.put(message)
        except (OSError, StrangerError, errors.RingtrainError) as error:
            self._answers.put({"kind": "failed", "text": _gone(error)})

    def _report_soon(self, text: str) -> None:
        with self._reporting:
            if self._report is None:
                self._report = threading.Timer(_NETWORK_S, self._report_lost, [text])
                self._report.daemon = True
                self._report.start()

    def _report_lost(self, text: str) -> None:
        with self._reporting:
            if self._report is not None:
                self._on_lost(text)

    def _forget_lost(self) -> None:
        """It was of the generation before. From here on nothing is reported to the next one."""
        with self._reporting:
            if self._report is not None:
                self._report.cancel()
                self._report = None

    def _close(self) -> None:
        """In a forked child."""
        self._sending = threading.Lock()  # another thread may have held it
        self._incoming.close()
        self._outgoing.close()


def _gone(error: object) -> str:
    return f"the rendezvous of this job is gone, and with it its launcher: {error}"
