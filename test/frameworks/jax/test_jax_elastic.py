"""A training in JAX that outlives its ranks."""

import json

import numpy as np
import pytest
from elastic_ranks import elastic_job
from harness.exact import require_equal
from harness.frameworks import on_demand

jax = on_demand("jax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")

STEPS = 60

TRAINS = """
import json, sys, time
from functools import partial
import jax, jax.numpy as jnp
import ringtrain.jax as hvd

hvd.init()

@partial(jax.jit, donate_argnums=0)
def step(params, key):
    key, noise = jax.random.split(key)
    gradient = hvd.allreduce(jnp.full(1000, 2.0), op=hvd.Average, name="gradient")
    return {"weight": params["weight"] - gradient}, key, hvd.allgather(jnp.ones((1, 2)))

@hvd.elastic.run
def train(state):
    while state.step < STEPS:
        state.params, state.key, ones = step(state.params, state.key)
        assert ones.shape == (hvd.size(), 2), ones.shape
        state.step += 1
        state.commit()
        if state.step == 20:
            print("twenty", flush=True)
        time.sleep(0.02)

state = hvd.elastic.JaxState(params={"weight": jnp.zeros(1000)}, key=jax.random.key(7), step=0)
train(state)
weight, key = state.params["weight"], jax.random.key_data(state.key)
print(json.dumps([float(weight.min()), float(weight.max()), key.tolist(), hvd.elastic.generation()]))
""".replace("STEPS", str(STEPS))


@pytest.mark.slow
def test_a_killed_rank_costs_no_step(tmp_path):
    with elastic_job(TRAINS, tmp_path, 3) as job:
        job.process(job.formed(1).members[0]).wait_for("twenty")
        job.process(job.formed(1).members[1]).kill()
        results = [json.loads(one.ends().splitlines()[-1]) for one in job.processes if one.popen.poll() != -9]
    key = jax.random.key(7)
    for _ in range(STEPS):
        key, _ = jax.random.split(key)
    assert results == [[-2.0 * STEPS, -2.0 * STEPS, jax.random.key_data(key).tolist(), 2]] * 2


@pytest.mark.ranks(2)
def test_a_state_goes_back_to_its_commit_and_to_that_of_the_first_rank():
    rank = hvd.rank()
    state = hvd.elastic.JaxState(params={"a": jnp.full(3, float(rank))}, key=jax.random.key(rank), epoch=rank)
    donate = jax.jit(lambda tree: jax.tree.map(lambda array: array + 1, tree), donate_argnums=0)
    state.params = donate(state.params)
    state.restore()
    require_equal(state.params["a"], np.full(3, float(rank), state.params["a"].dtype))
    state.sync()
    require_equal(state.params["a"], np.zeros(3, state.params["a"].dtype))
    assert state.epoch == 0 and (jax.random.key_data(state.key) == jax.random.key_data(jax.random.key(0))).all()
    state.load_content(state.saved_content())
    require_equal(state.params["a"], np.zeros(3, state.params["a"].dtype))
