"""Ranks with several devices of their own: programs for all of them, within shard_map."""

import sys

from harness.frameworks import need
from harness.ringrun_job import ringrun

PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np, optax
import ringtrain.jax as hvd
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
hvd.init()
rank = hvd.rank()
mesh = Mesh(np.array(jax.devices()), ("local",))
mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
def placed(array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))

# Each device reduces its own part with the same device of the other rank; what all devices have stays what they have.
x = np.arange(8, dtype=np.float32) + rank
for spec in (P("local"), P()):
    work = jax.jit(mapped(lambda a: hvd.allreduce(2 * a, hvd.Sum) + 1, in_specs=spec, out_specs=spec))
    for _ in range(20):
        result = work(placed(x, spec))
        assert np.array_equal(result, 2 * (2 * x + 1 - 2 * rank) + 1), (spec, result)
        assert result.sharding.is_equivalent_to(placed(x, spec).sharding, 1)

gathered = jax.jit(mapped(hvd.allgather, in_specs=P("local"), out_specs=P("local")))(placed(x, P("local")))
halves = np.arange(8, dtype=np.float32).reshape(2, 4)
assert np.array_equal(gathered, np.concatenate([halves[0], halves[0] + 1, halves[1], halves[1] + 1])), gathered

def loop(a):
    return jax.lax.fori_loop(0, 5, lambda _, b: hvd.allreduce(b, hvd.Average), hvd.barrier_on(a))
looped = jax.jit(mapped(loop, in_specs=P("local"), out_specs=P("local")))(placed(x, P("local")))
assert np.array_equal(looped, np.arange(8) + 0.5), looped

# A step with a batch that is sharded over the devices: as one process with the whole batch.
batch = np.arange(32, dtype=np.float32).reshape(8, 4) % 7
optimizer = hvd.distribute(optax.sgd(0.5))
params = placed(np.ones((4, 2), np.float32), P())
state = optimizer.init(params)
loss = lambda params, batch: jnp.mean((batch @ params) ** 2)
def step(params, state, batch):
    gradient = jax.lax.pmean(jax.grad(loss)(params, batch), "local")
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state
step = jax.jit(mapped(step, in_specs=(P(), P(), P("local")), out_specs=(P(), P())))
params, state = step(params, state, placed(batch[4 * rank : 4 * rank + 4], P("local")))
whole = np.ones((4, 2), np.float32)
whole -= 0.5 * np.asarray(jax.grad(loss)(jnp.asarray(whole), jnp.asarray(batch)))
assert np.array_equal(params, whole), (params, whole)

for refused, words in (
    (jax.jit(hvd.allreduce), "call it within jax.shard_map over all of these devices"),
    (jax.jit(mapped(lambda a: hvd.sendrecv(a, a, 1 - rank, 1 - rank), in_specs=P("local"), out_specs=P("local"))),
     "start a rank for each device"),
):
    try:
        refused(placed(x, P("local")))
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
print("right")
"""


def test_each_of_several_devices_carries_out_an_operation_with_the_same_one_of_other_ranks():
    need("jax")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = ringrun("-np", "2", "--no-prefix-output", sys.executable, "-c", PROGRAM, **flags)
    assert done.stdout.split() == ["right"] * 2, done.stdout + done.stderr
