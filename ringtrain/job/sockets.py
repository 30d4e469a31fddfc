"""Describes to the core how to reach the other ranks over sockets: see csrc/network/sockets.h."""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ringtrain.errors import PeerLostError
from ringtrain.job.host import address_towards, addresses_of, usual_address
from ringtrain.job.launched_by import (
    ByHand,
    Launch,
    Ringrun,
    SlurmStep,
    Torchrun,
    batch_job,
    expand_node_list,
    job_on_one_host,
    name_of_job,
)
from ringtrain.job.rendezvous.listener import listen
from ringtrain.job.rendezvous.secret import job_secret
from ringtrain.job.rendezvous.server import Place, meet
from ringtrain.job.world import Address, Exchange, Sockets, World, introduce, node_name
from ringtrain.options import table
from ringtrain.record.logger import logger

PLACE_VARIABLE = "RINGTRAIN_RENDEZVOUS"
# How many ports are tried where none was chosen for ringtrain.
_PORTS = 8
# Below those that the system gives to any process.
_FIRST_PORT, _PORTS_TO_CHOOSE_FROM = 20_000, 10_000
# Round trips from which on larger messages, and more connections, are faster at 1 Gbit/s: docs/slow-links.md.
_SMALL_CHUNKS_BELOW_S, _ONE_STREAM_BELOW_S = 0.005, 0.020
_LONG_LINK_STREAMS, _LONG_LINK_CHUNK_KB = 4, "1024"


def connect(
    launch: Launch, settings: dict[str, str], read_tuned: Callable[[], dict[str, str]]
) -> tuple[World, dict[str, str]]:
    """The world of a job whose ranks meet at a rendezvous; they call this together.

    Raises:
        RuntimeError: nothing says where the ranks meet.
        StalledError, PeerLostError, ValueError: see `rendezvous.server.meet` and `world.introduce`.
    """
    place = place_of(launch)
    if launch.size is None:
        raise RuntimeError(f"{launch.launcher} does not say how many ranks there are; set RINGTRAIN_SIZE")
    secret = secret_of(launch, place)
    timeout_s = float(settings["start_timeout_s"])
    hosts = addresses_of(settings["socket_interfaces"])
    with meet(place, secret, "world", launch.rank, launch.size, timeout_s) as member:
        places = hosts or [member.own_address]
        round_trip_s = member.round_trip_s()
        return connect_by(member.exchange, launch.rank, places, secret, settings, read_tuned, round_trip_s=round_trip_s)


def tell_all(launch: Launch, value: Any, settings: dict[str, str]) -> list[Any]:
    """Returns what all ranks of this launch say, by rank. Raises as `rendezvous.server.meet`."""
    place = place_of(launch)
    if launch.size is None:
        raise RuntimeError(f"{launch.launcher} does not say how many ranks there are; set RINGTRAIN_SIZE")
    timeout_s = float(settings["start_timeout_s"])
    with meet(place, secret_of(launch, place), "all", launch.rank, launch.size, timeout_s) as member:
        return member.exchange(value)


def connect_over(
    exchange: Exchange, rank: int, settings: dict[str, str], read_tuned: Callable[[], dict[str, str]]
) -> tuple[World, dict[str, str]]:
    """The world of ranks that have another way to tell each other where they are, which no other job hears."""
    first_address, secret = exchange((usual_address(), os.urandom(32).hex()) if rank == 0 else None)[0]
    usual = first_address if rank == 0 else address_towards(first_address)
    hosts = addresses_of(settings["socket_interfaces"]) or [usual]
    return connect_by(exchange, rank, hosts, bytes.fromhex(secret), settings, read_tuned)


