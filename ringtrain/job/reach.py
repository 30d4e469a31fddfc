"""Whether the hosts of a job reach each other: where two do not, neither is gone, and yet they cannot work together."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ringtrain.errors import PeerLostError
from ringtrain.job.world import Address, Exchange, World

_CONNECT_S = 1.0
_AT_ONCE = 32


class UnreachableError(PeerLostError):
    """The others reach each other without the hosts of `ranks`, which have to go."""

    def __init__(self, text: str, ranks: list[int]):
        super().__init__(text)
        self.ranks = ranks


def require_reach(exchange: Exchange, world: World, addresses: Sequence[Sequence[Address]]) -> None:
    """Let each rank knock at a rank of each other host. All ranks call it together.

    Args:
        addresses: where each rank listens, by rank. Whoever answers there may close the connection.

    Raises:
        UnreachableError: not all hosts reach each other, on all ranks alike.
    """
    if len(set(world.nodes)) == 1:
        return
    first_ranks = {node: world.nodes.index(node) for node in set(world.nodes) - {world.nodes[world.rank]}}
    silent = _silent({node: addresses[rank] for node, rank in first_ranks.items()})
    cuts = {frozenset((world.nodes[rank], node)) for rank, of_rank in enumerate(exchange(silent)) for node in of_rank}
    if not cuts:
        return
    left_out = hosts_to_leave_out(world.nodes, cuts)
    one, other = (world.names[world.nodes.index(node)][0] for node in sorted(min(cuts, key=sorted)))
    ranks = [rank for rank, node in enumerate(world.nodes) if node in left_out]
    raise UnreachableError(f"{one} and {other} do not reach each other; look at the network between them", ranks)


def hosts_to_leave_out(nodes: Sequence[int], cuts: set[frozenset[int]]) -> set[int]:
    """Without these hosts no pair is cut: one after the other the one with the most cuts, the fewest ranks, the last.

    Args:
        nodes: the number of the host of each rank.
        cuts: pairs of hosts that do not reach each other.
    """
    left_out: set[int] = set()
    while remaining := [pair for pair in cuts if not pair & left_out]:
        hosts = {host for pair in remaining for host in pair}
        left_out.add(max(hosts, key=lambda host: (sum(host in pair for pair in remaining), -nodes.count(host), host)))
    return left_out


def _silent(addresses: Mapping[int, Sequence[Address]]) -> list[int]:
    if not addresses:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(addresses))) as threads:
        answers = threads.map(lambda of_one: all(map(_answers, of_one)), addresses.values())
        return [node for node, is_there in zip(addresses, answers, strict=True) if not is_there]


def _answers(address: Address) -> bool:
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except OSError:
        return False
    return True
