"""Whatever has a program in it may come twice in a program with operations in it: its calls have names of their own."""

import inspect

import numpy as np
import pytest
from harness.exact import require_equal
from harness.frameworks import on_demand

jax = on_demand("jax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")


def busy(x, rounds):
    """X itself, after so much work."""
    work = jax.lax.fori_loop(0, rounds, lambda _, m: jnp.tanh(m @ m) * 0.01, jnp.ones((100, 100)) * x[0])
    return x + 0 * work[0, 0]


def require_own_results(called):
    """Of two calls, of which each rank has another one ready first, and of one that takes the result of the first."""

    @jax.jit
    def program(a, b, rounds_a, rounds_b):
        first, second = called(busy(a, rounds_a)), called(busy(b, rounds_b))
        return first, second, called(first)

    rank, size = hvd.rank(), hvd.size()
    rounds = (100, 1) if rank == 0 else (1, 100)
    total = size * (size + 1) / 2
    for _ in range(2):
        with hvd.errors():
            results = program(jnp.full(4, rank + 1.0), jnp.full(4, 100 * (rank + 1.0)), *rounds)
            for result, right in zip(results, (total, 100 * total, size * total), strict=True):
                require_equal(result, np.full(4, right, result.dtype))


def vmapped(function):
    mapped = jax.custom_batching.custom_vmap(function)
    mapped.def_vmap(lambda size, batched, x: (function(x), True))
    return mapped


def solved(function):
    """The solution of x = function(b), by a solver that is given function and called with b."""
    solve = lambda matvec, b: function(b)  # noqa: E731
    return lambda b: jax.lax.custom_linear_solve(lambda x: x, b, solve, symmetric=True)


def linear(function):
    return lambda x: jax.custom_derivatives.linear_call(lambda _, y: function(y), lambda _, y: y, (), x)


def with_jvp(function):
    differentiable = jax.custom_jvp(function)
    differentiable.defjvp(lambda primals, tangents: (differentiable(*primals), tangents[0]))
    return differentiable


def with_vjp(function):
    differentiable = jax.custom_vjp(function)
    differentiable.defvjp(lambda x: (function(x), None), lambda _, gradient: (gradient,), optimize_remat=True)
    return differentiable


def on_a_mesh(function):
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map
    takes = inspect.signature(shard_map).parameters
    unchecked = {"check_rep": False} if "check_rep" in takes else {"check_vma": False}
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    return shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, **unchecked)


def partitioned(function):
    from jax.experimental.custom_partitioning import custom_partitioning

    whole = custom_partitioning(function)
    own = lambda mesh, arguments, result: arguments[0].sharding  # noqa: E731
    takes = inspect.signature(whole.def_partition).parameters
    whole.def_partition(
        partition=lambda mesh, arguments, result: (mesh, function, own(mesh, arguments, result), (own,)),
        infer_sharding_from_operands=own,
        **({"sharding_rule": "i -> i"} if "sharding_rule" in takes else {}),
    )
    return whole


def in_a_loop(function):
    return lambda x: jax.lax.scan(lambda carry, _: (function(carry), None), x, None, length=1)[0]


