"""What all workers of a store have to have given alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringtrain.errors import MismatchError


def require_same(call: str, given: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises MismatchError, which names the first difference.

    Args:
        given: by rank, names and what each rank has for them.
    """
    first_rank = min(given)
    first = given[first_rank]
    for rank, other in given.items():
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise MismatchError(
                    f"{call}: rank {first_rank} has {name}={first.get(name)!r}, rank {rank} has "
                    f"{name}={other.get(name)!r}; give all workers the same"
                )
