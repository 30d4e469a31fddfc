"""Operations inside compiled programs: in any order, in loops and conditions, and at what cost."""

import functools
import sys

import numpy as np
import pytest
from exact_jax import own_data
from harness.exact import require_equal
from harness.frameworks import on_demand

import ringtrain._core as _core

jax = on_demand("jax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")


def sums(names, x):
    """Of x and of what is more than x, each by itself; in the order of the names."""
    return {name: hvd.allreduce(x + ord(name), hvd.Sum, name=name) for name in names}


def in_order(names, shape):
    return jax.jit(lambda x: [sums(names, x)[name] for name in sorted(names)])(jnp.full(shape, float(hvd.rank())))


@pytest.mark.ranks(2, fast=[2])
@pytest.mark.parametrize("shape", [(), (700, 50)], ids=str)
def test_ranks_may_have_the_operations_of_a_program_in_other_orders(shape):
    names = "abc" if hvd.rank() == 0 else "cba"
    for name, result in zip("abc", in_order(names, shape), strict=True):
        require_equal(result, np.full(shape, 2.0 * ord(name) + 1))


@pytest.mark.ranks(2)
def test_the_result_of_one_operation_may_be_taken_in_other_orders():
    def program(x):
        first = {}
        for name in "ab" if hvd.rank() == 0 else "ba":
            first[name] = hvd.allreduce(x + ord(name), hvd.Sum, name=name)
        second = {}
        for name in "ab" if hvd.rank() == 1 else "ba":
            second[name] = hvd.allreduce(first[name] * 2, hvd.Sum, name=f"second.{name}")
        return first["a"], first["b"], second["a"], second["b"]

    results = jax.jit(program)(jnp.zeros(2))
    a, b = 2.0 * ord("a"), 2.0 * ord("b")
    for result, expected in zip(results, (a, b, 4 * a, 4 * b), strict=True):
        require_equal(result, np.full(2, expected))


ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "NPROC": "1"}


@pytest.mark.ranks(2, env=ONE_THREAD)
@pytest.mark.parametrize("length", [1, pytest.param(5000, marks=pytest.mark.slow)])
def test_64_operations_end_with_one_thread(length):
    names = [f"n{number}" for number in range(64)]
    own = names if hvd.rank() == 0 else names[::-1]

    def program(x):
        results = {name: hvd.allreduce(x * int(name[1:]), hvd.Sum, name=name) for name in own}
        return [results[name] for name in names]

    for number, result in enumerate(jax.jit(program)(jnp.ones(length))):
        require_equal(result, np.full(length, 2.0 * number))


@pytest.mark.ranks(2)
def test_names_are_those_of_the_line_where_one_rank_compiles_twice():
    step = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum))
    if hvd.rank() == 1:  # a program that the other rank does not have
        step.lower(jnp.ones(3)).compile()
    require_equal(step(jnp.ones(2)), np.full(2, 2.0))
    twice = jax.jit(lambda x: [hvd.allreduce(x * number, hvd.Sum) for number in (1.0, 2.0)])
    require_equal(twice(jnp.ones(2))[1], np.full(2, 4.0))


@pytest.mark.ranks(2)
def test_loops_and_conditions_have_operations():
    own, of_ranks = own_data((4,), "float32", "average")
    average = (of_ranks[0] + of_ranks[1]) / 2

    def of_all(x):
        return hvd.allreduce(x)

    scan = jax.jit(lambda x: jax.lax.scan(lambda carry, _: (of_all(carry), carry.sum()), x, None, length=4)[0])
    require_equal(scan(own), average)
    loop = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, of_all(c[1])), (0, x))[1])
    require_equal(loop(own), average)
    condition = jax.jit(lambda x, is_taken: jax.lax.cond(is_taken, of_all, lambda x: -x, x))
    require_equal(condition(own, True), average)
    require_equal(condition(own, False), -of_ranks[hvd.rank()])
    after = jax.jit(lambda x: of_all(x) + jax.lax.cond(x.sum() < 1e9, of_all, lambda x: -x, x))
    require_equal(after(own), 2 * average)


def rounds_of(name, x):
    """A loop that adds up x over the ranks, and halves it, which is the same again where all ranks have the same."""
    return jax.lax.scan(lambda carry, _: (hvd.allreduce(carry, hvd.Sum, name) / 2, None), x, None, length=3)[0]


def branch_of(name, x):
    return jax.lax.cond(x.sum() > -1, lambda x: hvd.allreduce(x, hvd.Sum, name) / 2, lambda x: -x, x)