KINDS = {
    "custom_vmap": vmapped,
    "custom_linear_solve": solved,
    "linear_call": linear,
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "composite": lambda function: jax.lax.composite(function, "test.sum"),
    "shard_map": on_a_mesh,
    "custom_partitioning": partitioned,
    "checkpoint": lambda function: jax.checkpoint(function),
    "scan": in_a_loop,
    "cond": lambda function: lambda x: jax.lax.cond(x[0] > 0, function, lambda x: x, x),
    "while": lambda function: lambda x: jax.lax.fori_loop(0, 1, lambda _, y: function(y), x),
    "jit in jit": lambda function: jax.jit(lambda x: jax.jit(function)(x)),
    "closed_call": lambda function: lambda x: jax.lax.map(function, x[None])[0],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_of_every_kind_may_come_twice(kind):
    if kind == "composite" and not hasattr(jax.lax, "composite"):
        return
    require_own_results(jax.jit(KINDS[kind](lambda x: hvd.allreduce(x, hvd.Sum, name=f"twice.{kind}"))))


@pytest.mark.ranks(2, fast=[2])
def test_a_jitted_solver_may_be_called_twice():
    from jax.scipy.sparse.linalg import cg

    rank = hvd.rank()
    solve = jax.jit(lambda b: cg(lambda v: hvd.allreduce(v * (rank + 1), hvd.Sum, name="matvec"), b, maxiter=2)[0])
    with hvd.errors():
        first, second = jax.jit(lambda a, b: (solve(a), solve(solve(b))))(jnp.full(4, 6.0), jnp.full(4, 9.0))
        require_equal(first, np.full(4, 2.0, first.dtype))  # the matrix is 1 + 2 times the identity
        require_equal(second, np.full(4, 1.0, first.dtype))


def unknown_primitive():
    """One of a library that JAX learns of after ringtrain: its rule compiles the program, and keeps what it has."""
    from jax.extend.core import Primitive, jaxpr_as_fun
    from jax.interpreters import mlir

    primitive = Primitive("test_unknown")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x, *, of_library: of_library["program"].out_avals)
    rule = mlir.lower_fun(lambda x, of_library: jaxpr_as_fun(of_library["program"])(x), multiple_results=True)
    mlir.register_lowering(primitive, rule)
    return primitive


class Hashable(dict):
    def __hash__(self):
        return id(self)

    def __lt__(self, other):
        return False


@pytest.mark.ranks(2)
def test_a_primitive_of_another_library_may_come_twice():
    primitive = unknown_primitive()
    program = Hashable(program=jax.make_jaxpr(lambda x: hvd.allreduce(x, hvd.Sum, name="unknown"))(jnp.ones(4)))
    require_own_results(lambda x: primitive.bind(x, of_library=program)[0])


def rules():
    """All primitives for which JAX has a rule of compilation on CPUs, and their rules."""
    from jax._src.interpreters import mlir

    entries = {**mlir._lowerings, **mlir._platform_specific_lowerings["cpu"]}
    return {primitive: getattr(entry, "rule", entry) for primitive, entry in entries.items()}


@pytest.mark.ranks(1)
def test_each_primitive_that_may_hold_a_program_is_compiled_anew():
    """A primitive that holds one has several results, so the rule takes in those that nobody has thought of."""
    import jax._src.interpreters.mlir as of_jax
    import jax.experimental.checkify
    import jax.experimental.custom_partitioning

    from ringtrain.jax import regions

    jax.make_jaxpr(hvd.allreduce)(jnp.ones(1))  # from now on the primitives of these modules are known
    several = {primitive for primitive in primitives() if primitive.multiple_results}
    seen = {primitive for name in KINDS for primitive in holders_in(KINDS[name])}
    assert seen <= several, {primitive.name for primitive in seen - several}
    assert not {primitive.name for primitive in seen} & set(regions._LEAVES)
    if hasattr(of_jax, "_uncacheable_primitives"):
        cached = {primitive.name for primitive in several - of_jax._uncacheable_primitives}
        assert cached <= set(regions._LEAVES), cached - set(regions._LEAVES)


def primitives():
    """All for which JAX has a rule of compilation on CPUs."""
    from jax._src.interpreters import mlir

    return {*mlir._lowerings, *mlir._platform_specific_lowerings["cpu"]}


def holders_in(kind):
    """The primitives that hold a program in a program of that kind, as JAX finds them itself."""
    from jax._src import core

    if kind is KINDS["composite"] and not hasattr(jax.lax, "composite"):
        return
    left = [jax.make_jaxpr(kind(jnp.sin))(jnp.ones(4)).jaxpr]
    while left:
        for equation in left.pop().eqns:
            inner = list(core.jaxprs_in_params(equation.params))
            left += inner
            if inner:
                yield equation.primitive
