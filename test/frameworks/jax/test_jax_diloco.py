"""DiLoCo for optax: compiled steps whose ranks train alone between outer steps."""

import pickle
import re

import numpy as np
import pytest
from harness.frameworks import on_demand

import ringtrain
from ringtrain import optim
from ringtrain.engine.compression import Compression

jax = on_demand("jax")
optax = on_demand("optax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")


def new_params(dtype="float32"):
    random = np.random.default_rng(0)
    return {
        "first": jnp.asarray(random.normal(size=(6, 9)), dtype),
        "bias": jnp.zeros(9, dtype),
        "last": [jnp.asarray(random.normal(size=(9, 2)), dtype)],
    }


def batch_of(step):
    return np.random.default_rng([step, hvd.rank()]).normal(size=(8, 6)).astype(np.float32)


def loss_of(params, inputs):
    return ((jnp.tanh(inputs @ params["first"] + params["bias"]) @ params["last"][0] - inputs[:, :2]) ** 2).mean()


def compiled(optimizer):
    @jax.jit
    def step(params, state, inputs):
        gradients = jax.grad(loss_of)(params, inputs)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, gradients

    return step


def require_same(params, expected):
    for own, right in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        own, right = np.asarray(own), np.asarray(right)
        assert own.dtype == right.dtype and (own == right).all()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("code", ("none", "int8"))
def test_jax_and_numpy_take_the_same_outer_steps(code):
    # The inner learning rate is a power of 2, so that both round the same updates.
    how = {"fragments": 2, "overlap": 1, "compression": getattr(Compression, code), "islands": "rank"}
    params = new_params()
    optimizer = hvd.DiLoCo(optax.sgd(0.5), params, 3, **how)
    state, step = optimizer.init(params), compiled(optimizer)
    arrays = [np.array(leaf) for leaf in jax.tree.leaves(params)]
    other = ringtrain.DiLoCo(optim.SGD(lr=0.5), arrays, 3, **how)
    for number in range(10):
        params, state, gradients = step(params, state, batch_of(number))
        params = optimizer.after_step(params)
        other.step(arrays, [np.asarray(leaf) for leaf in jax.tree.leaves(gradients)])
        require_same(params, arrays)
    assert (optimizer.inner_steps, optimizer.outer_steps) == (10, 3)
    hvd.check_replicas(optimizer.outer_step(params))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("islands", ["rank", [[0, 1]]], ids=str)
def test_unequal_batches_weigh_gradients_and_differences(islands):
    params, samples = {"w": jnp.ones(3)}, [6, 2][hvd.rank()]
    optimizer = hvd.DiLoCo(optax.sgd(1.0), params, 2, outer=optim.SGD(lr=1.0), islands=islands)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, weight):
        updates, state = optimizer.update({"w": jnp.full(3, 8.0 * hvd.rank())}, state, params, weight=weight)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        optimizer.set_weight(samples)
        params, state = step(params, state, samples)
        params = optimizer.after_step(params)
    assert params["w"].tolist() == [1 - 2 * 8.0 * 2 / 8] * 3
    with pytest.raises(ValueError, match="weight must be a finite number that is not negative, not -1"):
        optimizer.set_weight(-1)
    hvd.remove_process_set(optimizer._local_steps.islands.of_rank)


@pytest.mark.ranks(4)
def test_an_island_of_jax_averages_each_step():
    params = new_params()
    lists = [[0, 1], [2, 3]]
    optimizer = hvd.DiLoCo(optax.adam(0.1), params, 3, islands=lists)
    islands = [hvd.add_process_set(ranks) for ranks in lists]
    state, step = optimizer.init(params), compiled(optimizer)
    for number in range(3):
        if number:
            hvd.check_replicas(params, islands[hvd.rank() // 2])
            with pytest.raises(hvd.ReplicaError):
                hvd.check_replicas(params)
        params, state, _ = step(params, state, batch_of(number))
        params = optimizer.after_step(params)
    hvd.check_replicas(params)
    for one in (*islands, optimizer._local_steps.islands.of_rank):
        hvd.remove_process_set(one)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", (0, 6, 7))
def test_a_checkpoint_of_jax_resumes_exactly(steps):
    def train(optimizer, params, state, first, count):
        step = compiled(optimizer)
        for number in range(first, first + count):
            params, state, _ = step(params, state, batch_of(number))
            params = optimizer.after_step(params)
        return params, state

    how = {"fragments": 2, "overlap": 2, "compression": Compression.int4, "islands": "rank"}
    params = new_params()
    optimizer = hvd.DiLoCo(optax.adamw(0.1), params, 4, **how)
    params, state = train(optimizer, params, optimizer.init(params), 0, steps)
    on_host = [np.array(leaf) for leaf in jax.tree.leaves((params, state))]
    saved = pickle.dumps((on_host, optimizer.state_dict()))
    structure = jax.tree.structure((params, state))
    expected, _ = train(optimizer, params, state, steps, 10)

    leaves, outer = pickle.loads(saved)
    other = hvd.DiLoCo(optax.adamw(0.1), new_params(), 4, **how)
    other.load_state_dict(outer)
    again, its_state = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])
    again, _ = train(other, again, its_state, steps, 10)
    require_same(again, expected)


