"""Optimizers over all ranks: N ranks do what one does on the whole batch, however the steps are made."""

import itertools
import re
import textwrap
from functools import partial
from pathlib import Path

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

BATCH = 12


def new_params():
    random = np.random.default_rng(0)
    sizes = [6, 16, 3]
    return [
        {"weight": jnp.asarray(random.normal(size=(a, b)) / a, jnp.float32), "bias": jnp.zeros(b, jnp.float32)}
        for a, b in itertools.pairwise(sizes)
    ]


def batch_of(step):
    random = np.random.default_rng(step + 1)
    return random.normal(size=(BATCH, 6)).astype(np.float32), random.normal(size=(BATCH, 3)).astype(np.float32)


def loss_of(params, x, y):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    return ((x @ params[-1]["weight"] + params[-1]["bias"] - y) ** 2).mean()


def train(optimizer, steps, slices, gradients=None):
    """Parameters after some steps with some rows of each batch."""
    params = new_params()
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x, y):
        updates, state = optimizer.update((gradients or jax.grad)(loss_of)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    for number in range(steps):
        params, state = step(params, state, *(array[slices] for array in batch_of(number)))
    return params


def require_close(params, expected, by):
    for own, right in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(own) - np.asarray(right)).max() <= by


def my_rows():
    return slice(hvd.rank(), None, hvd.size())


@pytest.mark.ranks(1, 2, 3, fast=[2], slow=[3])
def test_ranks_with_parts_of_a_batch_do_what_one_does_with_all_of_it():
    alone = train(optax.adam(1e-2), 20, slice(None))
    params = train(hvd.distribute(optax.adam(1e-2)), 20, my_rows())
    hvd.check_replicas(params)
    require_close(params, alone, 5e-6)
    require_close(train(optax.adam(1e-2), 20, my_rows(), hvd.grad), alone, 5e-6)
    with_value = lambda loss: lambda *args: hvd.value_and_grad(loss)(*args)[1]  # noqa: E731
    require_close(train(optax.adam(1e-2), 20, my_rows(), with_value), alone, 5e-6)


@pytest.mark.ranks(2)
def test_accumulated_gradients_are_those_of_the_steps_together():
    sgd = optax.sgd(0.1)
    alone = train(optax.MultiSteps(sgd, 2), 8, slice(None))
    require_close(train(optax.MultiSteps(hvd.distribute(sgd), 2), 8, my_rows()), alone, 1e-6)
    averaging = hvd.distribute(sgd, backward_passes_per_step=2, average_aggregated_gradients=True)
    require_close(train(averaging, 8, my_rows()), alone, 1e-6)
    half = hvd.distribute(optax.sgd(0.05), backward_passes_per_step=2)
    require_close(train(half, 8, my_rows()), alone, 1e-6)


@pytest.mark.ranks(2)
def test_gradients_travel_in_16_bits_and_by_other_ops():
    alone = train(optax.sgd(0.1), 4, slice(None))
    in_16_bits = train(hvd.distribute(optax.sgd(0.1), compression=hvd.Compression.bf16), 4, my_rows())
    hvd.check_replicas(in_16_bits)
    require_close(in_16_bits, alone, 1e-2)
    require_close(train(hvd.distribute(optax.sgd(0.05), op=hvd.Sum), 4, my_rows()), alone, 1e-6)
    divided = hvd.distribute(optax.sgd(0.1), gradient_predivide_factor=2.0)
    require_close(train(divided, 4, my_rows()), alone, 1e-6)
    hvd.check_replicas(train(hvd.distribute(optax.sgd(0.1), op=hvd.Adasum), 4, my_rows()))