def connect_by(
    exchange: Exchange,
    rank: int,
    hosts: list[str],
    secret: bytes,
    settings: dict[str, str],
    read_tuned: Callable[[], dict[str, str]],
    slot: int | None = None,
    may_be_cut: bool = False,
    round_trip_s: float = 0,
) -> tuple[World, dict[str, str]]:
    """The world of ranks that listen at `hosts`, addresses of this one, each at its own.

    `slot`: as in `introduce`. `may_be_cut`: there is reason to look whether all hosts reach each other; then it raises
    UnreachableError. `round_trip_s`: from this rank to the place where they meet, for `choose_streams`.
    """
    with Listeners() as listeners:
        own = listeners.open(hosts)
        world, tuned, told = introduce(exchange, rank, node_name(), settings, read_tuned, (own, round_trip_s), slot)
        addresses = [[Address(str(host), int(port)) for host, port in of_rank] for of_rank, _ in told]
        longest_s = max(of_rank for _, of_rank in told)
        streams = choose_streams(settings, longest_s)
        if longest_s >= _SMALL_CHUNKS_BELOW_S and rank == 0:
            logger.info("connections: %s", streams.text(longest_s))
        if may_be_cut:
            require_reach(exchange, world, addresses)
        sockets = Sockets(
            listeners.take(),
            addresses,
            secret,
            world.token,
            streams.number,
            float(settings["peer_timeout_s"]),
            settings["socket_encryption"] == "on",
        )
    return world._replace(network=sockets), {**streams.settings, **tuned}


class Streams(NamedTuple):
    """How many connections two ranks have, and the options that this changes."""

    number: int
    settings: dict[str, str]

    def text(self, round_trip_s: float) -> str:
        """Such as "4 between two ranks, ring_chunk_kb=1024; a round trip takes 50.0 ms", for the doctor and the log."""
        settings = "".join(f", {name}={value}" for name, value in self.settings.items())
        return f"{self.number} between two ranks{settings}; a round trip takes {1e3 * round_trip_s:.1f} ms"


def choose_streams(settings: Mapping[str, str], round_trip_s: float) -> Streams:
    """Returns the number that `socket_streams` says, and for auto the one for the longest round trip between the hosts.

    The ring has eight messages on their way: from some ms on these must be larger to fill a link of 1 Gbit/s, and the
    round trip counts where algorithms are chosen. From some more on such a link holds more than the buffers of one TCP
    connection, 4 MB on Linux.
    """
    wanted = settings["socket_streams"]
    of_link = _LONG_LINK_STREAMS if round_trip_s >= _ONE_STREAM_BELOW_S else 1
    number = of_link if wanted == "auto" else int(wanted)
    if round_trip_s < _SMALL_CHUNKS_BELOW_S:
        return Streams(number, {})
    hop_us = 2 ** round(math.log2(1e6 * round_trip_s / 2))  # roughly, so that the next job chooses as this one does
    usual = {option.name: str(option.default) for option in table.TABLE}
    changed = {"link_hop_us": str(hop_us), "ring_chunk_kb": _LONG_LINK_CHUNK_KB}
    return Streams(number, {name: text for name, text in changed.items() if settings[name] == usual[name]})


