"""Derivatives of the operations, and vmap: against what the ranks together compute on one rank."""

import numpy as np
import pytest
from exact_jax import WAYS, own_data
from harness.exact import require_equal
from harness.frameworks import on_demand

jax = on_demand("jax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")


def weights(shape, rank):
    return (np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + 1) * (rank + 1)


def gradient(operation, own, way):
    """Of a loss whose gradient by the result of the operation are the weights of this rank."""

    def loss(x):
        result = operation(x)
        return (result * weights(result.shape, hvd.rank())).sum()

    return WAYS[way](jax.grad(loss))(own)


@pytest.mark.ranks(2, 3, slow=[3])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_horovod(way):
    size, rank = hvd.size(), hvd.rank()
    own, _ = own_data((size, 2), "float64")
    of_ranks = [weights((size, 2), one) for one in range(size)]
    total = sum(of_ranks)
    require_equal(gradient(lambda x: hvd.allreduce(x, hvd.Sum), own, way), total)
    require_equal(gradient(lambda x: hvd.allreduce(x, hvd.Sum, None, 2.0, 3.0), own, way), 6 * total)
    np.testing.assert_allclose(gradient(hvd.allreduce, own, way), total / size, rtol=1e-15)
    np.testing.assert_allclose(
        gradient(lambda x: hvd.broadcast(x, 1), own, way), total / size if rank == 1 else 0 * total, rtol=1e-15
    )
    of_gathered = sum(weights((size * size, 2), one) for one in range(size)) / size
    np.testing.assert_allclose(gradient(hvd.allgather, own, way), np.split(of_gathered, size)[rank], rtol=1e-15)
    rows = np.concatenate([weights((1, 2), one) for one in range(size)])
    require_equal(gradient(lambda x: hvd.reducescatter(x, hvd.Sum), own, way), size * rows)
    require_equal(gradient(lambda x: hvd.reducescatter(x, hvd.Average), own, way), rows)
    back = np.concatenate([array[rank : rank + 1] for array in of_ranks])
    require_equal(gradient(hvd.alltoall, own, way), back)


@pytest.mark.ranks(2)
def test_a_gradient_that_a_rank_does_not_need_is_there_all_the_same():
    def loss(x, y):
        first, second = hvd.allreduce((x, y), hvd.Sum)
        return first.sum() if hvd.rank() == 0 else (first + second).sum()

    of_x, of_y = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.ones(2), jnp.ones(2))
    require_equal(of_x, np.full(2, 2.0))
    require_equal(of_y, np.full(2, 1.0))


@pytest.mark.ranks(2)
def test_derivatives_can_be_differentiated():
    own, of_ranks = own_data((3,), "float64")
    total = sum(of_ranks)
    of_all = lambda x: hvd.allreduce(x, hvd.Sum)  # noqa: E731
    value, tangent = jax.jit(lambda x, t: jax.jvp(of_all, (x,), (t,)))(own, own * 2)
    require_equal(value, total)
    require_equal(tangent, 2 * total)
    hessian = jax.jit(jax.hessian(lambda x: (of_all(x) ** 2).sum()))(own)
    require_equal(hessian, 8 * np.eye(3))
    linear = jax.linear_transpose(of_all, own)(own)[0]
    require_equal(linear, total)


@pytest.mark.ranks(2)
def test_an_operation_without_gradient_says_so():
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(TypeError, match=f"op={op.name} has no gradient; use jax.lax.stop_gradient"):
            jax.grad(lambda x, op=op: hvd.allreduce(x, op).sum())(jnp.ones(2))
    stopped = jax.grad(lambda x: (hvd.allreduce(jax.lax.stop_gradient(x), hvd.Max) * x).sum())(jnp.ones(2))
    require_equal(stopped, np.ones(2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_vmap_is_one_operation(way):
    size = hvd.size()
    own, of_ranks = own_data((3, 2 * size, 5), "float64")
    on_one = {
        "allreduce": (lambda x: hvd.allreduce(x, hvd.Sum), lambda arrays, rank: sum(arrays)),
        "maximum": (lambda x: hvd.allreduce(x, hvd.Max), lambda arrays, rank: np.maximum(*arrays)),
        "broadcast": (lambda x: hvd.broadcast(x, 1), lambda arrays, rank: arrays[1]),
        "allgather": (hvd.allgather, lambda arrays, rank: np.concatenate(arrays)),
        "reducescatter": (lambda x: hvd.reducescatter(x, hvd.Sum), lambda a, rank: np.split(sum(a), size)[rank]),
        "alltoall": (hvd.alltoall, lambda a, rank: np.concatenate([np.split(one, size)[rank] for one in a])),
        "barrier_on": (hvd.barrier_on, lambda arrays, rank: arrays[rank]),
    }
    for operation, expected in on_one.values():
        rows = [expected([array[row] for array in of_ranks], hvd.rank()) for row in range(3)]
        require_equal(WAYS[way](jax.vmap(operation))(own), np.stack(rows))
        moved = jnp.moveaxis(own, 0, 2)
        require_equal(WAYS[way](jax.vmap(operation, in_axes=2))(moved), np.stack(rows))
    with pytest.raises(TypeError, match="Adasum"):
        jax.vmap(lambda x: hvd.allreduce(x, hvd.Adasum))(own)


@pytest.mark.ranks(2)
def test_gradients_go_through_loops_remat_and_solvers():
    own, of_ranks = own_data((3,), "float64")
    average = (of_ranks[0] + of_ranks[1]) / 2
    grad = lambda function: jax.jit(jax.grad(lambda x: function(x).sum()))(own)  # noqa: E731
    remat = jax.checkpoint(lambda x: jnp.sin(hvd.allreduce(x)))
    np.testing.assert_allclose(grad(remat), np.cos(average), rtol=1e-12)
    scanned = grad(lambda x: jax.lax.scan(lambda c, _: (2 * hvd.allreduce(c), None), x, None, length=3)[0])
    require_equal(scanned, np.full(3, 8.0))
    branch = grad(lambda x: jax.lax.cond(x.sum() < 1e9, hvd.allreduce, lambda x: x, x))
    require_equal(branch, np.ones(3))

    @jax.custom_vjp
    def averaged_backwards(x):
        return x

    averaged_backwards.defvjp(lambda x: (x, None), lambda _, cotangent: (hvd.allreduce(cotangent, hvd.Sum),))
    require_equal(grad(lambda x: averaged_backwards(x) * (hvd.rank() + 1)), np.full(3, 3.0))
    solved = jax.jit(lambda b: jax.scipy.sparse.linalg.cg(lambda v: hvd.allreduce(2 * v), b)[0])
    np.testing.assert_allclose(solved(jnp.asarray(average)), average / 2, rtol=1e-6)
    of_solved = jax.jit(jax.grad(lambda b: solved(b).sum()))(jnp.asarray(average))
    np.testing.assert_allclose(of_solved, np.full(3, 0.5), rtol=1e-6)


@pytest.mark.ranks(2)
def test_named_operations_have_derivatives_with_names():
    own, of_ranks = own_data((3,), "float64")
    names = "ab" if hvd.rank() == 0 else "ba"

    def loss(x):
        results = {name: hvd.allreduce(x * ord(name), hvd.Sum, name=f"loss.{name}") for name in names}
        return (results["a"] * results["b"]).sum()

    result = jax.jit(jax.grad(loss))(own)
    require_equal(result, 4 * ord("a") * ord("b") * sum(of_ranks))
