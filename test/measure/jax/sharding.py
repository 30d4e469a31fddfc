"""JAX's own sharding over the devices of all ranks: sums, and training steps with the batch split over the ranks.

The same programs run in the ranks, where ringtrain carries them, and in the processes of `measure.jax.gloo`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from measure.jax.training import Task, running

# By name the floats of each array that is summed over the ranks.
SUMS = {
    "psum of 1 float": [1],
    "psum of 65,536 floats": [1 << 16],
    "psum of 1,048,576 floats": [1 << 20],
    "psum of 25,000,000 floats": [25_000_000],
    "psum of 160 arrays of 156,250 floats": [156_250] * 160,
}
_FLOATS_OF_TIMING, _MOST_TIMES = 16 << 20, 100

# The first call does the work once and returns the results. Each later call does the work several times.
Repeated = Callable[[], Any]


def times_of(name: str) -> int:
    """How often a sum is repeated in one timing."""
    return min(_MOST_TIMES, max(2, _FLOATS_OF_TIMING // sum(SUMS[name])))


def sum_arrays(name: str, times: int) -> Repeated:
    """Results: of each array the least and the greatest value. Each rank puts in its number, counted from 1."""
    by_rank, everywhere = _shardings()
    number = np.float32(jax.process_index() + 1)
    arrays = [jax.make_array_from_process_local_data(by_rank, np.full(count, number)) for count in SUMS[name]]
    total = partial(jax.lax.psum, axis_name="ranks")
    program = jax.jit(_shard_map()(total, mesh=by_rank.mesh, in_specs=by_rank.spec, out_specs=everywhere.spec))

    def ends(results: list[jax.Array]) -> list[tuple[float, float]]:
        own = [np.asarray(result.addressable_data(0)) for result in results]
        return [(float(one.min()), float(one.max())) for one in own]

    return _repeated(lambda: jax.block_until_ready(program(arrays)), ends, times)


def train(model: str, times: int) -> Repeated:
    """Results: the weights after a step."""
    by_rank, everywhere = _shardings()
    task = Task(model, jax.process_index())
    inputs, labels = (jax.make_array_from_process_local_data(by_rank, one) for one in (task.inputs, task.labels))
    params = jax.tree_util.tree_map(
        lambda array: jax.make_array_from_process_local_data(everywhere, np.asarray(array)), task.new_params()
    )

    @partial(jax.jit, donate_argnums=0, out_shardings=everywhere)
    def step(params: Any, inputs: Any, labels: Any) -> Any:
        return task.updated(params, inputs, labels, lambda gradients: gradients)  # XLA averages them

    return _repeated(running(step, params, inputs, labels), lambda weights: [*map(np.asarray, weights)], times)


def _repeated(run: Callable[[], Any], results: Callable[[Any], Any], times: int) -> Repeated:
    is_first = True

    def repeated() -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return results(run())
        for _ in range(times):
            run()
        return None

    return repeated


def _shardings() -> tuple[NamedSharding, NamedSharding]:
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    return NamedSharding(mesh, PartitionSpec("ranks")), NamedSharding(mesh, PartitionSpec())


def _shard_map() -> Callable[..., Any]:
    if hasattr(jax, "shard_map"):
        return jax.shard_map
    from jax.experimental.shard_map import shard_map

    return shard_map