@pytest.mark.ranks(2, fast=[2])
@pytest.mark.parametrize("kind", [rounds_of, branch_of])
@pytest.mark.parametrize("rows", [3, 300])
def test_loops_and_conditions_keep_the_order_of_the_script_whatever_else_a_rank_computes(kind, rows):
    """XLA would begin with the second one where the first has to wait for more."""

    @jax.jit
    def program(x, y):
        before = hvd.allreduce(x, hvd.Sum, "before")
        extra = jnp.tanh(y @ y).sum() if hvd.rank() == 1 else jnp.float32(0)
        first = kind("first", x + 0 * extra)
        between = hvd.allreduce(y[0], hvd.Sum, "between")
        second = kind("second", y)
        return before, first, between, second, kind("third", x), extra

    x, y = jnp.ones((rows, rows)), jnp.ones(3)
    for _ in range(5):
        before, first, between, second, third, _ = program(x, y)
        for result, expected in zip((before, first, between, second, third), (2 * x, x, 2.0, y, x), strict=True):
            require_equal(result, np.asarray(expected))


@pytest.mark.ranks(2)
def test_an_inner_program_may_be_called_twice():
    inner = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum))
    outer = jax.jit(lambda x: inner(inner(x)))
    require_equal(outer(jnp.ones(3)), np.full(3, 4.0))


def busy(x, rounds):
    """The array, after some work that takes as long as one rank says."""
    matrix = jax.lax.fori_loop(0, rounds, lambda _, m: jnp.tanh(m @ m) * 0.01, jnp.ones((150, 150)) * x[0])
    return x + 0 * matrix[0, 0]


@functools.cache
def through_jvp():
    summed = jax.custom_jvp(lambda x, name: hvd.allreduce(x, hvd.Sum, name=name), nondiff_argnums=(1,))
    summed.defjvp(lambda name, primals, tangents: (summed(*primals, name), tangents[0]))
    return summed


@functools.cache
def through_vjp():
    summed = jax.custom_vjp(lambda x, name: hvd.allreduce(x, hvd.Sum, name=name), nondiff_argnums=(1,))
    summed.defvjp(lambda x, name: (summed(x, name), None), lambda name, _, gradient: (gradient,))
    return summed


INNER = {
    "plain": lambda x, name: hvd.allreduce(x, hvd.Sum, name=name),
    "jit": lambda x, name: jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, name=name))(x),
    "remat": lambda x, name: jax.checkpoint(lambda x: hvd.allreduce(x, hvd.Sum, name=name))(x),
    "custom_jvp": lambda x, name: through_jvp()(x, name),
    "custom_vjp": lambda x, name: through_vjp()(x, name),
    "cond": lambda x, name: jax.lax.cond(x[0] > 0, lambda x: hvd.allreduce(x, hvd.Sum, name=name), lambda x: x, x),
    "two": lambda x, name: hvd.allreduce((x, x + 1), hvd.Sum, name=name)[0],
}


@pytest.mark.ranks(1, 2, fast=[2])
@pytest.mark.parametrize(
    ("inner", "name"), [*((inner, None) for inner in INNER), ("plain", "same"), ("custom_vjp", "same")]
)
def test_a_jitted_function_may_be_called_twice_on_arrays_that_do_not_depend_on_each_other(inner, name):
    called = jax.jit(lambda x: INNER[inner](x, name))

    @jax.jit
    def program(a, b, rounds_of_a, rounds_of_b):
        return called(busy(a, rounds_of_a)), called(busy(b, rounds_of_b)), called(a * 1000)

    rounds = (100, 1) if hvd.rank() == 0 else (1, 100)  # each rank has another one ready first
    for _ in range(3):
        results = program(jnp.full(8, 1.0), jnp.full(8, 100.0), *rounds)
        for result, value in zip(results, (1, 100, 1000), strict=True):
            require_equal(result, np.full(8, value * hvd.size(), np.float64))


@pytest.mark.ranks(2)
def test_a_name_may_come_twice_in_a_program_and_in_both_branches_of_a_condition():
    @jax.jit
    def program(a, b, is_first):
        first, second = (hvd.allreduce(x, hvd.Sum, name="twice") for x in (a, b))
        branches = [lambda x, f=f: hvd.allreduce(x * f, hvd.Sum, name="branch") for f in (1, 10)]
        return first, second, jax.lax.cond(is_first, *branches, first)

    results = program(jnp.ones(2), jnp.full(2, 2.0), hvd.rank() == 0)
    for result, value in zip(results, (2, 4, 22), strict=True):
        require_equal(result, np.full(2, value, np.float64))


