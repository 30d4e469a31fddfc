"""jax.distributed with gloo, as a mesh over all ranks: JAX's own way to several processes on CPUs."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ringtrain.bench.peers import CannotTakePart
from ringtrain.bench.ranks import Job, address_of_rank_0
from ringtrain.bench.rounds import Competitor, Distribution


def open_peer(job: Job) -> JaxGlooPeer:
    if not hasattr(jax, "shard_map") or not hasattr(jax.lax, "pcast"):
        raise CannotTakePart(f"jax {jax.__version__} is too old for it")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    host = address_of_rank_0(job)
    with socket.create_server(("", 0)) as free:
        port = job.gather(free.getsockname()[1])[0]
    jax.distributed.initialize(f"{host}:{port}", job.size, job.rank)
    return JaxGlooPeer()


class JaxGlooPeer:
    """Arrays that all ranks have alike, and batches of which each has its part."""

    def collective(self, kind: str) -> list[Competitor]:
        return []

    def step(self) -> list[Competitor]:
        return []

    def training(self) -> list[Distribution]:
        return []

    def jax_training(self, task: Any) -> list[Competitor]:
        return [Competitor("jax.distributed, gloo", lambda _: _train(task))]

    def close(self) -> None:
        jax.distributed.shutdown()


def _train(task: Any) -> Any:
    from ringtrain.bench.jax_training import running

    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    everywhere, by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("ranks"))
    inputs, labels = (jax.make_array_from_process_local_data(by_rows, array) for array in (task.inputs, task.labels))
    params = jax.tree_util.tree_map(
        lambda array: jax.make_array_from_process_local_data(everywhere, np.asarray(array)), task.new_params()
    )

    def updated(params: Any, inputs: Any, labels: Any) -> Any:
        own = jax.lax.pcast(params, ("ranks",), to="varying")
        gradients = jax.lax.pmean(jax.grad(task.loss)(own, inputs, labels), "ranks")
        return task.updated(params, inputs, labels, lambda _: gradients)

    specs = (PartitionSpec(), PartitionSpec("ranks"), PartitionSpec("ranks"))
    mapped = jax.shard_map(updated, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    step = partial(jax.jit, donate_argnums=0, out_shardings=everywhere)(mapped)
    return running(step, params, inputs, labels)