@pytest.mark.ranks(2, 3, fast=[2])
@pytest.mark.parametrize("make", [ringtrain.Compression.two_bit, ringtrain.Compression.one_bit])
def test_gradients_in_codes_have_the_bits_of_those_of_numpy(make):
    """The residuals of codes go with the next step, inside of jit, outside, and in an optimizer alike."""
    codes = make(0.5, force=True)
    optimizer = hvd.distribute(optax.sgd(1.0), compression=codes)
    jitted = jax.jit(lambda tree: hvd.allreduce(tree, name=f"{codes}.jit", compression=codes))
    update = jax.jit(optimizer.update)
    own = np.random.default_rng(hvd.rank())
    state = optimizer.init({"weight": jnp.zeros((20, 30), jnp.float32)})
    for _ in range(20):
        gradient = own.standard_normal((20, 30)).astype(np.float32)
        expected = ringtrain.allreduce(gradient, name=f"{codes}.numpy", compression=codes)
        tree = {"weight": jnp.asarray(gradient)}
        require_equal(jitted(tree)["weight"], expected)
        require_equal(hvd.allreduce(tree, name=f"{codes}.eager", compression=codes)["weight"], expected)
        updates, state = update(tree, state)
        require_equal(updates["weight"], -expected)


@pytest.mark.ranks(2)
def test_arrays_that_cannot_travel_in_codes_are_refused_and_derivatives_travel_in_full():
    codes = hvd.Compression.two_bit(0.5, force=True)
    with pytest.raises(ValueError, match="needs a name, under which it keeps what it leaves out"):
        jax.jit(lambda x: hvd.allreduce(x, compression=codes))(jnp.ones(3, jnp.float32))
    with pytest.raises(ValueError, match=r'allreduce "tree\.b": .* is for float32, not for int32'):
        tree = {"a": jnp.ones(3, jnp.float32), "b": jnp.ones(3, jnp.int32)}
        hvd.allreduce(tree, hvd.Sum, name="tree", compression=codes)
    with pytest.raises(ValueError, match="all ranks of the process set are on one"):
        hvd.allreduce(jnp.ones(3, jnp.float32), name="host", compression=hvd.Compression.two_bit())
    loss = lambda x: hvd.allreduce(x, hvd.Sum, "differentiated", compression=codes).sum() * 0.125  # noqa: E731
    require_equal(jax.jit(jax.grad(loss))(jnp.zeros(3, jnp.float32)), np.full(3, 0.25, np.float32))


@pytest.mark.ranks(2)
def test_an_optimizer_may_want_more_than_gradients():
    optimizer = hvd.distribute(optax.chain(optax.clip_by_global_norm(1.0), optax.polyak_sgd(0.1)))
    params = {"weight": jnp.ones(3)}
    gradients = {"weight": jnp.full(3, float(hvd.rank()))}
    update = jax.jit(lambda g, s, p: optimizer.update(g, s, p, value=jnp.float32(1.0)))
    updates, _ = update(gradients, optimizer.init(params), params)
    hvd.check_replicas(updates)
    assert float(updates["weight"][0]) < 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_jitted", [True, False], ids=["jit", "eager"])
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks(is_jitted):
    optimizer = hvd.distribute(optax.sgd(0.1), nan_check=True)
    params = {"weight": jnp.ones(3), "bias": jnp.ones(2), "steps": jnp.ones(1)}
    update = jax.jit(optimizer.update) if is_jitted else optimizer.update
    good = {name: jnp.full(value.shape, hvd.rank() + 1.0) for name, value in params.items()}
    bad = {**good, "weight": good["weight"].at[1].set(jnp.nan)} if hvd.rank() == 1 else good
    for _ in range(2):
        with raises(hvd.NonFiniteError) as seen:
            jax.block_until_ready(update(bad, optimizer.init(params), params))
        assert seen.text.startswith('the gradient of "weight" is NaN or infinite on rank 1; no rank has updated')
        updates, _ = update(good, optimizer.init(params), params)
        np.testing.assert_allclose(updates["weight"], np.full(3, -0.15), rtol=1e-6)


@pytest.mark.ranks(2)
def test_anything_but_an_optimizer_of_optax_is_refused():
    with pytest.raises(TypeError, match="dict is not an optimizer of optax"):
        hvd.distribute({})
    for bad in ({"backward_passes_per_step": 0}, {"gradient_predivide_factor": 0.0}):
        with pytest.raises(ValueError, match="must be"):
            hvd.distribute(optax.sgd(0.1), **bad)
    with pytest.raises(ValueError, match="needs op=Average"):
        hvd.distribute(optax.sgd(0.1), op=hvd.Sum, gradient_predivide_factor=2.0)
    for bad, message in (
        ({"backward_passes_per_step": "2"}, "backward_passes_per_step must be an integer, not '2'"),
        ({"gradient_predivide_factor": "2"}, "gradient_predivide_factor must be a number, not '2'"),
        ({"op": "sum"}, "op must be one of .*, not 'sum'; write op=Sum"),
        ({"compression": "fp16"}, "not 'fp16'; write compression=Compression.fp16"),
        ({"process_set": [0]}, r"gradients: process_set must be a ProcessSet, not \[0\]"),
    ):
        with pytest.raises(TypeError, match=message):
            hvd.distribute(optax.sgd(0.1), **bad)
    assert hvd.DistributedOptimizer is hvd.distribute


