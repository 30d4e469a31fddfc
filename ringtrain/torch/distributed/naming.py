"""Names for the operations of a group, which torch matches by their order alone.

The engine matches operations by name, and is fastest with names that it has seen with the same operation. A name that
says what its operation is would do, but two ranks that disagree would have two names, and wait for each other instead
of being told. So a name follows from the operations *before* it: what came after the same four operations last time has
the same name again. A training that repeats its step repeats its names, and ranks that have agreed so far have the same
name for what they disagree about.

The signature of an operation must be the same on all ranks of the group.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

# Operations of one name are carried out one after the other, so each place in the step has several names in turn.
TURNS = 8
_MOST_PLACES = 4096
_NOTHING = (0, 0, 0, 0)  # before the first operation


class Call:
    """An operation of a group that comes in each step: one of the names of its place."""

    __slots__ = ("kind", "name", "prepared")

    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = ""  # of the last operation of this name, "" before there was one
        self.prepared: Any = None  # what a group keeps to submit the operation again


class _Place:
    """A place in the step: after the same four operations."""

    __slots__ = ("before", "calls", "following", "number", "turn")

    def __init__(self, group: str, number: int, before: tuple[int, ...]) -> None:
        self.number = number
        self.before = before
        self.calls = [Call(f"{group} #{number}.{turn}") for turn in range(TURNS)]
        self.turn = 0
        self.following: dict[int, _Place] = {}  # by the operation that is carried out here


class Names:
    """The names of one group. All its ranks make the same calls.

    Args:
        process_set: its number.
    """

    def __init__(self, process_set: int) -> None:
        self.group = f"group {process_set}"
        self.calls = 0  # so far
        self._signatures: dict[Hashable, int] = {}
        self._places: dict[tuple[int, ...], _Place] = {}
        self._begin()

    def _begin(self) -> None:
        """All ranks forget what they know at the same call."""
        self._signatures.clear()
        self._places.clear()
        self._place = self._places[_NOTHING] = _Place(self.group, 0, _NOTHING)

    def upcoming(self) -> Call:
        """Returns the call that the next operation is."""
        place = self._place
        return place.calls[place.turn]

    def next(self, kind: str, signature: Hashable) -> Call:
        """Returns the call that the next operation is, and goes on to the one after it.

        Args:
            kind: what torch calls it, such as "all_reduce".
            signature: what tells it from other operations, the same on all ranks.
        """
        return self.advance(kind, self.number_of(signature))

    def number_of(self, signature: Hashable) -> int:
        """Returns the number of the signature, for advance()."""
        number = self._signatures.get(signature)
        if number is None:
            if len(self._signatures) >= _MOST_PLACES:
                self._begin()
            number = self._signatures[signature] = len(self._signatures) + 1
        return number

    def advance(self, kind: str, number: int) -> Call:
        """As next(), by the number of the signature."""
        place = self._place
        call = place.calls[place.turn]
        place.turn = (place.turn + 1) % TURNS
        following = place.following.get(number)
        if following is None:
            self._add_place(place, number)
        else:
            self._place = following
        self.calls += 1
        call.kind = kind
        return call

    def _add_place(self, place: _Place, number: int) -> None:
        if len(self._places) >= _MOST_PLACES:
            self._begin()
            return
        before = (*place.before[1:], number)
        following = self._places.get(before)
        if following is None:
            following = self._places[before] = _Place(self.group, len(self._places), before)
        self._place = place.following[number] = following
