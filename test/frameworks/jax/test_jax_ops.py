"""Operations on JAX arrays and pytrees, inside and outside of jit: every dtype, what is refused, and how."""

import time
from pathlib import Path

import numpy as np
import pytest
from exact_jax import OPS, WAYS, own_data
from harness.exact import (
    COMPLEX,
    DTYPE_OF_EACH_SIZE,
    DTYPES,
    complex_data_of_ranks,
    data_of_ranks,
    reference,
    require_equal,
)
from harness.frameworks import on_demand

import ringtrain

jax = on_demand("jax")
jnp = on_demand("jax.numpy")
experimental = on_demand("jax.experimental")
hvd = on_demand("ringtrain.jax")

SHAPES = [(), (0,), (33, 17), (20_001,)]


def has(op, dtype):
    return not (op == "average" and dtype == np.bool_)


def check_allreduce(op, dtype, way):
    for shape in SHAPES if op == "sum" else SHAPES[2:3]:
        own, of_ranks = own_data(shape, dtype, op)
        result = WAYS[way](lambda array: hvd.allreduce(array, OPS[op]))(own)
        assert isinstance(result, jax.Array)
        require_equal(result, reference(op, of_ranks))
        require_equal(own, of_ranks[hvd.rank()])  # what went in is as it was


