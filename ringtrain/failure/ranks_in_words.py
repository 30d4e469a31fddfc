"""Lists of ranks as messages have them."""

from __future__ import annotations

from collections.abc import Iterable


def list_of_ranks(ranks: Iterable[int]) -> str:
    """`ranks 0, 2-5`, or `rank 1`."""
    given = list(ranks)
    return f"rank{'s' if len(given) > 1 else ''} {ranges_of(given)}"


def ranges_of(ranks: Iterable[int]) -> str:
    """`0, 2-5`."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    return ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in ranges)
