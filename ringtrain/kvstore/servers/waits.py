"""Workers that wait for each other: what each of them waits for, and which can never go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ringtrain.errors import list_of_ranks


class Wait(NamedTuple):
    """A worker that waits for others, and calls nothing else meanwhile."""

    member: int
    id: int  # of its request
    what: str  # in words, after the number of the worker: "in barrier"
    awaited: frozenset[int]  # it goes on when each of these has come
    warn_s: float = float("inf")  # when to warn of it


def never_ending(waits: Mapping[int, Wait]) -> dict[int, Wait]:
    """Returns the workers that wait for each other, and those that wait for one of them."""
    stuck = dict(waits)
    while free := [number for number, wait in stuck.items() if wait.awaited.isdisjoint(stuck)]:
        for number in free:
            del stuck[number]
    return stuck


def words_of(waits: Mapping[int, Wait]) -> str:
    """Returns which workers wait for what: "workers 0, 2 in barrier, worker 1 in load"."""
    by_what: dict[str, list[int]] = {}
    for number in sorted(waits):
        by_what.setdefault(waits[number].what, []).append(number)
    return ", ".join(f"{list_of_ranks(numbers).replace('rank', 'worker')} {what}" for what, numbers in by_what.items())
