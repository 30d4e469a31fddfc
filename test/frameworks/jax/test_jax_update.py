"""All ranks have the same state, parameters and losses for the next update, or a warning names the difference."""

import contextlib
import os
import tempfile

import numpy as np
import pytest
from harness.exact import require_equal
from harness.frameworks import on_demand

jax = on_demand("jax")
optax = on_demand("optax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")


def loss_of(params, rank):
    """A power of two for each rank, so that averages are exact."""
    return sum(jnp.sum((leaf - 4.0 * rank) ** 2) for leaf in jax.tree.leaves(params))


def mean_loss(params):
    return sum(loss_of(params, rank) for rank in range(hvd.size())) / hvd.size()


def train(optimizer, loss, steps, extra):
    params = {"w": jnp.arange(4.0), "b": jnp.ones(2)}
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params, **extra(value, gradients, loss))
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params, state


EXTRA = {
    "plateau": lambda value, gradients, loss: {"value": value},
    "line search": lambda value, gradients, loss: {"value": value, "grad": gradients, "value_fn": loss},
    "backtracking": lambda value, gradients, loss: {"value": value, "grad": gradients, "value_fn": loss},
    "sam": lambda value, gradients, loss: {"grad_fn": lambda params, _: jax.grad(loss)(params)},
}


def optimizer_of(kind):
    if kind == "plateau":
        return optax.chain(optax.sgd(0.3), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5))
    if kind == "line search":
        return optax.lbfgs()
    if kind == "backtracking":
        return optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8, store_grad=True))
    return optax.contrib.sam(optax.sgd(0.125), optax.sgd(0.125), sync_period=2, opaque_mode=True)


# optax.lbfgs() takes XLA many seconds to compile.
@pytest.mark.ranks(2, fast=[2], timeout=180)
@pytest.mark.parametrize(
    "kind", ["plateau", pytest.param("line search", marks=pytest.mark.slow), "backtracking", "sam"]
)
def test_losses_that_an_optimizer_takes_are_those_of_all_ranks(kind):
    rank = hvd.rank()
    ours = train(hvd.distribute(optimizer_of(kind)), lambda params: loss_of(params, rank), 4, EXTRA[kind])
    right = train(optimizer_of(kind), mean_loss, 4, EXTRA[kind])
    hvd.check_replicas(ours)
    for own, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(own, expected, 1e-4, 1e-5)


@pytest.mark.ranks(2)
def test_losses_are_averaged_by_weight_and_summed_where_gradients_are():
    given = []

    def update(updates, state, params=None, *, value, value_fn):
        given.append((value, *jax.value_and_grad(value_fn)(params)))
        return updates, state

    plain = optax.GradientTransformationExtraArgs(lambda params: (), update)
    own = 2.0 * hvd.rank() + 1.0  # the slope of this rank's loss, and its weight
    loss = lambda x: x * own  # noqa: E731
    for how, weight, right in (({}, own, 2.5), ({"op": hvd.Sum}, None, 4.0), ({}, None, 2.0)):
        transformation = hvd.distribute(plain, **how)
        transformation.update(jnp.float32(own), (), jnp.float32(1.0), value=own, value_fn=loss, weight=weight)
        for number in given[-1]:
            require_equal(number, np.asarray(right, number.dtype))
    assert given[-1][0].weak_type  # as a number of Python's, so that no state gets another dtype


@contextlib.contextmanager
def standard_error():
    """Gives the warnings that are written there meanwhile, also by the core."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        lines = []
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += [line for line in file.read().decode().splitlines() if "do not have the same" in line]


def with_momentum(state, rank):
    return jax.tree.map(lambda leaf: leaf + rank, state)


# By what differs: the optimizer of a rank, the change of its state and of its parameters, and the name in the warning.
DIFFERENT = {
    "learning rate in the state": (lambda rank: optax.inject_hyperparams(optax.sgd)(0.1 + rank), None, "learning_rate"),
    "learning rate in the program": (lambda rank: optax.sgd(0.1 + rank), None, '"params.w"'),
    "momentum of one rank": (lambda rank: optax.sgd(0.1, momentum=0.9), with_momentum, "trace.w"),
    "bfloat16 moments": (lambda rank: optax.adam(0.1, mu_dtype=jnp.bfloat16), with_momentum, '"state.0.count"'),
    "keys": (lambda rank: optax.chain(optax.add_noise(0.1, 0.5, rank), optax.sgd(0.1)), None, "rng_key"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_jitted", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_a_warning_names_once_what_differs(what, is_jitted):
    make, change, name = DIFFERENT[what]
    optimizer = hvd.distribute(make(hvd.rank()), prefix=f"{what} {is_jitted}")
    params = {"w": jnp.arange(40.0)}
    state = optimizer.init(params)
    if change is not None:
        state = change(state, hvd.rank())
    update = jax.jit(optimizer.update) if is_jitted else optimizer.update
    with standard_error() as lines:
        for _ in range(3):
            updates, state = update({"w": jnp.ones(40)}, state, params)
            params = jax.block_until_ready(optax.apply_updates(params, updates))
    assert len(lines) == (hvd.rank() == 0), lines
    assert all(name in line and "hvd.broadcast_parameters" in line for line in lines), lines


@pytest.mark.ranks(2)
def test_replicas_that_agree_cause_no_warning_also_under_grad_and_vmap_and_after_join():
    optimizer = hvd.distribute(optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(0.1)))
    params = {"w": jnp.arange(5.0), "c": jnp.ones(2, jnp.complex64), "h": jnp.ones(2, jnp.float16)}
    gradients = jax.tree.map(lambda leaf: leaf * hvd.rank(), params)
    state = optimizer.init(params)

    def changed(scale):
        updates, _ = optimizer.update(jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradients), state)
        return jnp.sum(updates["w"])

    with standard_error() as lines:
        jax.jit(optimizer.update)(gradients, state, params)
        assert jnp.isfinite(jax.jit(jax.grad(changed))(jnp.float32(2.0)))
        assert jax.jit(jax.vmap(changed))(jnp.arange(3.0)).shape == (3,)
        if hvd.rank() == 1:
            with_more = jax.jit(optimizer.update)(gradients, state, params)
            jax.block_until_ready(with_more)
        hvd.join()
    assert not lines


@pytest.mark.ranks(2)
def test_parameters_by_which_gradients_are_taken_are_compared():
    gradient = hvd.grad(lambda params, x: jnp.sum(params["w"] * x), prefix="compared")
    with standard_error() as lines:
        jax.block_until_ready(jax.jit(gradient)({"w": jnp.full(3, hvd.rank() + 1.0)}, jnp.ones(3)))
    assert len(lines) == (hvd.rank() == 0)
    assert all('"params.w"' in line for line in lines)
