"""Rounds of workers: each says something, and all hear what all have said. Of a label one round is open at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringtrain.failure.ranks_in_words import list_of_ranks

Message = dict[str, Any]
# Told of the round before the end of a worker, in which all may be missing.
END = "end"


class Failure(NamedTuple):
    """A worker that says nothing any more."""

    is_done: bool  # it has ended well
    name: str
    text: str


@dataclass
class _Said:
    value: Any
    member: int
    id: int
    began_s: float
    end_s: float


@dataclass
class _Round:
    said: dict[int, _Said] = field(default_factory=dict)


class Rounds:
    """By label."""

    def __init__(self) -> None:
        self._open: dict[str, _Round] = {}

    def say(self, message: Message, number: int, member: int, now_s: float) -> list[tuple[int, Message]]:
        """The answer to who only joins a round that others wait in, if nobody does."""
        label = str(message["label"])
        if message["joins_only"] and label not in self._open:
            return [(member, {"kind": "answer", "id": message["id"], "value": {str(number): message["value"]}})]
        patience_s = float(message["patience_s"]) or float("inf")
        said = _Said(message["value"], member, message["id"], now_s, now_s + patience_s)
        self._open.setdefault(label, _Round()).said[number] = said
        return []

    def close(
        self, workers: Mapping[int, Any], gone: Mapping[int, Failure], is_elastic: bool
    ) -> list[tuple[int, Message]]:
        """The answers of rounds in which all workers have spoken, and the failures of those in which one never will."""
        answers = []
        ending = self._open[END].said if END in self._open else {}
        for label, of_label in list(self._open.items()):
            said = of_label.said
            for number in [number for number in said if number in gone]:
                del said[number]  # of one that has died since
            missed: dict[int, Failure] = {}
            awaited = set(workers)
            if label != END:
                awaited -= ending.keys()
                missed = {**gone, **{number: Failure(True, f"worker {number}", "") for number in ending}}
            if missed and not is_elastic:
                answers += [
                    (one.member, _failure(one.id, "PeerLostError", _why(label, missed))) for one in said.values()
                ]
            elif awaited <= said.keys():
                values = {str(number): said[number].value for number in sorted(said)}
                answers += [(one.member, {"kind": "answer", "id": one.id, "value": values}) for one in said.values()]
            else:
                continue
            del self._open[label]
        return answers

    def overdue(self, now_s: float, workers: Mapping[int, Any]) -> list[tuple[int, Message]]:
        failures = []
        for label, of_label in self._open.items():
            for number, one in list(of_label.said.items()):
                if one.end_s < now_s:
                    missing = list_of_ranks([other for other in workers if other not in of_label.said])
                    text = f"{label}: {missing.replace('rank', 'worker')} did not come in {now_s - one.began_s:.1f} s"
                    failures.append((one.member, _failure(one.id, "StalledError", text)))
                    del of_label.said[number]
        self._open = {label: one for label, one in self._open.items() if one.said}
        return failures


def _why(label: str, missed: Mapping[int, Failure]) -> str:
    one = missed[min(missed)]
    how = "has ended, so it does not come" if one.is_done else f"has died: {one.text}"
    return f"{label}: {one.name} {how}"


def _failure(number: int, error: str, text: str) -> Message:
    return {"kind": "error", "id": number, "error": error, "text": text}
