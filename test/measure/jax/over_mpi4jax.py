"""mpi4jax: MPI's calls inside jit, one for each gradient, in the order of its tokens."""

from __future__ import annotations

from typing import Any

import jax
import mpi4jax
from mpi4py import MPI

from ringtrain.bench.ranks import Job
from ringtrain.bench.rounds import Competitor, Distribution


def open_peer(job: Job) -> Mpi4JaxPeer:
    return Mpi4JaxPeer()


class Mpi4JaxPeer:
    """All ranks of MPI."""

    def collective(self, kind: str) -> list[Competitor]:
        return []

    def step(self) -> list[Competitor]:
        return []

    def training(self) -> list[Distribution]:
        return []

    def jax_training(self, task: Any) -> list[Competitor]:
        return [Competitor("mpi4jax", lambda _: task.train(_average))]

    def close(self) -> None:
        pass


def _average(gradients: Any) -> Any:
    size = MPI.COMM_WORLD.Get_size()
    return jax.tree_util.tree_map(lambda one: mpi4jax.allreduce(one, op=MPI.SUM, comm=MPI.COMM_WORLD) / size, gradients)
