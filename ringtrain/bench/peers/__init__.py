"""The peers that ringtrain is measured against: one module each. None of them must be installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from ringtrain.bench.ranks import Job, RendezvousJob
from ringtrain.bench.rounds import Competitor, Distribution

NAMES = ("mpi", "gloo", "horovod")
_OVER_MPI = ("mpi", "horovod", "mpi4jax")
# Those that take part in measurements of a store.
OF_STORES = ("ps-lite",)
_WITHOUT_OTHER_RANKS = (*OF_STORES, "nccl")
# Where each is; measurements elsewhere add their own.
MODULES = {name: f"ringtrain.bench.peers.{name.replace('-', '_')}" for name in (*NAMES, *OF_STORES)}


class CannotTakePart(Exception):
    """Why a peer that is installed cannot be opened; raised on all ranks."""


class Peer(Protocol):
    """One library that can do what ringtrain does."""

    def collective(self, kind: str) -> list[Competitor]:
        """Its ways to do a collective on one array; none where it has no such collective."""

    def step(self) -> list[Competitor]:
        """Its ways to average gradients in place."""

    def training(self) -> list[Distribution]:
        """Its ways to train a torch model; none where it knows nothing of torch."""

    def close(self) -> None:
        """Leave; all ranks together."""


@runtime_checkable
class HasUpdates(Protocol):
    """A peer whose servers update weights."""

    def updates(self, kind: str, sgd: Mapping[str, float]) -> list[Competitor]:
        """Its ways to push gradients to a store of this kind and pull the weights, which begin as zeros."""


class Peers(NamedTuple):
    """Lists the peers that take part, and why the others that were asked for do not."""

    present: list[Peer]
    missing: dict[str, str]

    def close(self) -> None:
        for peer in self.present:
            peer.close()


def find(job: Job, wanted: Sequence[str]) -> Peers:
    """Open the wanted peers; one that is missing on any rank is missing on all."""
    peers = Peers([], {})
    for name in wanted:
        if job.size == 1 and name not in _WITHOUT_OTHER_RANKS:
            peers.missing[name] = "a job of one rank has no other rank to talk to"
            continue
        if isinstance(job, RendezvousJob) and name in _OVER_MPI:
            peers.missing[name] = "the ranks were started without MPI"
            continue
        open_peer, reason = _load(name)
        reasons = [other for other in job.gather(reason) if other]
        try:
            if open_peer is None or reasons:
                raise CannotTakePart(reasons[0])
            peers.present.append(open_peer(job))
        except CannotTakePart as error:
            peers.missing[name] = str(error)
    return peers


def _load(name: str) -> tuple[Callable[[Job], Peer] | None, str]:
    """Returns the function that opens the peer, or why it cannot be opened."""
    try:
        module: Any = importlib.import_module(MODULES[name])
    except ImportError as error:
        return None, str(error)
    return cast(Callable[[Job], Peer], module.open_peer), ""
