"""Islands: ranks with fast links between each other, such as those of a host, in a job with slow links elsewhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringtrain import ops
from ringtrain.engine.process_sets import ProcessSet, open_for_members
from ringtrain.job import elastic_client, session
from ringtrain.job.world import tournament

Given = str | Sequence[Sequence[int]] | Callable[[], Sequence[Sequence[int]]]

# A link belongs to an island if it takes at most so many times as long as the fastest link between two hosts.
_SIMILAR = 8.0
_PROBE_BYTES = 128 << 10
_PROBES = 5


class Islands:
    """The islands of one generation of the job, and the process set in which the ranks of this one communicate.

    Each rank is in one island. `form` opens the same ProcessSet again in the next generation of an elastic job.

    Args:
        given: "host", the ranks of each host; "rank", each rank alone; "links", hosts between which links measure about
            as fast as the fastest one; lists of ranks; or a function without arguments that returns such lists and is
            called in each generation.

    Raises:
        TypeError: something else.
        ValueError: an unknown word, or lists in an elastic job, whose ranks change.
    """

    def __init__(self, given: Given) -> None:
        is_word = isinstance(given, str)
        if is_word and given not in ("host", "rank", "links"):
            raise ValueError(f'islands must be "host", "rank", "links", lists of ranks or a function, not {given!r}')
        if not is_word and not callable(given):
            if not isinstance(given, Sequence):
                raise TypeError(f'islands must be "host", "rank", "links", lists of ranks or a function, not {given!r}')
            if elastic_client.is_elastic():
                raise ValueError(
                    "islands: lists of ranks do not fit an elastic job, whose ranks change; give a function that "
                    'returns them for hvd.size() ranks, or "host"'
                )
        self._given = given
        self.lists: list[list[int]] = []
        self.own: list[int] = []  # the ranks of the island of this one
        self.of_rank = ProcessSet([])  # open while the ranks of this island average; until the end of the generation

    def choose(self) -> None:
        """Set `lists` and `own`; "links" measures, so all ranks call this together.

        Raises:
            ValueError: the lists do not have each rank of the job once.
        """
        if self._given == "host":
            self.lists = session.ranks_of_nodes()
        elif self._given == "rank":
            self.lists = [[rank] for rank in range(session.size())]
        elif self._given == "links":
            self.lists = _of_similar_links(session.ranks_of_nodes())
        else:
            lists: Any = self._given() if callable(self._given) else self._given
            self.lists = _checked(lists)
        self.own = next(ranks for ranks in self.lists if session.rank() in ranks)

    def form(self) -> None:
        """Open the process set of this island, if its ranks average; all ranks call this, with the same lists."""
        if self.averages:
            open_for_members(self.of_rank, self.own)

    @property
    def averages(self) -> bool:
        """Whether the ranks of this island have gradients to average, in this generation or in a later one."""
        return len(self.own) > 1 or (elastic_client.is_elastic() and self._given != "rank")

    def is_first(self) -> bool:
        """Whether this rank is the first one of its island."""
        return session.rank() == self.own[0]


def _checked(lists: Any) -> list[list[int]]:
    size = session.size()
    try:
        islands = [sorted(int(rank) for rank in ranks) for ranks in lists]
    except (TypeError, ValueError):
        raise TypeError(f"islands must be lists of ranks, not {lists!r}") from None
    if sorted(itertools.chain.from_iterable(islands)) != list(range(size)) or not all(islands):
        raise ValueError(f"islands must have each of the ranks 0..{size - 1} once, but are {lists!r}")
    return sorted(islands)


# --- islands by measured links ----------------------------------------------------------------------------------------


def _of_similar_links(hosts: list[list[int]]) -> list[list[int]]:
    """Join hosts whose links are about as fast as the fastest one between two hosts."""
    seconds = _seconds_between([ranks[0] for ranks in hosts])
    pairs = list(itertools.combinations(range(len(hosts)), 2))
    if len(pairs) < 2:
        return hosts  # no other link to compare with
    fastest = min(seconds[pair] for pair in pairs)
    island = list(range(len(hosts)))
    for one, other in pairs:
        if seconds[one, other] <= _SIMILAR * fastest:
            joined, left = sorted((island[one], island[other]))
            island = [joined if number == left else number for number in island]
    return sorted(
        sorted(rank for host, ranks in enumerate(hosts) if island[host] == number for rank in ranks)
        for number in set(island)
    )


def _seconds_between(firsts: list[int]) -> Any:
    """The seconds that a message of 128 KiB and its answer take between each two of these ranks, on all ranks."""
    own = firsts.index(session.rank()) if session.rank() in firsts else None
    seconds = np.zeros((len(firsts), len(firsts)))
    for pairs in tournament(len(firsts)):
        ops.barrier()
        for one, other in pairs:
            if own in (one, other):
                seconds[one, other] = _probe(firsts[other if own == one else one], begins=own == one)
    # Only the first of a pair has measured; the others have zeros.
    return ops.allreduce(np.triu(seconds), op=ops.Max, name="islands.seconds")


def _probe(peer: int, begins: bool) -> float:
    message, best = np.zeros(_PROBE_BYTES, np.uint8), np.inf
    for _ in range(_PROBES):
        begin = time.perf_counter()
        if begins:
            ops.send(message, peer)
            ops.recv(message, peer)
        else:
            ops.recv(message, peer)
            ops.send(message, peer)
        best = min(best, time.perf_counter() - begin)
    return best if begins else 0.0
