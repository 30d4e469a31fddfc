"""Operations in programs that JAX compiles for a real GPU: exact, in the order of XLA's stream."""

import time

import pytest
from harness.frameworks import on_demand
from real_gpus import need_gpu

need_gpu()
jax = on_demand("jax")
jnp = on_demand("jax.numpy")
optax = on_demand("optax")
hvd = on_demand("ringtrain.jax")
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # ranks may share a GPU, of which JAX would take most


def need_jax_on_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX finds no GPU that it can use")


@pytest.mark.ranks(1, 2, 3, env=SHARED, timeout=300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_operations_in_a_compiled_program(dtype):
    need_jax_on_gpu()
    rank, size = hvd.rank(), hvd.size()

    @jax.jit
    def program(x):
        sums = hvd.allreduce({"all": 2 * x, "few": x[:3]}, hvd.Sum, name="sums")
        rows = hvd.allgather(x[:2], name="rows")
        root = hvd.broadcast(x, size - 1, name="root")
        part = hvd.reducescatter(jnp.tile(x[:2], (size, 1)), hvd.Sum, name="part")
        exchanged = hvd.alltoall(jnp.full(size, x[0]), name="exchanged")
        return sums, rows, root, part, 1 + exchanged

    total = size * (size + 1) // 2
    for _ in range(3):
        sums, rows, root, part, exchanged = program(jnp.full(1000, rank + 1, dtype))
        assert (sums["all"] == 2 * total).all() and sums["few"].tolist() == [total] * 3
        assert rows.tolist() == [one + 1 for one in range(size) for _ in range(2)]
        assert (root == size).all()
        assert part.tolist() == [[total] * 2]
        assert exchanged.tolist() == [one + 2 for one in range(size)]


@pytest.mark.ranks(1, 2, env=SHARED, timeout=300)
def test_a_step_takes_the_mean_gradient():
    need_jax_on_gpu()
    rank, size = hvd.rank(), hvd.size()
    params = hvd.broadcast_parameters({"w": jnp.full((64, 64), float(rank)), "b": jnp.zeros(3)}, root_rank=0)
    optimizer = hvd.distribute(optax.sgd(1.0))
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, scale):
        gradients = jax.grad(lambda p: scale * (p["w"].sum() + 2 * p["b"].sum()))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(4):
        params, state = step(params, state, jnp.float32(rank + 1))
    mean = (size + 1) / 2
    assert (params["w"] == -4 * mean).all() and (params["b"] == -8 * mean).all()
    hvd.check_replicas(params)


@pytest.mark.ranks(1, env=SHARED, timeout=300)
def test_the_host_does_not_wait_for_the_gpu():
    need_jax_on_gpu()

    @jax.jit
    def program(x):
        for _ in range(40):  # not a loop of XLA, whose condition keeps the host
            x = jnp.tanh(x @ x)
        return hvd.allreduce(x, hvd.Sum, name="slow")

    def seconds_of_submission_and_all(x):
        began_s = time.monotonic()
        result = program(x)
        submitted_s = time.monotonic() - began_s
        result.block_until_ready()
        return submitted_s, time.monotonic() - began_s

    x = jnp.zeros((8192, 8192))
    seconds_of_submission_and_all(x)
    submitted_s, all_s = seconds_of_submission_and_all(x)
    assert all_s > 0.05
    assert submitted_s < all_s / 2


@pytest.mark.ranks(2, env=SHARED, timeout=300)
def test_errors_come_out_of_the_program():
    need_jax_on_gpu()
    rank = hvd.rank()
    summed = jax.jit(lambda x: hvd.allreduce(x, name="other"))
    with pytest.raises(Exception, match=r'MismatchError: allreduce "other": rank 0 sent float32\[3\]'):
        jax.block_until_ready(summed(jnp.ones(3 + rank)))
    optimizer = hvd.distribute(optax.sgd(0.1), nan_check=True)
    gradients = {"v": jnp.ones(2), "w": jnp.full(3, jnp.nan if rank == 1 else 1.0)}
    update = jax.jit(lambda gradients, state: optimizer.update(gradients, state, gradients))
    with pytest.raises(Exception, match='the gradient of "w" is NaN or infinite on rank 1'):
        jax.block_until_ready(update(gradients, optimizer.init(gradients)))
    assert (hvd.allreduce(jnp.full(3, float(rank)), hvd.Sum) == 1).all()
