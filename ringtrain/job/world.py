"""The ranks of a job, and how they tell each other who and where they are."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ringtrain import _core
from ringtrain._core import hmac_sha256
from ringtrain.errors import RingtrainError
from ringtrain.job import gpus
from ringtrain.job.host import Share, addresses_of, own_share, usable_together, usual_address
from ringtrain.record.logger import logger

# Options of which that of rank 0 counts: tests, for example, give each rank a folder of its own.
_OF_FIRST_RANK = ("timeline_filename",)

_SECRET_BYTES = 32
_BACKLOG = 16

# A collective call of all ranks: what each of them gives, by rank. It is made of what JSON knows.
Exchange = Callable[[Any], list[Any]]


class SettingsError(ValueError):
    """`ranks` have been given other options than rank 0."""

    def __init__(self, text: str, ranks: list[int]):
        super().__init__(text)
        self.ranks = ranks


class Library(NamedTuple):
    """The MPI library of this process, as numbers: see csrc/network/mpi.h."""

    library: str
    handle_bytes: int
    communicator: int
    handles: dict[str, int]
    constants: dict[str, int]


class Address(NamedTuple):
    """Says where a rank listens: numbers of IPv4 or IPv6, and a port."""

    host: str
    port: int


_NOWHERE = Address("", 0)


class Sockets(NamedTuple):
    """How the ranks are connected. The core owns the listeners from init() on."""

    listeners: list[int]
    addresses: list[list[Address]]  # of every rank
    secret: bytes
    token: str
    streams: int
    timeout_s: float
    is_sealed: bool


class Answering(NamedTuple):
    """Where each rank answers those who ask how it is; see csrc/network/answering.h."""

    listener: socket.socket
    addresses: list[Address]  # by rank
    secret: bytes


class World(NamedTuple):
    """The ranks of the job and where they are.

    `names` are (host, pid) by rank, `nodes` the number of the node of every rank, by first appearance, `local_ranks`
    that of the rank among those of its node, `communicator` is mpi4py's; without MPI it is None. `network` is None in a
    job of one rank.
    """

    rank: int
    names: list[tuple[str, int]]
    nodes: list[int]
    local_ranks: list[int]
    cores: int
    token: str
    network: Library | Sockets | None
    gpus: list[gpus.Choice]  # by rank
    communicator: Any = None
    answering: Answering | None = None


def single_world(settings: dict[str, str]) -> World:
    """A job of one rank: no network, and on the GPU that the script takes."""
    here = usable_together([own_share()])
    names = [(socket.gethostname(), os.getpid())]
    listener = _listener_for_questions(settings, is_on_one_host=True)
    answering = None
    if listener is not None:
        answering = Answering(listener, [_address_of(listener)], os.urandom(_SECRET_BYTES))
    token = os.urandom(8).hex()
    return World(0, names, [0], [0], here, token, None, [gpus.NO_CHOICE], answering=answering)


def _listener_for_questions(settings: dict[str, str], *, is_on_one_host: bool) -> socket.socket | None:
    """Returns a socket that listens, or None where option `status` is off, or this host has no such address."""
    if settings["status"] == "off":
        return None
    try:
        host = "127.0.0.1"
        if not is_on_one_host:
            host = next(iter(addresses_of(settings["socket_interfaces"])), None) or usual_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.bind((host, 0))
        sock.listen(_BACKLOG)
    except (OSError, ValueError) as error:  # as in a container without a loopback
        logger.info("`ringrun status` gets no answer from this rank: %s", error)
        return None
    return sock


def _address_of(listener: socket.socket) -> Address:
    return Address(*listener.getsockname()[:2])


def node_name() -> str:
    """The same for processes that can share memory: of one system, one /dev/shm, and one name of the host."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.stat('/dev/shm').st_dev if os.path.isdir('/dev/shm') else ''} {socket.gethostname()}"


def why_not_encrypted(settings: Mapping[str, str]) -> str:
    """Returns why this process cannot encrypt connections that are to be encrypted; "" if it can."""
    if settings["socket_encryption"] == "off":
        return ""
    with contextlib.suppress(ImportError):
        import _ssl  # noqa: F401  # the libcrypto of this Python, which the loader may not find by itself
    try:
        _core.require_sealing()
    except RingtrainError as error:
        return str(error)
    return ""


