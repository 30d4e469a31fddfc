"""weight= in JAX: inside and outside of jit, under grad, in optimizers of optax."""

import math
from functools import partial

import numpy as np
import pytest
from exact_jax import raises
from harness.exact import require_equal
from harness.frameworks import on_demand

import ringtrain

jax = on_demand("jax")
optax = on_demand("optax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")

BATCHES = {1: [8], 2: [6, 2], 3: [4, 2, 2]}


def require_all(result, value):
    require_equal(np.asarray(result), np.full(result.shape, value, result.dtype))


def weight_of_rank():
    return BATCHES[hvd.size()][hvd.rank()]


def mean(values):
    return sum(w * v for w, v in zip(BATCHES[hvd.size()], values, strict=True)) / 8


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("in_jit", [False, True], ids=["eager", "jit"])
def test_the_average_of_a_tree_by_weight(in_jit):
    tree = {"a": jnp.full(5, 8.0 * hvd.rank()), "b": [jnp.full((2, 3), 16.0 * hvd.rank(), jnp.bfloat16)]}

    def average(tree, weight):
        return hvd.allreduce(tree, weight=weight, name="tree")

    call = jax.jit(average) if in_jit else average
    for _ in range(3):
        result = call(tree, weight_of_rank())
        expected = mean([8.0 * rank for rank in range(hvd.size())])
        require_all(result["a"], expected)
        assert (result["b"][0] == 2 * expected).all()


@pytest.mark.ranks(2, 3)
def test_a_compiled_program_takes_a_new_weight_in_each_call():
    call = jax.jit(lambda x, weight: hvd.allreduce(x, weight=weight) + 1)
    for step in range(5):
        weights = [(rank + step) % 3 for rank in range(hvd.size())]
        weights[0] += 8 - sum(weights)
        result = call(jnp.full(4, 8.0 * hvd.rank()), jnp.int32(weights[hvd.rank()]))
        expected = 1 + sum(w * 8.0 * rank for rank, w in enumerate(weights)) / 8
        require_all(result, expected)
    assert call._cache_size() == 1


@pytest.mark.ranks(2, 3)
def test_the_gradient_of_an_average_by_weight():
    own = weight_of_rank()
    for jitted in (False, True):

        def loss(x, weight):
            return hvd.allreduce(x, weight=weight, name="loss").sum() * (hvd.rank() + 1.0)

        gradient = jax.grad(loss)
        gradient = jax.jit(gradient) if jitted else gradient
        result = gradient(jnp.ones(3), jnp.float32(own))
        # As for an average: of the mean of the losses, times the number of ranks.
        sums = sum(rank + 1.0 for rank in range(hvd.size()))
        require_all(result, sums * own / 8)
        _, tangent = jax.jvp(lambda x: hvd.allreduce(x, weight=own, name="jvp"), (jnp.ones(3),), (jnp.full(3, 8.0),))
        require_all(tangent, 8.0)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("in_jit", [False, True], ids=["eager", "jit"])
def test_a_scattered_average_by_weight(in_jit):
    size = hvd.size()
    tree = {"a": jnp.full((2 * size, 3), 8.0 * hvd.rank()), "b": [jnp.full(size, 16.0 * hvd.rank(), jnp.bfloat16)]}

    def average(tree, weight):
        return hvd.reducescatter(tree, weight=weight, name="tree")

    call = jax.jit(average) if in_jit else average
    for _ in range(3):
        result = call(tree, weight_of_rank())
        expected = mean([8.0 * rank for rank in range(size)])
        assert result["a"].shape == (2, 3)
        require_all(result["a"], expected)
        assert result["b"][0].tolist() == [2 * expected]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("in_jit", [False, True], ids=["eager", "jit"])
def test_the_gradient_of_a_scattered_average_by_weight(in_jit):
    def loss(x, weight):
        return hvd.reducescatter(x, weight=weight, name="rows").sum() * (hvd.rank() + 1.0)

    gradient = jax.jit(jax.grad(loss)) if in_jit else jax.grad(loss)
    result = gradient(jnp.ones(2 * hvd.size()), jnp.float32(weight_of_rank()))
    share = hvd.size() * weight_of_rank() / 8  # 1 for each rank where all weigh the same, as without weights
    expected = [(rank + 1.0) * share for rank in range(hvd.size()) for _ in range(2)]
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-6)


@pytest.mark.ranks(2)
def test_a_scattered_average_under_vmap():
    tensor = jnp.full((3, 4, 2), 4.0 * hvd.rank())
    result = jax.vmap(lambda x: hvd.reducescatter(x, weight=weight_of_rank(), name="batch"))(tensor)
    assert result.shape == (3, 2, 2)
    require_all(result, 1.0)
    with pytest.raises(TypeError, match="a weight under vmap is the same for the whole batch"):
        jax.vmap(lambda x, w: hvd.reducescatter(x, weight=w))(jnp.ones((3, 2)), jnp.ones(3))


@pytest.mark.ranks(2)
def test_under_vmap():
    result = jax.vmap(lambda x: hvd.allreduce(x, weight=weight_of_rank(), name="rows"))(
        jnp.full((3, 2), 4.0 * hvd.rank())
    )
    require_all(result, 1.0)
    with pytest.raises(TypeError, match="a weight under vmap is the same for the whole batch"):
        jax.vmap(lambda x, w: hvd.allreduce(x, weight=w))(jnp.ones((3, 2)), jnp.ones(3))


