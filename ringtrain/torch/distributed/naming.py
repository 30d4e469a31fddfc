"""Names for the operations of a group, which torch matches by their order alone.

The engine matches operations by name, and is fastest with names that it has seen with the same operation. A name that
says what its operation is would do, but two ranks that disagree would have two names, and wait for each other instead
of being told. So a name follows from the operations *before* it: what came after the same four operations last time has
the same name again. A training that repeats its step repeats its names, and ranks that have agreed so far have the same
name for what they disagree about.

The signature of an operation must be the same on all ranks of the group.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Hashable

# Operations of one name are carried out one after the other, so each place in the step has several names in turn.
_TURNS = 8
_MOST_PLACES = 4096
_PATTERN = re.compile(r"(group \d+\.\d+) #(\d+)\.(\d+)")


class _Place:
    """A place in the step: after the same four operations."""

    __slots__ = ("labels", "names", "number", "turn")

    def __init__(self, group: str, number: int) -> None:
        self.number = number
        self.names = [f"{group} #{number}.{turn}" for turn in range(_TURNS)]
        self.labels = [("", 0)] * _TURNS
        self.turn = 0


class Names:
    """The names of one group. All its ranks make the same calls.

    Args:
        process_set: its number.
        number: of the group among those that the process set has had.
    """

    def __init__(self, process_set: int, number: int) -> None:
        self.group = f"group {process_set}.{number}"
        self._places: dict[tuple[Hashable, ...], _Place] = {}
        self._before: tuple[Hashable, ...] = (None, None, None, None)
        self.calls = 0
        _all.add(self)

    def next(self, kind: str, signature: Hashable) -> str:
        """The name of the next operation.

        Args:
            kind: what torch calls it, such as "all_reduce".
            signature: what tells it from other operations, the same on all ranks.
        """
        place = self._places.get(self._before)
        if place is None:
            if len(self._places) == _MOST_PLACES:
                self._places.clear()
            place = self._places[self._before] = _Place(self.group, len(self._places))
        turn = place.turn
        place.turn = (turn + 1) % _TURNS
        self._before = (*self._before[1:], signature)
        self.calls += 1
        place.labels[turn] = (kind, self.calls)
        return place.names[turn]

    def _label(self, number: int, turn: int) -> str:
        """Returns the last operation of a name as `all_reduce #17`, the kind and which call of the group. Or ""."""
        for place in self._places.values():
            if place.number == number:
                kind, call = place.labels[turn]
                return f"{kind} #{call}" if kind else ""
        return ""


_all: weakref.WeakSet[Names] = weakref.WeakSet()


def in_words(text: str) -> str:
    """The text of an error, with the names of this process' groups as torch's users know the operations."""

    def label(match: re.Match[str]) -> str:
        for names in list(_all):
            if names.group == match[1]:
                return names._label(int(match[2]), int(match[3])) or match[0]
        return match[0]

    return _PATTERN.sub(label, text)