def introduce(
    exchange: Exchange,
    rank: int,
    node: str,
    settings: dict[str, str],
    read_tuned: Callable[[], dict[str, str]],
    own_network: Any = None,
    slot: int | None = None,
) -> tuple[World, dict[str, str], list[Any]]:
    """Returns what the ranks must know of each other; all call it together.

    Args:
        node: the same on ranks that may share memory.
        settings: every option; must be the same on all ranks, but for `_OF_FIRST_RANK`.
        read_tuned: called on rank 0 alone; all get what it returns.
        own_network: what the Network of this rank has to tell the others.
        slot: in which order the ranks of a node have their local ranks; by None, that of the ranks.

    Returns:
        The world, still without its network, what `read_tuned` has returned with the options of rank 0 that count for
        all, and `own_network` of all ranks.

    Raises:
        SettingsError: settings that differ between ranks, on all ranks alike.
        RingtrainError: a rank cannot encrypt connections that are to be encrypted, on all ranks alike.
        ValueError: what `read_tuned` raises, on all ranks alike.
    """
    introduced = exchange((node, rank if slot is None else slot))
    places, slots = [one for one, _ in introduced], [one for _, one in introduced]
    local_ranks = _local_ranks(places, slots)
    gpu = gpus.choose(local_ranks[rank], int(float(settings["gpus_per_rank"])))
    common = {name: value for name, value in settings.items() if name not in _OF_FIRST_RANK}
    digest = hmac_sha256(b"", json.dumps(common, sort_keys=True).encode()).hex()
    first = _of_first(settings, read_tuned) if rank == 0 else None
    listener = _listener_for_questions(settings, is_on_one_host=len(set(places)) == 1)
    where = listener and _address_of(listener)
    own = (socket.gethostname(), os.getpid(), *own_share(), *gpu, digest, where, why_not_encrypted(settings), first)
    told = zip(*exchange((*own, own_network)), strict=True)
    hosts, pids, cpus, containers, quotas, *chosen, digests, wheres, whys_not_encrypted, firsts, networks = told
    if any(one != digest for one in digests):
        _require_same(exchange(common))
    for other, why in enumerate(whys_not_encrypted):
        if why:
            raise RingtrainError(f"rank {other}: {why}")
    token, secret, of_first_rank, tuned, error = firsts[0]
    if error:
        raise ValueError(error)
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    here = [rank for rank, place in enumerate(places) if place == node]
    answering = None
    if listener is not None:
        addresses = [_NOWHERE if one is None else Address(*one) for one in wheres]
        answering = Answering(listener, addresses, bytes.fromhex(secret))
    world = World(
        rank=rank,
        names=list(zip(hosts, pids, strict=True)),
        nodes=[numbers[place] for place in places],
        local_ranks=local_ranks,
        cores=usable_together(Share(cpus[one], tuple(containers[one]), quotas[one]) for one in here),
        token=token,
        network=None,
        gpus=list(map(gpus.Choice, *chosen)),
        answering=answering,
    )
    return world, {**of_first_rank, **tuned}, list(networks)


def _of_first(settings: dict[str, str], read_tuned: Callable[[], dict[str, str]]) -> tuple[Any, ...]:
    """Returns what rank 0 alone says: the token, the secret of those who ask how ranks are, its options that count for
    all, and the outcome of `read_tuned`."""
    token, secret = os.urandom(8).hex(), os.urandom(_SECRET_BYTES).hex()
    return token, secret, {name: settings[name] for name in _OF_FIRST_RANK}, *_outcome(read_tuned)


def _local_ranks(places: Sequence[str], slots: Sequence[int]) -> list[int]:
    seen: Counter[str] = Counter()
    local_ranks = [0] * len(slots)
    for rank in sorted(range(len(slots)), key=slots.__getitem__):
        local_ranks[rank] = seen[places[rank]]
        seen[places[rank]] += 1
    return local_ranks


def _outcome(read: Callable[[], dict[str, str]]) -> tuple[dict[str, str], str]:
    """Returns its result, or what it has to say."""
    try:
        return read(), ""
    except ValueError as error:
        return {}, str(error)


def _require_same(settings: list[dict[str, str]]) -> None:
    for name, expected in settings[0].items():
        others = [rank for rank, one in enumerate(settings) if one.get(name) != expected]
        if others:
            raise SettingsError(
                f"{name} must be the same on all ranks: rank 0 has {expected}, "
                f"rank {others[0]} has {settings[others[0]].get(name)}",
                [rank for rank, one in enumerate(settings) if one != settings[0]],
            )


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs: each two players meet once, and nobody plays twice in a round (the circle method)."""
    seats = list(range(players + players % 2))
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = [sorted((seats[place], seats[-1 - place])) for place in range(len(seats) // 2)]
        rounds.append([(one, other) for one, other in pairs if other < players])
        seats.insert(1, seats.pop())
    return rounds
