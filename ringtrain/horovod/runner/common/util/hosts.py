"""`horovod.runner.common.util.hosts`: hosts, and which rank each of their slots gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringtrain.runner import hosts as own


@dataclass
class HostInfo:
    """A host and how many ranks it takes."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Reads "host:2". Raises UsageError."""
        (host,) = own.parse_hosts(host_string, "hosts")
        return HostInfo(host.name, host.slots)


@dataclass
class SlotInfo:
    """The place of one rank."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int | None = None
    local_size: int | None = None
    cross_size: int | None = None

    def to_response_string(self) -> str:
        """All numbers in one line, as the rendezvous of Horovod answers."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(str(number) for number in numbers)

    @staticmethod
    def from_response_string(response_string: str) -> SlotInfo:
        """Reads what `to_response_string` returns, which does not name the host."""
        rank, size, local_rank, local_size, cross_rank, cross_size = map(int, response_string.split(","))
        return SlotInfo("", rank, local_rank, cross_rank, size, local_size, cross_size)


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Reads "h1:2,h2:2". Raises UsageError."""
    return [HostInfo(host.name, host.slots) for host in own.parse_hosts(hosts_string, "hosts")]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """The names of "h1:2,h2:2", and the slots of each name. Raises UsageError."""
    found = parse_hosts(hosts)
    return [host.hostname for host in found], {host.hostname: host.slots for host in found}


def parse_host_files(filename: str) -> str:
    """The hosts of a hostfile as "h1:2,h2:2". Raises UsageError."""
    return ",".join(map(str, own.read_hostfile(filename)))


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """The places of the ranks, which fill the slots of the hosts, one host after another.

    Raises ValueError where the hosts have fewer slots than `min_num_proc`.
    """
    places: list[tuple[str, int]] = []
    for host in hosts:
        places += [(host.hostname, local_rank) for local_rank in range(host.slots)]
    if len(places) < min_num_proc:
        raise ValueError(f"{min_num_proc} ranks were asked for, but the hosts have {len(places)} slots: add hosts")
    places = places[: max_num_proc or len(places)]
    return [_slot(places, rank) for rank in range(len(places))]


def _slot(places: Sequence[tuple[str, int]], rank: int) -> SlotInfo:
    host, local_rank = places[rank]
    with_local_rank = [number for number, (_, other) in enumerate(places) if other == local_rank]
    return SlotInfo(
        hostname=host,
        rank=rank,
        local_rank=local_rank,
        cross_rank=with_local_rank.index(rank),
        size=len(places),
        local_size=sum(name == host for name, _ in places),
        cross_size=len(with_local_rank),
    )