class Listeners:
    """Sockets that other ranks can connect to, until close() or take()."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Listeners:
        return self

    def __exit__(self, *error: object) -> None:
        for sock in self._sockets:
            sock.close()

    def open(self, hosts: list[str]) -> list[Address]:
        """Listens at each of these addresses alone; for one that only others know this host by, at all of its own."""
        for host in hosts:
            sock = listen(host, [0])
            if sock is None:
                raise OSError(errno.EADDRINUSE, f"this host has no free port to listen at {host}")
            sock.setblocking(False)
            self._sockets.append(sock)
        return [Address(host, sock.getsockname()[1]) for host, sock in zip(hosts, self._sockets, strict=True)]

    def take(self) -> list[int]:
        """Their descriptors, which belong to the caller now."""
        taken, self._sockets = [sock.detach() for sock in self._sockets], []
        return taken


def place_of(launch: Launch) -> Place:
    """Returns the place where the ranks of this launch meet.

    Raises RuntimeError where nothing says so, and ValueError for what is not a place.
    """
    named = named_place()
    if named:
        return named
    if launch.launcher in (Torchrun.NAME, ByHand.NAME):
        # torch's own store may be at the port itself
        port_of_torch = int(os.environ["MASTER_PORT"])
        ports = range(port_of_torch + 1, port_of_torch + 1 + _PORTS)
        return Place(os.environ["MASTER_ADDR"], ports, batch_job())
    if launch.launcher == SlurmStep.NAME:
        first = expand_node_list(os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"])[0]
        number = int(os.environ.get("SLURM_JOB_ID", 0)) * 16 + int(os.environ["SLURM_STEP_ID"])
        return Place(first, _ports_of(number))
    job = job_without_mpi4py(launch)
    if job is not None:
        return Place("127.0.0.1", _ports_of(zlib.crc32(job.encode())))
    raise RuntimeError(
        f"network=sockets, but {launch.launcher} does not say where the ranks meet: set {PLACE_VARIABLE}=host:port, "
        "the same for all of them, or start with ringrun"
    )


def _ports_of(number: int) -> range:
    """Returns ports of the job with this number. Another job may have the same ones, but not the same secret."""
    port = _FIRST_PORT + number * _PORTS % _PORTS_TO_CHOOSE_FROM
    return range(port, port + _PORTS)


def secret_of(launch: Launch, place: Place) -> bytes:
    """Returns the secret of the ranks that meet there: of each job another one, where its launcher names the job.

    With RINGTRAIN_RENDEZVOUS it is the secret of that place alone. Raises as `job_secret`.
    """
    if named_place():
        return job_secret(str(place))
    return job_secret(name_of_job(launch) or str(place), is_of_job=True)


def named_place() -> Place | None:
    """Returns the place that the environment names. Raises ValueError if it is invalid."""
    named = os.environ.get(PLACE_VARIABLE)
    if not named:
        return None
    host, _, port_text = named.rpartition(":")
    if not host or not port_text.isdigit():
        raise ValueError(f"{PLACE_VARIABLE}={named} is not host:port")
    return Place(host.strip("[]"), [int(port_text)])


def is_met_at_a_place(launch: Launch) -> bool:
    """Whether the ranks are to meet at a rendezvous, and not through the MPI that has started them."""
    is_of_sockets = launch.launcher == SlurmStep.NAME or is_started_for_sockets(launch)
    return PLACE_VARIABLE in os.environ or is_of_sockets or job_without_mpi4py(launch) is not None


def job_without_mpi4py(launch: Launch) -> str | None:
    """Returns what names the job, where mpirun has started all ranks on this host and mpi4py is not installed.

    With mpi4py a script may import it on some ranks alone, which would then wait for the others in MPI_Init.
    """
    return job_on_one_host(launch) if importlib.util.find_spec("mpi4py") is None else None


def is_started_for_sockets(launch: Launch) -> bool:
    """Whether the launcher is none of an MPI."""
    return launch.launcher in (Ringrun.NAME, Torchrun.NAME, ByHand.NAME)


# --- whether the hosts of a job reach each other: where two do not, neither is gone, and yet they cannot work together


_CONNECT_S = 1.0
_AT_ONCE = 32


class UnreachableError(PeerLostError):
    """The others reach each other without the hosts of `ranks`, which have to go."""

    def __init__(self, text: str, ranks: list[int]):
        super().__init__(text)
        self.ranks = ranks


def require_reach(exchange: Exchange, world: World, addresses: Sequence[Sequence[Address]]) -> None:
    """Makes each rank knock at a rank of each other host. All ranks call it together.

    Args:
        addresses: where each rank listens, by rank. A process that answers there may close the connection.

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
    from concurrent.futures import ThreadPoolExecutor  # slow, and only a job with hosts that were cut off needs it

    with ThreadPoolExecutor(min(_AT_ONCE, len(addresses))) as threads:
        answers = threads.map(lambda of_one: all(map(_answers, of_one)), addresses.values())
        return [node for node, is_there in zip(addresses, answers, strict=True) if not is_there]


def _answers(address: Address) -> bool:
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except OSError:
        return False
    return True