def samples_of(rank, step):
    count = BATCHES[hvd.size()][rank]
    return np.random.default_rng([rank, step]).integers(-4, 5, (count, 4)).astype("f4") * count


def loss_of(params, samples):
    return (samples @ params).mean()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("options", [{}, {"nan_check": True}, {"gradient_predivide_factor": 2.0}], ids=str)
def test_an_optimizer_of_optax_trains_as_one_process_with_all_samples(options):
    distributed = hvd.distribute(optax.sgd(0.5), **options)
    params, alone = jnp.ones(4), jnp.ones(4)
    state = distributed.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, samples, weight):
        updates, state = distributed.update(jax.grad(loss_of)(params, samples), state, params, weight=weight)
        return optax.apply_updates(params, updates), state

    for number in range(3):
        own = samples_of(hvd.rank(), number)
        params, state = step(params, state, own, len(own))
        everything = np.concatenate([samples_of(rank, number) for rank in range(hvd.size())])
        alone = alone - 0.5 * jax.grad(loss_of)(alone, everything)
    require_equal(np.asarray(params), np.asarray(alone))


def exact_loss_of(params, samples):
    """As `loss_of`; the sum comes first, so the division by 6 is exact, too."""
    return (samples.sum(0) @ params) / len(samples)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("in_jit", [False, True], ids=["eager", "jit"])
def test_averages_of_grad_are_those_of_one_process_with_all_samples(in_jit):
    of_batch = {"weight": lambda params, samples: len(samples)}
    for number, make in enumerate(
        [
            lambda: hvd.grad(exact_loss_of, prefix="grad", **of_batch),
            lambda: lambda *args: hvd.value_and_grad(exact_loss_of, prefix="both", **of_batch)(*args)[1],
            lambda: hvd.grad(exact_loss_of, prefix="number", weight=weight_of_rank()),
            lambda: lambda *args: hvd.grad(lambda *args: (exact_loss_of(*args), 7), has_aux=True, **of_batch)(*args)[0],
        ]
    ):
        call = jax.jit(make()) if in_jit else make()
        params = jnp.arange(4.0)
        everything = np.concatenate([samples_of(rank, number) for rank in range(hvd.size())])
        result = call(params, samples_of(hvd.rank(), number))
        require_equal(np.asarray(result), np.asarray(jax.grad(exact_loss_of)(params, everything)))


@pytest.mark.ranks(2)
def test_with_several_passes_and_in_a_chain():
    for wrap in (lambda one: one, lambda one: optax.chain(one, optax.scale(1.0))):
        distributed = wrap(hvd.distribute(optax.sgd(1.0), backward_passes_per_step=2))
        params = jnp.zeros(3)
        state = distributed.init(params)
        for _ in range(2):
            updates, state = distributed.update(jnp.full(3, 4.0 * hvd.rank()), state, params, weight=weight_of_rank())
        require_all(updates, -2.0)


@pytest.mark.ranks(2)
def test_weights_that_are_none():
    with pytest.raises(ValueError, match="weight must be a finite number that is not negative"):
        hvd.allreduce(jnp.ones(2), weight=-1)
    with pytest.raises(ValueError, match=r"weight must have the shape \(\), not \(2,\)"):
        jax.jit(lambda x, w: hvd.allreduce(x, weight=w))(jnp.ones(2), jnp.ones(2))
    with pytest.raises(ValueError, match="weight is for op=Average, not for op=Sum"):
        jax.jit(lambda x, w: hvd.allreduce(x, op=hvd.Sum, weight=w))(jnp.ones(2), 1.0)
    with pytest.raises(ValueError, match="weight is for floats, not for int32"):
        hvd.allreduce(jnp.ones(2, jnp.int32), weight=1)
    with pytest.raises(ValueError, match="reducescatter: weight must be a finite number that is not negative"):
        hvd.reducescatter(jnp.ones(2), weight=-1)
    with pytest.raises(ValueError, match="reducescatter: weight is for op=Average, not for op=Sum"):
        hvd.reducescatter(jnp.ones(2), op=hvd.Sum, weight=1)
    with pytest.raises(ValueError, match="weight is for floats, not for int32"):
        hvd.reducescatter(jnp.ones(2, jnp.int32), weight=1)
    with pytest.raises(ValueError, match="weight is for op=Average, not for op=Sum"):
        hvd.grad(loss_of, op=hvd.Sum, weight=1)
    for wrong in (math.nan, -1.0):
        with raises(ringtrain.MismatchError) as seen:
            call = jax.jit(lambda x, w: hvd.allreduce(x, weight=w, name="wrong"))
            jax.block_until_ready(call(jnp.ones(2), wrong if hvd.rank() else 1.0))
        assert 'allreduce "wrong": the weight of a rank is negative, NaN or infinite' in seen.text
        with raises(ringtrain.MismatchError) as seen:
            call = jax.jit(lambda x, w: hvd.reducescatter(x, weight=w, name="bad rows"))
            jax.block_until_ready(call(jnp.ones(2), wrong if hvd.rank() else 1.0))
        assert 'reducescatter "bad rows": the weight of a rank is negative, NaN or infinite' in seen.text
    with raises(ringtrain.MismatchError) as seen:
        hvd.allreduce(jnp.ones(2), weight=2 if hvd.rank() else None, name="some")
    assert 'allreduce "some": rank 0 gave no weight, rank 1 gave a weight' in seen.text
