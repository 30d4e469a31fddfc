"""What the processes of a job are called in what is printed: ranks, or what the job has in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ringtrain.failure.ranks_in_words import list_of_ranks


class Names(Protocol):
    """Of processes, which have numbers from 0."""

    def label(self, number: int) -> str:
        """What stands before each of its lines."""

    def listed(self, numbers: Iterable[int]) -> str:
        """One or more, within a sentence."""


class Ranks:
    """`1`, and `ranks 0, 2-5`."""

    def label(self, number: int) -> str:
        return str(number)

    def listed(self, numbers: Iterable[int]) -> str:
        return list_of_ranks(numbers)


RANKS = Ranks()
