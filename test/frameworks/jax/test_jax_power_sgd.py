"""Compression.powersgd for JAX: the same averages as for arrays, inside jit and outside, and the state of optax."""

import numpy as np
import pytest
from harness.exact import require_equal
from harness.frameworks import on_demand
from power_sgd_reference import Reference

import ringtrain
from ringtrain.engine.compression import Compression

jax = on_demand("jax")
optax = on_demand("optax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")


def new_params():
    return {"layers": [{"weight": jnp.zeros((24, 20), "f4")}], "bias": jnp.zeros(20, "f4")}


def gradients_of(step):
    """Those of all ranks: of the matrix, and of the vector."""
    random = np.random.default_rng(step)
    matrices = random.standard_normal((hvd.size(), 24, 20)).astype("f4")
    return matrices, np.full((hvd.size(), 20), step, "f4") + np.arange(hvd.size(), dtype="f4")[:, None] * 2


def own_tree(gradients):
    matrices, vectors = gradients
    return {"layers": [{"weight": jnp.asarray(matrices[hvd.rank()])}], "bias": jnp.asarray(vectors[hvd.rank()])}


def distributed(**options):
    how = {name: options.pop(name) for name in ("start_step", "warm_start") if name in options}
    return hvd.distribute(optax.sgd(1.0), compression=hvd.Compression.powersgd(2, **how), **options)


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("jits", (True, False), ids=("jit", "eager"))
@pytest.mark.parametrize("options", [{}, {"nan_check": True}], ids=str)
def test_optax_gets_the_averages_of_the_algorithm_of_the_paper(jits, options):
    optimizer, params = distributed(**options), new_params()
    reference = Reference(Compression.powersgd(2), "layers.0.weight", (24, 20), hvd.size())
    state = optimizer.init(params)
    update = jax.jit(optimizer.update) if jits else optimizer.update
    for step in range(4):
        gradients = gradients_of(step)
        updates, state = update(own_tree(gradients), state, params)
        average = -np.asarray(updates["layers"][0]["weight"])
        np.testing.assert_allclose(average, reference.step(gradients[0]), atol=2e-5)
        require_equal(-np.asarray(updates["bias"]), gradients[1].mean(0))
        (error,) = state.power_sgd.errors.values()
        np.testing.assert_allclose(error, reference.errors[hvd.rank()], atol=2e-5)
        for other in ringtrain.allgather(average[None]):
            require_equal(other, average)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"start_step": 1}, {"nan_check": True}], ids=str)
def test_gradients_by_integers_which_have_no_values_reach_the_optimizer(options):
    seen = []

    def see(updates, state, params=None):
        seen.append(updates["table"])
        return updates, state

    optimizer = optax.GradientTransformation(lambda params: (), see)
    how = hvd.Compression.powersgd(2, start_step=options.get("start_step", 0))
    optimizer = hvd.distribute(optimizer, compression=how, nan_check=options.get("nan_check", False))
    params = {**new_params(), "table": jnp.arange(3)}

    @jax.jit
    def update(own, state):
        return optimizer.update({**own, "table": np.zeros(3, jax.dtypes.float0)}, state, params)[1]

    state = optimizer.init(params)
    for step in range(2):
        state = update(own_tree(gradients_of(step)), state)
    assert seen and all(one.dtype == jax.dtypes.float0 and one.shape == (3,) for one in seen)


@pytest.mark.ranks(2)
def test_a_traced_weight_and_a_rank_whose_gradient_is_not_read():
    optimizer, params = distributed(), new_params()
    reference = Reference(Compression.powersgd(2), "layers.0.weight", (24, 20), 2)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step, weights in enumerate(([3, 1], [0, 2], [1, 1], [2, 1])):
        gradients, before = gradients_of(step), reference.errors.copy()
        tree = own_tree(gradients)
        if weights[hvd.rank()] == 0:
            tree = jax.tree_util.tree_map(lambda leaf: leaf * jnp.nan, tree)
        updates, state = update(tree, state, params, weight=jnp.float32(weights[hvd.rank()]))
        expected = reference.step(gradients[0], weights)
        np.testing.assert_allclose(-np.asarray(updates["layers"][0]["weight"]), expected, atol=2e-5)
        if weights[0] == 0:
            reference.errors[0] = before[0]


@pytest.mark.ranks(2)
def test_the_first_steps_travel_whole_and_passes_add_up():
    optimizer, params = distributed(start_step=2, backward_passes_per_step=2), new_params()
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(4):
        matrices, vectors = gradients_of(step)
        for _ in range(2):
            tree = own_tree((np.rint(4 * matrices), vectors))
            updates, state = update(tree, state, params)
        is_whole = (-np.asarray(updates["layers"][0]["weight"]) == 2 * np.rint(4 * matrices).mean(0)).all()
        assert is_whole == (step < 2)


@pytest.mark.ranks(2)
def test_a_nan_leaves_nothing_behind():
    optimizer, params = distributed(), new_params()
    reference = Reference(Compression.powersgd(2), "layers.0.weight", (24, 20), 2)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(3):
        gradients = gradients_of(step)
        if step == 1:
            broken = own_tree(gradients)
            broken["layers"][0]["weight"] = broken["layers"][0]["weight"].at[3, 4].set(jnp.nan if hvd.rank() else 1.0)
            updates, state = update(broken, state, params)
            assert np.isnan(np.asarray(updates["layers"][0]["weight"])).all()
        updates, state = update(own_tree(gradients), state, params)
        average = -np.asarray(updates["layers"][0]["weight"])
        np.testing.assert_allclose(average, reference.step(gradients[0]), atol=2e-5)


@pytest.mark.ranks(2)
def test_a_sum_one_array_and_new_random_numbers_in_each_step():
    optimizer = distributed(op=hvd.Sum, warm_start=False)
    params = jnp.zeros((30, 40))
    state = optimizer.init(params)
    gradient = jnp.outer(jnp.arange(30.0), jnp.ones(40))
    for _ in range(3):
        updates, state = optimizer.update(gradient * (1 + hvd.rank()), state, params)
        np.testing.assert_allclose(-np.asarray(updates), 3 * np.asarray(gradient), atol=2e-3)


@pytest.mark.ranks(2)
def test_ranks_that_begin_with_other_factors_get_an_error():
    optimizer = hvd.distribute(optax.sgd(1.0), compression=hvd.Compression.powersgd(2, random_seed=hvd.rank()))
    params = jnp.zeros((30, 40))
    with pytest.raises(ringtrain.DeadlockError, match="<Q, random_seed=1>"):
        optimizer.update(jnp.ones((30, 40)), optimizer.init(params), params)


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_functions_without_a_state_refuse_powersgd():
    compression = hvd.Compression.powersgd(4)
    with pytest.raises(TypeError, match=r"powersgd\(4\) is for a DistributedOptimizer"):
        hvd.value_and_grad(lambda x: x.sum(), compression=compression)
    with pytest.raises(TypeError, match=r"powersgd\(4\) is for a DistributedOptimizer"):
        hvd.allreduce(jnp.ones((100, 100)), compression=compression)
    with pytest.raises(ValueError, match="needs op=Average or op=Sum"):
        distributed(op=hvd.Adasum)