@pytest.mark.ranks(2)
def test_parameters_and_states_are_those_of_the_root():
    rank = hvd.rank()
    optimizer = optax.adam(1e-2)
    params = jax.tree.map(lambda array: array + rank, new_params())
    state = optimizer.init(params)
    tree = {
        "params": params,
        "state": state,
        "key": jax.random.key(rank),
        "half": jnp.full(3, rank, jnp.bfloat16),
        "raw": jax.random.PRNGKey(rank),
        "numpy": np.full(2, rank, np.int64),
        "numbers": (rank, float(rank), bool(rank), None),
    }
    received = hvd.broadcast_parameters(tree, root_rank=1)
    assert jax.tree.structure(received) == jax.tree.structure(tree)
    hvd.check_replicas(received)
    require_equal(received["params"][0]["bias"], np.full(16, 1.0, np.float32))
    assert received["key"].dtype == jax.random.key(0).dtype
    assert (jax.random.key_data(received["key"]) == jax.random.key_data(jax.random.key(1))).all()
    assert received["half"].dtype == jnp.bfloat16 and received["raw"].dtype == np.uint32
    assert isinstance(received["numpy"], np.ndarray) and received["numbers"] == (1, 1.0, True, None)
    require_equal(tree["half"], np.full(3, rank, jnp.bfloat16))
    with pytest.raises(TypeError, match=r'params\["name"\] is str, no array'):
        hvd.broadcast_parameters({"name": "text"})


@pytest.mark.ranks(2)
def test_weak_types_stay_weak():
    """A strong float32 would make the parameters of bfloat16 that it is added to float32."""
    tree = {
        "number": jnp.asarray(0.5 + hvd.rank()),
        "vector": jnp.full(3, 1.0 + hvd.rank()),
        "count": jnp.asarray(hvd.rank()),
        "empty": jnp.full(0, 1.0),
        "strong": jnp.float32(hvd.rank()),
    }
    received = hvd.broadcast_parameters(tree, root_rank=1)
    state = hvd.elastic.JaxState(tree=received)
    state.commit()
    state.restore()
    for found in (received, state.tree):
        assert {name: one.weak_type for name, one in found.items()} == {name: name != "strong" for name in tree}
        assert {name: one.dtype for name, one in found.items()} == {name: one.dtype for name, one in tree.items()}
        assert found["number"] == 1.5 and found["vector"].tolist() == [2.0] * 3 and found["count"] == 1
        assert (found["number"] * jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.ranks(2)
def test_ranks_that_differ_are_found():
    params = new_params()
    hvd.check_replicas(params)
    params[1]["weight"] = params[1]["weight"].at[2, 1].add(float(hvd.rank()))
    with pytest.raises(hvd.ReplicaError, match=r'parameter "1.weight" is not the same on all ranks: rank 1 differs'):
        hvd.check_replicas(params)


@pytest.mark.ranks(2)
def test_objects_are_sent_as_they_are_everywhere():
    assert hvd.broadcast_object({"epoch": hvd.rank()}, root_rank=1) == {"epoch": 1}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("page", ["jax.md", "index.md"])
def test_the_code_of_the_pages_about_jax_runs(page):
    text = (Path(__file__).resolve().parents[3] / "docs" / page).read_text()
    (code,) = re.findall(r"^ *```python\n( *import jax\n.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    names = {}
    exec(textwrap.dedent(code).replace("hvd.init()\n", ""), names)  # the harness has done it
    hvd.check_replicas(names["params"])
    assert (names["params"]["weight"] != 0).any()
