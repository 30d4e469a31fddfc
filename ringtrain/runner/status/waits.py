"""Which operations wait for which ranks, from what all ranks have said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringtrain.errors import list_of_ranks
from ringtrain.runner.status.asking import Snapshot


@dataclass(frozen=True)
class Waiting:
    """An operation that some ranks have submitted and that has not ended.

    ranks: those that have submitted it. missing: those that have not, of its process set; none where all have, and it
    is under way. since_s: how long the first of them has waited.
    """

    key: tuple[int, str]
    title: str
    at: str
    ranks: list[int]
    missing: list[int]
    since_s: float
    operation: dict[str, Any]

    @property
    def process_set(self) -> int:
        return self.key[0]

    def text(self) -> str:
        """Such as: allreduce "loss" (train.py:31)."""
        return in_words(self.operation)


def in_words(operation: dict[str, Any]) -> str:
    """Such as: allreduce "loss" (train.py:31). Operations without a name have one of ringtrain's."""
    at = f" ({operation['at']})" if operation["at"] else ""
    title = operation["kind"] if operation["name"].startswith("<unnamed") else operation["title"]
    return f"{title}{at}"


def waiting_in(snapshot: Snapshot, size: int) -> list[Waiting]:
    """Returns all such operations, the oldest first."""
    members = _members(snapshot, size)
    found: dict[tuple[int, str], dict[int, dict[str, Any]]] = {}
    for rank, answer in snapshot.answers.items():
        for operation in answer.get("pending", []):
            found.setdefault((operation["process_set"], operation["name"]), {})[rank] = operation
    # Ranks that have joined wait for the end of the others, and contribute zeros until then.
    joined = {rank for by_rank in found.values() for rank, one in by_rank.items() if one["kind"] == "join"}
    waits = [_waiting(key, by_rank, members, joined) for key, by_rank in found.items()]
    return sorted(waits, key=lambda waiting: -waiting.since_s)


def _members(snapshot: Snapshot, size: int) -> dict[int, list[int]]:
    members = {0: list(range(size))}
    for answer in snapshot.answers.values():
        members.update({int(number): ranks for number, ranks in answer.get("process_sets", {}).items()})
    return members


def _waiting(
    key: tuple[int, str], by_rank: dict[int, dict[str, Any]], members: dict[int, list[int]], joined: set[int]
) -> Waiting:
    first = max(by_rank, key=lambda rank: by_rank[rank]["submitted_s_ago"])
    operation = by_rank[first]
    of_operation = members.get(key[0], list(by_rank))
    if "between" in operation:
        of_operation = [rank for rank in operation["between"] if rank >= 0]
    is_under_way = any("agreed_s_ago" in one for one in by_rank.values())
    present = {*by_rank, *joined}
    missing = [] if is_under_way else [rank for rank in of_operation if rank not in present]
    return Waiting(
        key,
        operation["title"],
        operation["at"],
        sorted(by_rank),
        sorted(missing),
        operation["submitted_s_ago"],
        operation,
    )


def some_ranks(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0-2", or of many scattered ones "12 ranks"."""
    text = list_of_ranks(ranks)
    return text if len(text) <= 40 else f"{len(ranks)} ranks"
