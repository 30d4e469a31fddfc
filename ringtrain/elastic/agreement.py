"""Finds the parts that differ between the ranks, by 64 bits of each, and sends only those."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ringtrain import objects, ops, pickling
from ringtrain.job import session
from ringtrain.training.replicas import digest_of


def newest_rank(commits: int) -> tuple[int, int]:
    """The first of the ranks with the most commits, and how many these are. All ranks call it together."""
    of_ranks = ops.allgather(np.array([commits], np.int64), name="elastic.commits")
    root = int(np.argmax(of_ranks))
    return root, int(of_ranks[root])


def differing(digests: Sequence[int], name: str) -> list[bool]:
    """Of each number whether the ranks have different ones. All ranks call it together, with as many numbers."""
    own = np.array(digests, np.int64)
    # the smallest is the complement of the largest complement
    largest = ops.allreduce(np.concatenate([own, ~own]), op=ops.Max, name=f"elastic.{name}")
    return [bool(one) for one in largest[: len(own)] != ~largest[len(own) :]]


def share_arrays(arrays: Mapping[str, Any], root_rank: int, name: str) -> bool:
    """Overwrite, in place, those arrays that differ between the ranks with those of `root_rank`.

    Returns whether there were any. The ranks must have the same names, dtypes and shapes.
    """
    if session.size() == 1:
        return False
    are_different = differing([digest_of(array) for array in arrays.values()], name)
    handles = [
        ops.broadcast_async_(array, root_rank, name=f"elastic.{name}.{path}")
        for (path, array), is_different in zip(arrays.items(), are_different, strict=True)
        if is_different
    ]
    for handle in handles:
        ops.synchronize(handle)
    return bool(handles)


def share_object(
    value: Any,
    root_rank: int,
    name: str,
    take: Callable[[Any], object],
    broadcast: Callable[..., Any] = objects.broadcast_object,
) -> None:
    """Give `take` the object of `root_rank` on all ranks if it differs between them.

    Objects that are equal may have different pickles; then they are sent for nothing.
    """
    if not is_same(pickling.dumps(value), name):
        take(broadcast(value, **({"root_rank": root_rank} if root_rank else {})))


def is_same(content: bytes, name: str) -> bool:
    """Whether all ranks have the same. They call it together."""
    if session.size() == 1:
        return True
    digest = int.from_bytes(hashlib.sha256(content).digest()[:8], "little", signed=True)
    return not differing([digest], name)[0]