@pytest.mark.ranks(2)
def test_two_networks_may_have_one_update():
    optax = pytest.importorskip("optax")
    optimizer = hvd.distribute(optax.sgd(0.5))

    @jax.jit
    def update(parameters, state, x):
        gradient = jax.grad(lambda p: jnp.sum(p["weight"] * x))(parameters)
        changes, state = optimizer.update(gradient, state, parameters)
        return optax.apply_updates(parameters, changes), state

    @jax.jit
    def train(first, second, x):
        return update(*first, x), update(*second, 3 * x)

    parameters = {"weight": jnp.zeros(3)}
    nets = (parameters, optimizer.init(parameters)), (parameters, optimizer.init(parameters))
    for _ in range(3):
        nets = train(*nets, jnp.full(3, 2.0 * hvd.rank()))
    require_equal(nets[0][0]["weight"], np.full(3, -1.5))
    require_equal(nets[1][0]["weight"], np.full(3, -4.5))


@pytest.mark.ranks(2)
def test_donated_arrays_are_worked_on_in_place():
    step = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum), donate_argnums=0)
    own = jnp.ones(50_000)
    place = own.unsafe_buffer_pointer()
    result = step(own)
    require_equal(result, np.full(50_000, 2.0))
    assert own.is_deleted() and result.unsafe_buffer_pointer() == place


@pytest.mark.ranks(1, 2)
def test_an_array_is_as_it_was_after_its_operation():
    own, of_ranks = own_data((70, 3))
    both = jax.jit(lambda x: (hvd.allreduce(x, hvd.Sum), x * 1, hvd.broadcast(x, 0)))
    summed, same, of_root = both(own)
    require_equal(summed, sum(of_ranks))
    require_equal(same, of_ranks[hvd.rank()])
    require_equal(of_root, of_ranks[0])


@pytest.mark.ranks(2)
def test_a_program_of_32_bits_is_the_same():
    jax.config.update("jax_enable_x64", False)
    try:
        step = jax.jit(lambda x: (hvd.allreduce(x, hvd.Sum, None, 0.5), hvd.alltoall(x), hvd.allgather(x)))
        own = jnp.arange(4) + 10 * hvd.rank()
        summed, exchanged, gathered = step(own)
        assert summed.dtype == np.int32
        require_equal(exchanged, np.array([0, 1, 10, 11] if hvd.rank() == 0 else [2, 3, 12, 13], np.int32))
        require_equal(gathered, np.array([0, 1, 2, 3, 10, 11, 12, 13], np.int32))
    finally:
        jax.config.update("jax_enable_x64", True)


@pytest.mark.ranks(2)
def test_a_gradient_is_on_its_way_while_backward_goes_on():
    layers = [jnp.full((300, 300), 1e-3, jnp.float32) for _ in range(8)]

    def loss(layers, x):
        for weight in layers:
            x = jnp.tanh(x @ weight)
        return x.sum()

    step = jax.jit(lambda layers, x: hvd.allreduce(jax.grad(loss)(layers, x), name="backward"))

    def is_last_one_later():
        """The gradient of the last layer, which is made first, is done before that of the first is submitted."""
        jax.block_until_ready(step(layers, jnp.ones((2000, 300), jnp.float32)))
        times = {one["name"]: one for one in _core.last_operations()}
        return times["backward.7"]["ended_s"] < times["backward.0"]["submitted_s"]

    was_later = False
    for _ in range(100):  # in some of them another process has the core
        was_later |= is_last_one_later()
        if hvd.allreduce(jnp.array(was_later, jnp.int32), hvd.Min):
            break
    assert was_later


@pytest.mark.ranks(1, isolated=True)
def test_a_call_keeps_the_fast_road_of_jax():
    """A compiled call runs no Python at all; with an effect in its jaxpr it would take JAX's slow road, in Python."""
    hvd.init()
    step = jax.jit(lambda x: hvd.allreduce(x) + 1)
    own = jnp.ones(1)
    for _ in range(3):  # the first call compiles, the second finds the fast road
        step(own).block_until_ready()
    called = []
    sys.setprofile(lambda frame, event, what: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        result = step(own)
    finally:
        sys.setprofile(None)
    assert called == [] and step._cache_size() == 1
    assert result == 2
