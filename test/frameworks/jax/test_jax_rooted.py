"""Operations whose results differ between the ranks: gather, scatter and reduce by a root, and prefix sums."""

import numpy as np
import pytest
from exact_jax import WAYS, own_data
from harness.exact import require_equal
from harness.frameworks import on_demand

jax = on_demand("jax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")


@pytest.mark.ranks(1, 2, 3, fast=[2])
@pytest.mark.parametrize("way", WAYS)
def test_a_root_gets_the_rows_of_all_ranks(way):
    for root in range(hvd.size()):
        for shape in [(2, 3), (1,), (0, 4), (30_000,)]:
            own, all_ranks = own_data(shape, "int32")
            rows = WAYS[way](lambda x, root=root: hvd.gather(x, root))(own)
            right = np.concatenate(all_ranks)
            require_equal(rows, right if hvd.rank() == root else right[:0])
        pair = WAYS[way](lambda x, root=root: hvd.gather(x, root, name="pair"))(
            {"a": jnp.float32(1), "b": jnp.ones((2, 2))}
        )
        assert pair["a"].shape == (hvd.size() * (hvd.rank() == root),) and pair["b"].shape[1:] == (2,)


@pytest.mark.ranks(1, 2, 3, fast=[2])
@pytest.mark.parametrize("way", WAYS)
def test_a_root_gives_rows_to_all_ranks(way):
    size = hvd.size()
    for root in range(size):
        own, all_ranks = own_data((2 * size, 3), "int32")
        rows = WAYS[way](lambda x, root=root: hvd.scatter(x, root))(own)
        require_equal(rows, all_ranks[root][2 * hvd.rank() : 2 * hvd.rank() + 2])
    if size > 1:
        with pytest.raises(ValueError, match=f"scatter: {size + 1} rows cannot be split evenly over {size} ranks"):
            hvd.scatter(jnp.ones(size + 1), 0)
    with pytest.raises(ValueError, match=f"root_rank.* {size}"):
        hvd.gather(jnp.ones(2), size)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", WAYS)
def test_a_root_gets_what_all_ranks_reduce(way):
    for op in (hvd.Sum, hvd.Max):
        own, all_ranks = own_data((3, 2), "int32")
        result = WAYS[way](lambda x, op=op: hvd.reduce(x, 1, op))(own)
        right = np.sum(all_ranks, 0) if op is hvd.Sum else np.max(all_ranks, 0)
        require_equal(result, right.astype("int32") if hvd.rank() == 1 else np.asarray(own))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("way", WAYS)
def test_prefixes_of_all_ranks(way):
    rank = hvd.rank()
    for op, right in [(hvd.Sum, np.sum), (hvd.Product, np.prod), (hvd.Min, np.min), (hvd.Max, np.max)]:
        own, all_ranks = own_data((4,), "int64")
        result = WAYS[way](lambda x, op=op: hvd.scan(x, op))(own)
        require_equal(result, right(all_ranks[: rank + 1], axis=0))
    with pytest.raises(ValueError, match="scan: op must be Sum, Product, Min or Max, not Average"):
        hvd.scan(jnp.ones(2), hvd.Average)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", WAYS)
def test_their_gradients_are_those_of_the_sum_of_the_losses(way):
    rank, size = hvd.rank(), hvd.size()
    weight = rank + 1.0
    x = jnp.ones((size, 2))

    def gradient(function):
        return WAYS[way](jax.grad(lambda x: jnp.sum(function(x)) * weight))(x)

    require_equal(gradient(lambda x: hvd.gather(x, 1)), np.full((size, 2), 2.0))
    rows = np.repeat(np.arange(1.0, size + 1)[:, None], 2, 1)
    require_equal(gradient(lambda x: hvd.scatter(x, 1)), rows * (rank == 1))
    require_equal(gradient(lambda x: hvd.reduce(x, 1, hvd.Sum)), np.full((size, 2), 2.0 + weight * (rank != 1)))
    after = sum(range(rank + 1, size + 1))
    require_equal(gradient(hvd.scan), np.full((size, 2), float(after)))


@pytest.mark.ranks(2)
def test_they_are_used_under_vmap_and_in_loops():
    def step(x, _):
        rows = hvd.scatter(hvd.scan(jnp.concatenate([x, x])), 1)
        return hvd.reduce(rows, 0, hvd.Sum), rows.sum()

    x = np.arange(4)
    last, sums = jax.jit(lambda x: jax.lax.scan(step, x, None, length=2))(jnp.asarray(x))
    assert sums.tolist() == [12, 36]  # of 2 x, and of 4 x + 2 x
    require_equal(last, x * (12 if hvd.rank() == 0 else 6))
    batched = jax.jit(jax.vmap(lambda x: hvd.gather(hvd.scan(x), 0)))(jnp.ones((3, 2)))
    rows = np.tile([1.0, 1.0, 2.0, 2.0], (3, 1))
    require_equal(batched, rows if hvd.rank() == 0 else rows[:, :0])


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("way", WAYS)
def test_counts_of_rows_may_be_known_at_run_time(way):
    rank, size = hvd.rank(), hvd.size()
    exchange = WAYS[way](lambda x, splits: hvd.alltoall(x, splits, capacity=4))
    counts = [[(source + 2 * dest + 1) % 4 for dest in range(size)] for source in range(size)]
    rows = [np.arange(sum(of_rank) * 2.0).reshape(-1, 2) + 100 * source + 1 for source, of_rank in enumerate(counts)]
    pieces = [np.split(rows[source], np.cumsum(counts[source])[:-1])[rank] for source in range(size)]
    came, received = exchange(jnp.asarray(rows[rank]), jnp.asarray(counts[rank]))
    assert received.tolist() == [of_rank[rank] for of_rank in counts]
    right = np.zeros((4 * size, 2))
    right[: sum(map(len, pieces))] = np.concatenate(pieces)
    require_equal(came, right)
    gradient = jax.grad(lambda x: jnp.sum(exchange(x, jnp.asarray(counts[rank]))[0] * (rank + 1)))(
        jnp.asarray(rows[rank])
    )
    require_equal(gradient, np.repeat(np.arange(1.0, size + 1), counts[rank])[:, None] * np.ones(2))
    with pytest.raises(ValueError, match=r"splits \[5.* are above the capacity of 4 rows"):
        hvd.alltoall(jnp.ones(5 * size), [5] * size, capacity=4)
    with pytest.raises(ValueError, match="a capacity needs splits, and no received_splits"):
        hvd.alltoall(jnp.ones(size), capacity=4)


@pytest.mark.ranks(2)
def test_rows_beyond_the_capacity_stay_away():
    exchange = jax.jit(lambda x, splits: hvd.alltoall(x, splits, capacity=2))
    came, received = exchange(jnp.arange(6.0), jnp.array([3, 3]))
    assert (came.tolist(), received.tolist()) == ([0.0, 1, 0, 1] if hvd.rank() == 0 else [3.0, 4, 3, 4], [2, 2])
