"""How long a step takes among many ranks, as arithmetic: the link, the algorithms, the rounds between them, overlap.

What it leaves out: ranks that are slower than others, and a network that has less to give than all its links together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# As collectives/network/ has them, and tree_channel.h.
_HALVE_FROM_BYTES = 64 << 10
_LONGEST_CHUNK, _SHORTEST_CHUNK, _FEW_CHUNKS = 60 << 10, 8 << 10, 4
_CHILDREN = 4
_PLAN_BYTES = 128 << 20


@dataclass(frozen=True)
class Cluster:
    """latency_s: of a message, with what both ends do for it. bytes_per_s: of a host's link, each way.
    node_bytes_per_s: of what the ranks of a host do among themselves, and of adding."""

    ranks: int
    ranks_per_host: int
    latency_s: float
    bytes_per_s: float
    node_bytes_per_s: float

    @property
    def hosts(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_host)


@dataclass(frozen=True)
class Gradient:
    """One gradient of a step: when it is ready, in seconds from the beginning of the step, and its bytes."""

    ready_s: float
    bytes: int


def levels_of_tree(hosts: int) -> int:
    """How many messages one after the other go from the last host to the first."""
    levels, last = 0, hosts - 1
    while last > 0:
        levels, last = levels + 1, (last - 1) // _CHILDREN
    return levels


def messages_of_round(hosts: int) -> int:
    """Sent and received by the rank that has most of them, when all operations are known."""

    def of(rank: int) -> int:
        first = _CHILDREN * rank + 1
        children = max(0, min(hosts, first + _CHILDREN) - first)
        return 2 * (children + (rank > 0))

    return max(of(0), of(1)) if hosts > 1 else 0


def round_s(cluster: Cluster) -> float:
    """The ranks agree on what to do next: up the tree and down again."""
    return 2 * levels_of_tree(cluster.hosts) * cluster.latency_s


def ring_s(cluster: Cluster, size: int) -> float:
    """All ranks in one ring, in their order, so that it crosses each link once each way."""
    return _ring(cluster.ranks, size, cluster)


def _ring(places: int, size: float, cluster: Cluster) -> float:
    """The links are busy all the time, unless each chunk is still on its way when its turn comes again."""
    if places == 1:
        return 0.0
    steps, slice_bytes = 2 * (places - 1), size / places
    chunk = min(slice_bytes, _LONGEST_CHUNK, max(slice_bytes / _FEW_CHUNKS, _SHORTEST_CHUNK))
    of_messages = steps * (cluster.latency_s + chunk / cluster.bytes_per_s)
    return max(steps * slice_bytes / cluster.bytes_per_s, of_messages)


def hierarchical_s(cluster: Cluster, size: int) -> float:
    """Each host sums first; the stages are at work at the same time, so that the slowest one counts. What is short is
    doubled between the hosts."""
    if size < _HALVE_FROM_BYTES:
        return _doubling(cluster.hosts, size, cluster)
    return max(_on_node(cluster, size), _ring(cluster.hosts, size, cluster))


def _on_node(cluster: Cluster, size: int) -> float:
    local = cluster.ranks_per_host
    return 2 * (local - 1) / local * size / cluster.node_bytes_per_s


def halving_s(cluster: Cluster, size: int) -> float:
    """All ranks exchange halves of halves with ever nearer ones. While those are on other hosts, all ranks of a host
    use its link at the same time."""
    if size < _HALVE_FROM_BYTES:
        return _doubling(cluster.ranks, size, cluster)
    local = cluster.ranks_per_host
    crossing = _halving(cluster.hosts, size, cluster.bytes_per_s / local, cluster)
    within = _halving(local, size / cluster.hosts, cluster.node_bytes_per_s, cluster)
    return crossing + within


def hierarchical_halving_s(cluster: Cluster, size: int) -> float:
    """Each host sums first, and its lanes exchange halves: one stage after the other."""
    return _on_node(cluster, size) + _halving(cluster.hosts, size, cluster.bytes_per_s, cluster)


def _doubling(places: int, size: int, cluster: Cluster) -> float:
    return math.ceil(math.log2(places)) * (cluster.latency_s + size / cluster.bytes_per_s)


def _halving(places: int, size: float, bytes_per_s: float, cluster: Cluster) -> float:
    if places == 1:
        return 0.0
    share = (places - 1) / places * size
    steps = 2 * math.ceil(math.log2(places))
    seconds = steps * cluster.latency_s + 2 * share / bytes_per_s + share / cluster.node_bytes_per_s
    if places & (places - 1):  # those above the power of two give all they have, and get it back
        seconds += 2 * (cluster.latency_s + size / bytes_per_s)
    return seconds


Algorithm = Callable[[Cluster, int], float]
ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring_s,
    "hierarchical": hierarchical_s,
    "halving": halving_s,
    "hierarchical, halving": hierarchical_halving_s,
}


def allreduce_s(cluster: Cluster, algorithm: str, size: int) -> float:
    """One allreduce, with the round that agrees on it. One host needs no link, whatever the algorithm."""
    if cluster.hosts == 1:
        return _on_node(cluster, size)
    return round_s(cluster) + ALGORITHMS[algorithm](cluster, size)


def step_s(cluster: Cluster, algorithm: str, compute_s: float, gradients: Sequence[Gradient]) -> float:
    """A step that computes for so long, while its gradients are reduced: what is ready when the ranks come to a round
    is one plan, unless it is too long for one."""
    waiting = sorted(gradients, key=lambda gradient: gradient.ready_s)
    now, first = 0.0, 0
    while first < len(waiting):
        now, size, end = max(now, waiting[first].ready_s), 0, first
        while end < len(waiting) and waiting[end].ready_s <= now:
            if end > first and size + waiting[end].bytes > _PLAN_BYTES:
                break
            size, end = size + waiting[end].bytes, end + 1
        now, first = now + allreduce_s(cluster, algorithm, size), end
    return max(now, compute_s)


def spread_over_backward(compute_s: float, sizes: Sequence[int], work: Sequence[float]) -> list[Gradient]:
    """The gradients of a step whose last two thirds are the backward pass, from the last parameter to the first. Each
    takes its share of the work."""
    total, done, gradients = sum(work), 0.0, []
    for size, own in reversed(list(zip(sizes, work, strict=True))):
        done += own
        gradients.append(Gradient(compute_s * (1 + 2 * done / total) / 3, size))
    return gradients
