"""The ranks of a job, and how they tell each other who and where they are."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringtrain.job import gpus
from ringtrain.job.host import Share, own_share, usable_together

# Options of which that of rank 0 counts: tests, for example, give each rank a folder of its own.
_OF_FIRST_RANK = ("timeline_filename",)

# A collective call of all ranks: what each of them gives, by rank. It is made of what JSON knows.
Exchange = Callable[[Any], list[Any]]


class SettingsError(ValueError):
    """`ranks` have been given other options than rank 0."""

    def __init__(self, text: str, ranks: list[int]):
        super().__init__(text)
        self.ranks = ranks


@dataclass(frozen=True)
class Library:
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


@dataclass(frozen=True)
class Sockets:
    """How the ranks are connected. The core owns the listeners from init() on."""

    listeners: list[int]
    addresses: list[list[Address]]  # of every rank
    secret: bytes
    token: str
    streams: int
    timeout_s: float


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


def single_world() -> World:
    """A job of one rank: no network, and on the GPU that the script takes."""
    here = usable_together([own_share()])
    return World(0, [(socket.gethostname(), os.getpid())], [0], [0], here, secrets.token_hex(8), None, [gpus.NO_CHOICE])


def node_name() -> str:
    """The same for processes that can share memory: of one system, one /dev/shm, and one name of the host."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.stat('/dev/shm').st_dev if os.path.isdir('/dev/shm') else ''} {socket.gethostname()}"


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
        ValueError: what `read_tuned` raises, on all ranks alike.
    """
    introduced = exchange((node, rank if slot is None else slot))
    places, slots = [one for one, _ in introduced], [one for _, one in introduced]
    local_ranks = _local_ranks(places, slots)
    gpu = gpus.choose(local_ranks[rank], int(float(settings["gpus_per_rank"])))
    common = {name: value for name, value in settings.items() if name not in _OF_FIRST_RANK}
    digest = hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()
    myself = {
        "name": (socket.gethostname(), os.getpid()),
        "share": own_share(),
        "gpu": gpu,
        "settings": digest,
        "token": secrets.token_hex(8),
        "tuned": _outcome(read_tuned) if rank == 0 else None,
        "settings of rank 0": {name: settings[name] for name in _OF_FIRST_RANK} if rank == 0 else None,
        "network": own_network,
    }
    everybody = exchange(myself)
    if any(one["settings"] != digest for one in everybody):
        _require_same(exchange(common))
    tuned, error = everybody[0]["tuned"]
    if error:
        raise ValueError(error)
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    shares = [Share(cpus, tuple(container), quota) for cpus, container, quota in (one["share"] for one in everybody)]
    world = World(
        rank=rank,
        names=[tuple(one["name"]) for one in everybody],
        nodes=[numbers[place] for place in places],
        local_ranks=local_ranks,
        cores=usable_together(share for share, place in zip(shares, places, strict=True) if place == node),
        token=everybody[0]["token"],
        network=None,
        gpus=[gpus.Choice(*one["gpu"]) for one in everybody],
    )
    return world, {**everybody[0]["settings of rank 0"], **tuned}, [one["network"] for one in everybody]


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
