"""Rounds of the workers. Uses no sockets, threads or clock: time is an argument."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringtrain.errors import list_of_ranks
from ringtrain.job.rendezvous.columns import in_columns
from ringtrain.kvstore.servers.waits import Wait

Message = dict[str, Any]
# The label of the round before the end of a worker, from which all others may be missing.
END = "end"


class Failure(NamedTuple):
    """A worker that has ended or died."""

    is_done: bool  # it has ended well
    name: str
    text: str


@dataclass
class _Said:
    value: Any
    member: int
    id: int
    began_s: float = 0.0
    end_s: float = 0.0
    warn_s: float = 0.0


@dataclass
class _Round:
    said: dict[int, _Said] = field(default_factory=dict)
    came: set[int] = field(default_factory=set)  # includes workers that have given up

    def missing(self, workers: Iterable[int]) -> str:
        """Returns which of these have not come, in words. If all have, some have given up."""
        late = [number for number in workers if number not in self.came]
        those = list_of_ranks(late or [number for number in workers if number not in self.said])
        how = "did not come" if late else "gave up and did not come again"
        return f"{those.replace('rank', 'worker')} {how}"


class Rounds:
    """Rounds of workers: each says something, and all hear what all have said. A label has one open round at a time.

    States of a worker in the rounds of a label, what ends each, and by when:

        ahead    waiting: the worker says something, which opens a round if none is open.
        waiting  held: all workers that live have said something, or one that has not is announced as lost or has ended,
                 or this one gives up: patience_s is over, Ctrl-C, or workers wait for each other.
                 ahead: the process has died, and it is announced. A round that only dead workers have waited in leaves
                 no trace.
        held     waiting: as from ahead, in the next round.

    A process that has replaced a lost one knows nothing of the rounds of its predecessor, so its first message for a
    label only joins: it waits in an open round, and otherwise as long as another worker is ahead, which will come. If
    all others have held a round, this one was missed, and the process holds it alone, at once. Others that have
    replaced a lost worker are in the same position, so none waits for them.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Round] = {}  # also rounds that all have given up: the next worker hears of these
        self._held: dict[str, set[int]] = {}  # by label: the workers that have held a round, well or not

    def say(
        self, message: Message, number: int, member: int, now_s: float, originals: Collection[int]
    ) -> list[tuple[int, Message]]:
        """Adds to the round of a label. `originals`: the living workers that have not replaced a lost one."""
        label = str(message["label"])
        of_label = self._open.get(label, _Round())
        is_alone = message["joins_only"] and not of_label.said
        if is_alone and label in self._held and self._held[label].issuperset(originals):
            return _answers({number: _Said(message["value"], member, message["id"])})
        patience_s = float(message["patience_s"]) or float("inf")
        warn_s = now_s + (float(message["warning_s"]) or float("inf"))
        said = _Said(message["value"], member, message["id"], now_s, now_s + patience_s, warn_s)
        of_label.said[number] = said
        of_label.came.add(number)
        self._open[label] = of_label
        return []

    def close(
        self, workers: Mapping[int, Any], gone: Mapping[int, Failure], is_elastic: bool
    ) -> list[tuple[int, Message]]:
        """Ends rounds that are complete, with answers, and rounds that a worker will never join, with failures."""
        answers = []
        ending = self._open[END].said if END in self._open else {}
        for label, of_label in list(self._open.items()):
            said = of_label.said
            if not gone and (label == END or not ending) and len(said) < len(workers):
                continue  # the usual case takes constant time
            of_label.came.difference_update(gone)
            for number in [number for number in said if number in gone]:
                del said[number]  # it has died since
            missed: dict[int, Failure] = {}
            awaited = set(workers)
            if label != END:
                awaited -= ending.keys()
                missed = {**gone, **{number: Failure(True, f"worker {number}", "") for number in ending}}
            if missed and not is_elastic:
                answers += [
                    (one.member, _failure_of_round(one.id, "PeerLostError", _why(label, missed)))
                    for one in said.values()
                ]
            elif awaited <= said.keys():
                answers += _answers(said)
            else:
                continue
            del self._open[label]
            self._note_held(label, said)
        return answers

    def waits(self, workers: Collection[int]) -> list[Wait]:
        """Returns the waits in open rounds, except before the end."""
        waits = []
        for label, of_label in self._open.items():
            awaited = frozenset(workers) - of_label.said.keys()
            if label != END:
                waits += [
                    Wait(one.member, one.id, f"in {label}", awaited, one.warn_s) for one in of_label.said.values()
                ]
        return waits

    def forget(self, requests: Collection[tuple[int, int]]) -> None:
        """Workers give up these requests, by member and id."""
        for label, of_label in self._open.items():
            for number, one in list(of_label.said.items()):
                if (one.member, one.id) in requests:
                    del of_label.said[number]
                    self._note_held(label, (number,))

    def overdue(self, now_s: float, workers: Collection[int]) -> list[tuple[int, Message]]:
        failures = []
        for label, of_label in self._open.items():
            for one in of_label.said.values():
                if one.end_s < now_s:
                    text = f"{label}: {of_label.missing(workers)} in {now_s - one.began_s:.1f} s"
                    failures.append((one.member, _failure_of_round(one.id, "StalledError", text)))
        self.forget({(member, failure["id"]) for member, failure in failures})
        return failures

    def _note_held(self, label: str, workers: Collection[int]) -> None:
        if workers:
            self._held.setdefault(label, set()).update(workers)


def _answers(said: Mapping[int, _Said]) -> list[tuple[int, Message]]:
    """First to all what all have said, one object that is packed once, then to each the answer to its request."""
    numbers = sorted(said)
    of_all = {"kind": "said", "numbers": numbers, "values": in_columns([said[number].value for number in numbers])}
    answers: list[tuple[int, Message]] = [(one.member, of_all) for one in said.values()]
    return answers + [(one.member, {"kind": "answer", "id": one.id, "value": None}) for one in said.values()]


def _why(label: str, missed: Mapping[int, Failure]) -> str:
    one = missed[min(missed)]
    how = "has ended, so it does not come" if one.is_done else f"has died: {one.text}"
    return f"{label}: {one.name} {how}"


def _failure_of_round(number: int, error: str, text: str) -> Message:
    return {"kind": "error", "id": number, "error": error, "text": text}