@pytest.mark.ranks(2)
def test_a_state_of_jax_goes_back_to_its_commit(tmp_path):
    def train(state, first, count):
        step = compiled(state.optimizer)
        for number in range(first, first + count):
            params, state.opt_state, _ = step(state.params, state.opt_state, batch_of(number))
            state.params = state.optimizer.after_step(params)
        return state.params

    def new_state():
        params = new_params()
        optimizer = hvd.DiLoCo(optax.adamw(0.1), params, 4, overlap=2, islands="rank")
        return hvd.elastic.JaxState(params=params, opt_state=optimizer.init(params), optimizer=optimizer)

    state = new_state()
    state.save_to(tmp_path / f"state.{hvd.rank()}", every_s=0)
    train(state, 0, 5)
    state.commit()
    expected = train(state, 5, 7)
    state.restore()
    require_same(train(state, 5, 7), expected)
    state.sync()
    hvd.check_replicas(state.params)
    state.optimizer.after_step(state.params)  # all ranks have the outer state of one


@pytest.mark.ranks(2)
def test_ranks_of_jax_keep_their_errors_and_a_newcomer_has_none():
    def new_state():
        params = new_params()
        how = {"overlap": 2, "compression": Compression.int4, "islands": "rank"}
        optimizer = hvd.DiLoCo(optax.sgd(0.5), params, 4, **how)
        return hvd.elastic.JaxState(params=params, opt_state=optimizer.init(params), optimizer=optimizer)

    def errors_of(state):
        return [one.tolist() for one in state.optimizer.state_dict()["errors"]["fragments"] if one is not None]

    def train(state):
        step = compiled(state.optimizer)
        for number in range(5):
            params, state.opt_state, _ = step(state.params, state.opt_state, batch_of(number))
            state.params = state.optimizer.after_step(params)
        state.commit()

    state, newcomer = new_state(), new_state()
    train(state)
    before = errors_of(state)
    assert len({str(one) for one in hvd.allgather_object(before)}) == 2
    state.sync()
    assert errors_of(state) == before
    own = state if hvd.rank() == 0 else newcomer
    own.sync()
    assert own.optimizer.inner_steps == 5 and own.optimizer.is_transferring
    assert errors_of(own) == (before if hvd.rank() == 0 else [])


@pytest.mark.ranks(2)
def test_bfloat16_parameters_of_jax_follow_the_mean():
    params = new_params("bfloat16")
    optimizer = hvd.DiLoCo(optax.sgd(0.5), params, 2, islands="rank")
    state, step = optimizer.init(params), compiled(optimizer)
    for number in range(4):
        params, state, _ = step(params, state, jnp.asarray(batch_of(number), "bfloat16"))
        params = optimizer.after_step(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    hvd.check_replicas(params)


@pytest.mark.ranks(1)
def test_arrays_that_are_not_due_stay_the_same_arrays():
    params = new_params()
    optimizer = hvd.DiLoCo(optax.sgd(0.5), params, 4, fragments=[[".bias"], [".first", ".last.0"]])
    kept = []
    for _ in range(4):
        after = optimizer.after_step(params)
        kept.append([after[name] is params[name] for name in ("bias", "first")])
        params = after
    assert kept == [[True, True], [False, True], [True, True], [True, False]]


@pytest.mark.ranks(1)
def test_bad_arguments_for_jax_are_refused():
    params = new_params()
    with pytest.raises(TypeError, match="Adam is not an optimizer of optax"):
        hvd.DiLoCo(optim.Adam(), params, 2)
    with pytest.raises(ValueError, match=re.escape('each parameter once, but ".first" is in none')):
        hvd.DiLoCo(optax.sgd(1.0), params, 2, fragments=[[".bias", ".last.0"]])
    optimizer = hvd.DiLoCo(optax.sgd(1.0), params, 2)
    with pytest.raises(ValueError, match="of DiLoCo already"):
        hvd.DiLoCo(optimizer, params, 2)
    with pytest.raises(TypeError, match="after_step: call it outside of jit"):
        jax.jit(optimizer.after_step)(params)
    with pytest.raises(ValueError, match="not those that DiLoCo was constructed with"):
        optimizer.after_step({"first": params["first"]})
    with pytest.raises(ValueError, match=re.escape("not the state of DiLoCo")):
        optimizer.load_state_dict({})