@pytest.mark.ranks(2, fast=[2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_every_dtype_and_every_op_is_exact(dtype, way):
    # To compile takes longer than all else here.
    for op in OPS if way == "eager" or dtype in DTYPE_OF_EACH_SIZE else ["sum"]:
        if has(op, dtype):
            check_allreduce(op, dtype, way)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("way", WAYS)
def test_an_allreduce_is_exact_on_any_number_of_ranks(way):
    for dtype in DTYPE_OF_EACH_SIZE:
        for op in ("sum", "average"):
            check_allreduce(op, dtype, way)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_complex_numbers_are_added_and_moved(dtype, way):
    of_ranks = complex_data_of_ranks(hvd.size(), (6, 3), dtype)
    own = jnp.asarray(of_ranks[hvd.rank()])
    do = WAYS[way]
    require_equal(do(lambda array: hvd.allreduce(array, hvd.Sum))(own), sum(of_ranks))
    require_equal(do(hvd.allgather)(own), np.concatenate(of_ranks))
    require_equal(do(lambda array: hvd.broadcast(array, 1))(own), of_ranks[1])
    require_equal(do(lambda array: hvd.reducescatter(array, hvd.Sum))(own), np.split(sum(of_ranks), 2)[hvd.rank()])
    with pytest.raises(ValueError, match="for real numbers"):
        do(lambda array: hvd.allreduce(array, hvd.Max))(own)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_unsigned_integers_above_the_signed_range(dtype, way):
    large = 2 ** (8 * np.dtype(dtype).itemsize - 1) + 5
    own = np.array([large + hvd.rank(), hvd.rank()], dtype)
    of_ranks = [np.array([large + rank, rank], dtype) for rank in range(2)]
    require_equal(WAYS[way](lambda array: hvd.allreduce(array, hvd.Sum))(own), of_ranks[0] + of_ranks[1])
    require_equal(WAYS[way](hvd.allgather)(own), np.concatenate(of_ranks))
    require_equal(WAYS[way](lambda array: hvd.allreduce(array, hvd.Max))(own), np.maximum(*of_ranks))
    require_equal(WAYS[way](lambda array: hvd.allreduce(array, hvd.Min))(own), np.minimum(*of_ranks))
    average = (of_ranks[0] + of_ranks[1]) // np.array(2, dtype)  # of the sum in this dtype, which wraps
    require_equal(WAYS[way](lambda array: hvd.allreduce(array, hvd.Average))(own), average)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_factors_and_process_sets_are_those_of_the_call(way):
    own, of_ranks = own_data((5,))
    alone = hvd.add_process_set([hvd.size() - 1])
    scaled = WAYS[way](lambda array: hvd.allreduce(array, hvd.Sum, None, 2.0, 4.0))(own)
    require_equal(scaled, 8 * reference("sum", of_ranks))
    if alone.included():
        require_equal(WAYS[way](lambda array: hvd.allreduce(array, process_set=alone))(own), of_ranks[-1])
    else:
        with pytest.raises(ValueError, match="this rank does not belong"):
            hvd.allreduce(own, process_set=alone)
    hvd.barrier()
    hvd.remove_process_set(alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_pytree_comes_back_as_it_went(way):
    def tree(rank):
        arrays = [data_of_ranks(2, shape, dtype, seed)[rank] for seed, (shape, dtype) in enumerate(SHAPES_IN_TREE)]
        return {"layers": [{"weight": arrays[0], "bias": arrays[1]}, (arrays[2], None)], "steps": arrays[3]}

    SHAPES_IN_TREE = [((8, 3), "float32"), ((3,), "float64"), ((), "float32"), ((2,), "int32")]
    result = WAYS[way](lambda own: hvd.allreduce(own, hvd.Sum, "tree"))(tree(hvd.rank()))
    assert jax.tree.structure(result) == jax.tree.structure(tree(0))
    for summed, first, second in zip(*map(jax.tree.leaves, (result, tree(0), tree(1))), strict=True):
        require_equal(summed, first + second)
    assert hvd.allreduce({}) == {} and hvd.grouped_allreduce([]) == []
    require_equal(hvd.grouped_allreduce([np.ones(2)], hvd.Sum)[0], np.full(2, 2.0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_by_integers_which_have_no_values_come_back_as_they_went(way):
    def gradients(params):
        return jax.grad(lambda params: (params["w"] * params["table"]).sum(), allow_int=True)(params)

    def sums(params):
        own = {"of one": gradients(params), "alone": gradients(params)["table"]}
        return hvd.allreduce(own, hvd.Sum, "sums"), hvd.broadcast(own, 0, "first"), hvd.allgather(own, "rows")

    params = {"w": jnp.ones(3, jnp.float32), "table": jnp.arange(3) + hvd.rank()}
    results = WAYS[way](sums)(params)
    for result in results:
        assert result["of one"]["table"].dtype == result["alone"].dtype == jax.dtypes.float0
        assert result["of one"]["table"].shape == result["alone"].shape == (3,)
    summed, first, rows = (result["of one"]["w"] for result in results)
    require_equal(summed, np.array([1, 3, 5], "f4"))
    require_equal(first, np.array([0, 1, 2], "f4"))
    require_equal(rows, np.array([0, 1, 2, 1, 2, 3], "f4"))
    own = gradients(params)
    same = hvd.broadcast_parameters(own)
    require_equal(same["w"], np.array([0, 1, 2], "f4"))
    hvd.check_replicas(same)


@pytest.mark.ranks(2)
def test_two_leaves_of_one_path_are_refused():
    with pytest.raises(ValueError, match=r"two arrays of this tree have the path \.a\.b"):
        hvd.allreduce({"a": {"b": np.ones(1)}, "a.b": np.ones(1)})


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_gathered_scattered_and_exchanged(way):
    size, rank, do = hvd.size(), hvd.rank(), WAYS[way]
    for dtype in DTYPE_OF_EACH_SIZE:
        own, of_ranks = own_data((2 * size, 5), dtype)
        require_equal(do(hvd.allgather)(own), np.concatenate(of_ranks))
        summed = reference("sum", of_ranks)
        require_equal(do(lambda array: hvd.reducescatter(array, hvd.Sum))(own), np.split(summed, size)[rank])
        exchanged = np.concatenate([np.split(array, size)[rank] for array in of_ranks])
        require_equal(do(hvd.alltoall)(own), exchanged)
        require_equal(do(lambda array: hvd.broadcast(array, size - 1))(own), of_ranks[-1])
    numbers = do(hvd.allgather)(jnp.float32(rank))
    require_equal(numbers, np.arange(size, dtype=np.float32))


@pytest.mark.ranks(3)
def test_outside_of_jit_ranks_may_have_different_rows():
    rank, size = hvd.rank(), hvd.size()
    own = jnp.full((rank + 1, 2), float(rank))
    require_equal(hvd.allgather(own)[:, 0], np.array([0.0, 1, 1, 2, 2, 2]))
    scattered = hvd.reducescatter(jnp.arange(4.0), hvd.Sum)
    require_equal(scattered, [np.array([0.0, 3.0]), np.array([6.0]), np.array([9.0])][rank])
    rows, received = hvd.alltoall(jnp.full((size * rank,), float(rank)), [rank] * size)
    require_equal(rows, np.array([1.0, 2.0, 2.0]))
    assert list(received) == [0, 1, 2]


@pytest.mark.ranks(2)
def test_inside_jit_splits_are_numbers():
    rank = hvd.rank()
    sent, received = ([1, 2], [1, 3]) if rank == 0 else ([3, 0], [2, 0])
    exchange = jax.jit(lambda array: hvd.alltoall(array, sent, received)[0])
    require_equal(exchange(jnp.full((3,), float(rank))), np.array([0.0, 1, 1, 1] if rank == 0 else [0.0, 0]))
    with pytest.raises(ValueError, match="splits need received_splits"):
        jax.jit(lambda array: hvd.alltoall(array, sent)[0])(jnp.ones(3))
    with pytest.raises(ValueError, match="3 rows cannot be split over 2 ranks"):
        jax.jit(hvd.reducescatter)(jnp.ones(3))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_keys_of_random_generators_are_sent(way):
    for own in (jax.random.key(hvd.rank()), jax.random.split(jax.random.key(hvd.rank(), impl="rbg"), 3)):
        of_root = WAYS[way](lambda key: hvd.broadcast(key, 1))(own)
        assert of_root.dtype == own.dtype and of_root.shape == own.shape
        assert (jax.random.key_data(hvd.broadcast(own, 1)) == jax.random.key_data(of_root)).all()
        assert (jax.random.key_data(own) == jax.random.key_data(of_root)).all() == (hvd.rank() == 1)
    with pytest.raises(TypeError, match="can be sent, but not averaged"):
        hvd.allreduce(jax.random.key(0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_compression_is_that_of_the_call(way):
    own, of_ranks = own_data((33,), "float32")
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = WAYS[way](lambda array, how=compression: hvd.allreduce(array, hvd.Sum, compression=how))(own / 3)
        sent = [(array / 3).astype(compression._dtype_name) for array in of_ranks]
        require_equal(result, sum(array.astype(np.float32) for array in sent).astype(sent[0].dtype).astype(np.float32))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_barrier_gives_back_what_waited(way):
    own, of_ranks = own_data((5,))
    waited = WAYS[way](lambda array: hvd.barrier_on({"a": array, "b": array + 1}))(own)
    require_equal(waited["a"], of_ranks[hvd.rank()])
    require_equal(waited["b"], of_ranks[hvd.rank()] + 1)


def on_host(function, *arrays):
    """Calls the function in a program, when it has the arrays."""
    return experimental.io_callback(function, jax.ShapeDtypeStruct((), jnp.float32), *arrays)


@pytest.mark.ranks(2)
def test_a_barrier_lets_one_rank_read_what_another_one_has_written(tmp_path):
    path = Path(hvd.broadcast_object(str(tmp_path / "number")))

    def write(number):
        time.sleep(0.2)
        path.write_text(str(number))
        return number

    @jax.jit
    def program(x):
        written = on_host(write, x) if hvd.rank() == 0 else x
        return on_host(lambda _: np.float32(path.read_text()), hvd.barrier_on(written))

    assert program(jnp.float32(7 - hvd.rank())) == 7


@pytest.mark.ranks(2)
def test_a_barrier_begins_a_time_on_all_ranks_together():
    late_s = 0.5

    @jax.jit
    def program(x):
        x = hvd.barrier_on(x)
        x, begun = hvd.barrier_on((x, on_host(lambda _: np.float32(time.monotonic() % 1000), x)))
        return begun, on_host(lambda _: np.float32(time.monotonic() % 1000), hvd.allreduce(x))

    if hvd.rank() == 1:
        time.sleep(late_s)
    begun, ended = program(jnp.float32(1))
    first, last = float(hvd.allreduce(begun, hvd.Min)), float(hvd.allreduce(begun, hvd.Max))
    assert last - first < late_s / 2 and begun <= ended


@pytest.mark.ranks(2)
def test_a_barrier_stands_in_backward_too():
    own, _ = own_data((3,))
    step = jax.jit(jax.value_and_grad(lambda x: (hvd.barrier_on({"x": x, "n": jnp.int32(2)}, "both")["x"] ** 2).sum()))
    value, gradient = step(own)
    require_equal(gradient, 2 * np.asarray(own))
    assert value == (np.asarray(own) ** 2).sum()
    assert "both.gradient" in step.lower(own).as_text()
    require_equal(jax.jit(jax.vmap(hvd.barrier_on))(own), np.asarray(own))


@pytest.mark.ranks(2)
def test_an_object_that_cannot_be_sent_is_a_type_error():
    for what in ("text", object(), jnp.ones(2, jnp.float8_e4m3fn)):
        with pytest.raises(TypeError):
            hvd.allreduce(what)
    for second, remedy in ((True, "; write op=Average"), (False, "; write op=Sum"), ("m", "; write name='m'"), (1, "")):
        with pytest.raises(TypeError, match=f"op, the second argument, must be one of.*, not {second!r}{remedy}$"):
            hvd.allreduce(jnp.ones(2), second)
    require_equal(hvd.allreduce(jnp.ones(2, "float32"), None, "m"), np.ones(2, "float32"))
    with pytest.raises(TypeError, match="compression must be a Compressor"):
        hvd.allreduce(jnp.ones(2), compression="fp16")
    with pytest.raises(TypeError, match="prescale_factor must be a number, not 'x'"):
        hvd.allreduce(jnp.ones(2), prescale_factor="x")
    with pytest.raises(TypeError, match="allreduce: priority must be an integer, not 'x'"):
        hvd.allreduce(jnp.ones(2), priority="x")
    with pytest.raises(TypeError, match=r"root_rank must be an integer in 0-1, not 0\.0"):
        hvd.broadcast(jnp.ones(2), 0.0)
    with pytest.raises(TypeError, match="op, the second argument, must be one of"):
        hvd.allreduce(jnp.ones(2), op="sum")
    with pytest.raises(ValueError, match="root_rank 7 is not one of the ranks 0-1"):
        hvd.broadcast(jnp.ones(2), 7)
    with pytest.raises(ValueError, match='names that begin with "<"'):
        hvd.allreduce(jnp.ones(2), name="<mine>")


@pytest.mark.ranks(2)
def test_plain_ringtrain_takes_arrays_of_jax_too():
    own, of_ranks = own_data((33, 5), "float32")
    result = ringtrain.allreduce(own, op=ringtrain.Sum)
    assert isinstance(result, jax.Array)
    require_equal(result, reference("sum", of_ranks))
    require_equal(ringtrain.allgather(own), np.concatenate(of_ranks))
    sums = ringtrain.grouped_allreduce([own, own + 1], op=ringtrain.Sum, compression=ringtrain.Compression.fp16)
    require_equal(sums[1], reference("sum", of_ranks) + 2)
    with pytest.raises(ValueError, match="arrays of JAX are read-only"):
        ringtrain.allreduce_(own)
    with pytest.raises(TypeError, match=r"use the operations of ringtrain\.jax"):
        jax.jit(ringtrain.allreduce)(own)
