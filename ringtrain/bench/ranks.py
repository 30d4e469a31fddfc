"""The ranks that measure together. They meet through MPI or the rendezvous, not through what is being measured."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ringtrain.job import launched_by, network, sockets
from ringtrain.job.rendezvous.server import meet
from ringtrain.job.world import node_name
from ringtrain.options import table

_MEETING_S = 300.0


class Job(Protocol):
    """This process's place, and how the ranks meet between measurements."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: int

    def barrier(self) -> None:
        """Return when all ranks have come. A rank that waits leaves its core to the others."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks."""

    def gather_on_node(self, value: Any) -> list[Any]:
        """The values of the ranks of this node, on each of them."""

    def close(self) -> None:
        """Leave; all ranks together."""


class SingleJob:
    """One rank, without MPI."""

    rank = local_rank = 0
    size = local_size = hosts = 1

    def barrier(self) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]

    gather_on_node = gather

    def close(self) -> None:
        pass


class MpiJob:
    """The ranks of MPI_COMM_WORLD."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD.Dup()
        self._node = self._world.Split_type(MPI.COMM_TYPE_SHARED, key=self._world.Get_rank())
        self.rank, self.size = self._world.Get_rank(), self._world.Get_size()
        self.local_rank, self.local_size = self._node.Get_rank(), self._node.Get_size()
        self.hosts = sum(self.gather(self.local_rank == 0))

    def barrier(self) -> None:
        """Raises RuntimeError if some rank does not come within five minutes."""
        request = self._world.Ibarrier()
        deadline = time.monotonic() + _MEETING_S
        while not request.Test():
            if time.monotonic() > deadline:
                raise RuntimeError("a rank has not come to the barrier of the measurement for five minutes")
            os.sched_yield()

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = self._world.allgather(value)
        return values

    def gather_on_node(self, value: Any) -> list[Any]:
        values: list[Any] = self._node.allgather(value)
        return values

    def close(self) -> None:
        pass


class RendezvousJob:
    """The ranks of a job without MPI, at the rendezvous where init() meets, too."""

    def __init__(self, launch: launched_by.Launch) -> None:
        assert launch.size is not None
        place = sockets.place_of(launch)
        self._stay = contextlib.ExitStack()
        secret = sockets.secret_of(launch, place)
        meeting = meet(place, secret, "bench", launch.rank, launch.size, timeout_s=0, place_timeout_s=_MEETING_S)
        self._member = self._stay.enter_context(meeting)
        self.rank, self.size = launch.rank, launch.size
        nodes = self.gather(node_name())
        self._on_node = [rank for rank, node in enumerate(nodes) if node == nodes[self.rank]]
        self.local_rank, self.local_size = self._on_node.index(self.rank), len(self._on_node)
        self.hosts = len(set(nodes))

    def barrier(self) -> None:
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """`value` is made of what JSON knows. Raises StalledError if some rank does not come within five minutes."""
        return self._member.exchange(value, within_s=_MEETING_S)

    def gather_on_node(self, value: Any) -> list[Any]:
        values = self.gather(value)
        return [values[rank] for rank in self._on_node]

    def close(self) -> None:
        self._stay.close()


def join(networks: Sequence[str] = ()) -> Job:
    """The job that a launcher has made this process a part of, else one of this process alone.

    Args:
        networks: what is to be compared; none: what `network=auto` means here.

    Raises:
        RuntimeError: the launcher belongs to another MPI.
    """
    launch = launched_by.detect()
    if launch is None:
        return SingleJob()
    settings = {**table.resolve({}), "network": networks[0] if len(networks) == 1 else "auto"}
    chosen = network.choose(settings, None, launch).network
    if chosen == "sockets" and sockets.is_met_at_a_place(launch):
        return RendezvousJob(launch)
    from mpi4py import MPI

    launched_by.require_world(launch, MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    return MpiJob()


def address_of_rank_0(job: Job) -> str:
    """The name under which all ranks reach the host of rank 0."""
    return str(job.gather("127.0.0.1" if job.hosts == 1 else socket.gethostname())[0])
