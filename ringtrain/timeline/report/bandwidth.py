"""How fast the allreduces went, as bus bandwidth of nccl-tests: bytes / time * 2(n-1)/n for n ranks.

The time of an allreduce runs from when the first rank began it until the last one had ended it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ringtrain.timeline.report.matching import Meeting
from ringtrain.timeline.report.trace import RankTrace

_SIZE_LIMITS = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_LARGE_BYTES = 64 << 10  # what is shorter says more about latency than about bandwidth


class _Allreduce(NamedTuple):
    """What was fused is one. Bus bytes: what the hardware has to move, between ranks, and between hosts."""

    bytes: int
    bus_bytes: float
    link_bytes: float
    ns: int

    def gb_per_s(self) -> float:
        return self.bus_bytes / self.ns


@dataclass(frozen=True)
class SizeClass:
    """The allreduces of up to so many bytes that do not belong to the class before; None: of any size."""

    up_to_bytes: int | None
    count: int
    busy_ns: int
    median_gb_per_s: float
    best_gb_per_s: float


@dataclass(frozen=True)
class Bandwidth:
    """Of all allreduces of the timeline; GB/s are 10^9 bytes a second.

    achieved: all bus bytes / all the time. best: of the best single one that is not small; `best_bytes` is its size.
    link_used: between hosts, achieved / the speed of the link; None where that is not known or nothing goes over it.
    """

    allreduces: int
    bytes: int
    achieved_gb_per_s: float
    best_gb_per_s: float
    best_bytes: int
    sizes: list[SizeClass]
    hosts: int
    link_gbit_per_s: float | None
    link_used: float | None


def bandwidth_of(
    meetings: Sequence[Meeting], ranks: Sequence[RankTrace], link_gbit_per_s: float | None
) -> Bandwidth | None:
    """None if nothing was reduced. The link is the one of each host, as measured by somebody else."""
    hosts = {rank.rank: rank.host for rank in ranks}
    allreduces = _allreduces_of(meetings, hosts)
    if not allreduces:
        return None
    busy_ns = sum(one.ns for one in allreduces)
    achieved = sum(one.bus_bytes for one in allreduces) / busy_ns
    over_link = [one for one in allreduces if one.link_bytes]
    link_used = None
    if link_gbit_per_s and over_link:
        gbit_per_s = 8 * sum(one.link_bytes for one in over_link) / sum(one.ns for one in over_link)
        link_used = gbit_per_s / link_gbit_per_s
    large = [one for one in allreduces if one.bytes >= _LARGE_BYTES] or allreduces
    best = max(large, key=_Allreduce.gb_per_s)
    return Bandwidth(
        allreduces=len(allreduces),
        bytes=sum(one.bytes for one in allreduces),
        achieved_gb_per_s=achieved,
        best_gb_per_s=best.gb_per_s(),
        best_bytes=best.bytes,
        sizes=_by_size(allreduces),
        hosts=len(set(hosts.values())),
        link_gbit_per_s=link_gbit_per_s,
        link_used=link_used,
    )


def _allreduces_of(meetings: Sequence[Meeting], hosts: dict[int, str]) -> list[_Allreduce]:
    fused: dict[tuple[int, int, int, int], list[Meeting]] = {}
    for meeting in meetings:
        first = meeting[0]
        if first.kind == "allreduce" and len(meeting) > 1:
            key = (first.rank, first.process_set, first.begun_ns, first.ended_ns)
            fused.setdefault(key, []).append(meeting)
    found = []
    for together in fused.values():
        size = sum(meeting[0].bytes for meeting in together)
        begin = min(operation.begun_ns for operation in together[0])
        end = max(operation.ended_ns for operation in together[0])
        ranks = len(together[0])
        nodes = len({hosts[operation.rank] for operation in together[0]})
        if size and end > begin:
            found.append(_Allreduce(size, size * _bus_factor(ranks), size * _bus_factor(nodes), end - begin))
    return found


def _bus_factor(count: int) -> float:
    return 2 * (count - 1) / count


def _by_size(allreduces: Sequence[_Allreduce]) -> list[SizeClass]:
    classes = []
    lower = -1
    for limit in (*_SIZE_LIMITS, None):
        of_class = [one for one in allreduces if lower < one.bytes and (limit is None or one.bytes <= limit)]
        if of_class:
            speeds = [one.gb_per_s() for one in of_class]
            busy_ns = sum(one.ns for one in of_class)
            classes.append(SizeClass(limit, len(of_class), busy_ns, median(speeds), max(speeds)))
        lower = limit or lower
    return classes
