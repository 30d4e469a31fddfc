"""Messages between two ranks inside compiled programs: values, order, derivatives, errors."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from drawn_programs import require_found, require_right
from exact_jax import WAYS, raises
from harness.clocks import require_within
from harness.exact import require_equal
from harness.frameworks import on_demand
from test_jax_programs import KINDS, busy

import ringtrain

jax = on_demand("jax")
jnp = on_demand("jax.numpy")
hvd = on_demand("ringtrain.jax")

DTYPES = ("bool", "int8", "uint32", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def values(shape, dtype, seed):
    return (jnp.arange(np.prod(shape, dtype=int)) * 3 + seed).reshape(shape).astype(dtype)


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", WAYS)
def test_a_ring_of_ranks_passes_arrays_on(way):
    rank, size = hvd.rank(), hvd.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in DTYPES:
        for shape in [(), (0,), (3,), (2, 70_000)]:
            shift = WAYS[way](lambda x: hvd.sendrecv(x, x, before, after))
            require_equal(shift(values(shape, dtype, rank)), np.asarray(values(shape, dtype, before)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_have_programs_of_their_own(way):
    def program(x):
        if hvd.rank() == 0:
            hvd.send(x * 2, 1)
            return hvd.recv(jnp.zeros(5, jnp.int32), 1, tag=3)
        doubled = hvd.recv(x, 0)
        hvd.send(jnp.arange(5, dtype=jnp.int32), 0, tag=3)
        return doubled

    x = jnp.full((2, 3), 4.0)
    require_equal(WAYS[way](program)(x), np.arange(5, dtype="int32") if hvd.rank() == 0 else np.full((2, 3), 8.0))


@pytest.mark.ranks(2)
def test_both_ranks_may_send_first_whatever_the_size():
    other = 1 - hvd.rank()
    for length in (3, 3_000_000):

        def program(x):
            hvd.send(x, other)
            return hvd.recv(x, other) + 1

        require_equal(jax.jit(program)(jnp.full(length, 1.0 + hvd.rank())), np.full(length, 2.0 + other))


@pytest.mark.ranks(2)
def test_pytrees_and_keys_of_random_generators_travel():
    rank = hvd.rank()
    tree = {"a": jnp.arange(3) + rank, "b": [jnp.ones((2, 2)) * rank, jax.random.key(rank)]}
    other = jax.jit(lambda x: hvd.sendrecv(x, x, 1 - rank, 1 - rank))(tree)
    require_equal(other["a"], np.arange(3) + 1 - rank)
    require_equal(other["b"][0], np.full((2, 2), 1.0 - rank))
    assert jax.random.key_data(other["b"][1]).tolist() == jax.random.key_data(jax.random.key(1 - rank)).tolist()
    mixed = jax.jit(lambda x: hvd.sendrecv(x["a"], x["b"][0], None, None))(tree)
    require_equal(mixed, np.full((2, 2), 1.0 * rank))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_at_the_edge_has_no_neighbour(way):
    rank, size = hvd.rank(), hvd.size()
    before, after = rank - 1 if rank > 0 else None, rank + 1 if rank < size - 1 else None
    shift = WAYS[way](lambda x: hvd.sendrecv(x, -x, before, after))
    require_equal(shift(jnp.full(4, rank + 1.0)), np.full(4, float(rank) if rank else -1.0))
    gradient = WAYS[way](jax.grad(lambda x: jnp.sum(shift(x) * (rank + 1))))(jnp.full(4, 1.0))
    require_equal(gradient, np.full(4, (rank + 2.0) * (after is not None) - (rank + 1) * (before is None)))


@pytest.mark.ranks(1, 2)
def test_a_rank_sends_to_itself():
    rank = hvd.rank()
    require_equal(jax.jit(lambda x: hvd.sendrecv(x, 0 * x, rank, rank))(jnp.arange(3.0)), np.arange(3.0))


@pytest.mark.ranks(2)
def test_messages_keep_their_order_in_loops_and_branches_and_between_programs():
    rank = hvd.rank()
    other = 1 - rank

    def body(carry, x):
        received = hvd.sendrecv(carry + x, carry, other, other)
        return jax.lax.cond(
            x % 2 == 0, lambda c: hvd.sendrecv(c, c, other, other, 1, 1), lambda c: c, received
        ), received

    def in_numpy(own, theirs):
        every = []
        for x in range(6):
            own, theirs = theirs + x, own + x
            every.append(own)
            if x % 2 == 0:
                own, theirs = theirs, own
        return own, every

    with hvd.errors():
        received = jax.jit(lambda x: hvd.sendrecv(x, x, other, other))(jnp.int64(rank))
        last, every = jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(6)))(jnp.int64(rank))
    assert received == other and (int(last), every.tolist()) == in_numpy(rank, other)

    def count(state):
        number, x = state
        return number + 1, hvd.sendrecv(x * 2, x, other, other)

    _, x = jax.jit(lambda x: jax.lax.while_loop(lambda state: state[0] < 5, count, (0, x)))(jnp.int64(rank + 1))
    assert x == 32 * (other + 1)


@pytest.mark.ranks(2)
def test_a_message_after_a_loop_or_branch_without_results_is_sent_after_those_in_it():
    """XLA knows the results of such a loop, and JAX takes out those of the branch."""

    def program(x, flag):
        if hvd.rank() == 1:
            return [hvd.recv(x, 0) for _ in range(5)]
        jax.lax.fori_loop(0, 3, lambda _, y: hvd.send(x, 1) * 0 + y, x)
        jax.lax.cond(flag, lambda y: (hvd.send(y + 1, 1), y)[1], lambda y: y, x)
        return [hvd.send(x + 2, 1)]

    for _ in range(5):
        results = jax.jit(program)(jnp.zeros(2), True)
        if hvd.rank() == 1:
            assert [one.tolist() for one in results] == [[0, 0]] * 3 + [[1, 1], [2, 2]]


@pytest.mark.ranks(2)
def test_programs_that_follow_each_other_keep_their_order():
    rank = hvd.rank()

    def busy(x):
        work = jax.lax.fori_loop(0, 30, lambda _, m: jnp.tanh(m @ m) * 0.01, jnp.ones((300, 300)) * x[0])
        return x + 0 * work[0, 0]

    late, soon = jax.jit(lambda x: hvd.send(busy(x), 1)), jax.jit(lambda x: hvd.send(x, 1))
    take = jax.jit(lambda x: hvd.recv(x, 0))
    results = []
    for number in range(6):
        x = jnp.full(3, float(number))
        results.append((late if number % 2 == 0 else soon)(x) if rank == 0 else take(x))
    for number, result in enumerate(results):
        require_equal(result, np.full(3, float(number)))


@pytest.mark.ranks(2)
def test_messages_and_operations_of_all_ranks_may_follow_from_each_other():
    """Rank 1 needs the result of the sum for what rank 0 receives."""

    def program(x):
        if hvd.rank() == 0:
            first = hvd.recv(x, 1)
            total = hvd.allreduce(first + 1, hvd.Sum, name="total")
            second = hvd.recv(x, 1)
            last = hvd.allreduce(second, hvd.Sum, name="last")
        else:
            hvd.send(x, 0)
            total = hvd.allreduce(x, hvd.Sum, name="total")
            hvd.send(total, 0)
            last = hvd.allreduce(total, hvd.Sum, name="last")
        return total, last

    for length in (2, 100_000):
        total, last = jax.jit(program)(jnp.full(length, 3.0))
        require_equal(total, np.full(length, 7.0))
        require_equal(last, np.full(length, 14.0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_messages_in_calls_of_every_kind_keep_their_order(kind):
    """Also where the arrays of a later one are computed first."""
    if kind == "composite" and not hasattr(jax.lax, "composite"):
        return
    rank, other = hvd.rank(), 1 - hvd.rank()
    called = KINDS[kind](lambda x: hvd.sendrecv(x, x, other, other))

    @jax.jit
    def program(a, b, rounds_a, rounds_b):
        first, second = called(busy(a, rounds_a)), called(busy(b, rounds_b))
        return first, second, called(first)

    arguments = jnp.full(4, rank + 1.0), jnp.full(4, 10.0 * (rank + 1)), *((100, 1) if rank == 0 else (1, 100))
    if kind == "shard_map" and not hasattr(jax, "shard_map"):  # an older JAX makes a function of it
        with pytest.raises(NotImplementedError, match="have no place in the order of the program"):
            program(*arguments)
        return
    with hvd.errors():
        results = program(*arguments)
        for result, right in zip(results, (other + 1.0, 10.0 * (other + 1), rank + 1.0), strict=True):
            require_equal(result, np.full(4, right))


# ---------------------------------------------------------------------------------------------------------- derivatives


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("remat", [False, True])
def test_gradients_go_the_other_way(way, remat):
    rank, size = hvd.rank(), hvd.size()
    after, before = (rank + 1) % size, (rank - 1) % size

    def loss(x):
        return jnp.sum(hvd.sendrecv(x * x, x, before, after) * (rank + 1))

    loss = jax.checkpoint(loss) if remat else loss
    x = jnp.arange(4.0)
    require_equal(WAYS[way](jax.grad(loss))(x), np.arange(4.0) * 2 * (after + 1))
    value, tangent = WAYS[way](lambda x: jax.jvp(loss, (x,), (jnp.ones(4),)))(x)
    assert (float(value), float(tangent)) == (14.0 * (rank + 1), 12.0 * (rank + 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("remat", [False, True])
def test_the_gradient_of_a_pipeline_goes_back_through_its_stages(remat):
    def loss(w, x):
        if hvd.rank() == 0:
            return 0 * jnp.sum(hvd.send(w * x, 1))
        return jnp.sum(w * hvd.recv(0 * w * x, 0))

    loss = jax.checkpoint(loss) if remat else loss
    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.float32(2.0 + hvd.rank()), jnp.ones(3))
    assert (float(value), float(gradient)) == ((0.0, 9.0) if hvd.rank() == 0 else (18.0, 6.0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("remat", [False, True])
def test_a_pipeline_of_several_batches_has_its_gradient(remat):
    def stage(total, x, w):
        if hvd.rank() == 0:
            return total + 0 * jnp.sum(hvd.send(w * x, 1)), None
        return total + jnp.sum(w * hvd.recv(0 * w * x, 0)), None

    def loss(w, batches):
        body = lambda total, x: stage(total, x, w)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(body) if remat else body, 0.0, batches)[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.float64(2.0 + hvd.rank()), jnp.ones((4, 3)))
    assert (float(value), float(gradient)) == ((0.0, 36.0) if hvd.rank() == 0 else (72.0, 24.0))


@pytest.mark.ranks(2)
def test_the_gradient_of_a_loop_with_messages():
    rank = hvd.rank()
    other = 1 - rank

    def loss(x):
        body = jax.checkpoint(lambda carry, _: (2 * hvd.sendrecv(carry, carry, other, other), None))
        return jax.lax.scan(body, x, None, length=3)[0] * (rank + 1)

    assert float(jax.jit(jax.grad(loss))(jnp.float64(rank))) == 8.0 * (other + 1)
    hessian = jax.jit(jax.grad(jax.grad(lambda x: hvd.sendrecv(x, x, other, other) ** 3)))(jnp.float64(rank + 1.0))
    assert float(hessian) == 6.0 * (rank + 1)


@pytest.mark.ranks(2)
def test_integers_beside_floats_have_no_gradient():
    other = 1 - hvd.rank()

    def loss(x):
        received = hvd.sendrecv({"n": jnp.arange(3), "x": x}, {"n": jnp.arange(3), "x": x}, other, other)
        return jnp.sum(received["x"] * received["n"])

    require_equal(jax.jit(jax.grad(loss))(jnp.ones(3)), np.arange(3.0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_one_message(way):
    rank = hvd.rank()
    other = 1 - rank
    shift = jax.vmap(lambda x: hvd.sendrecv(x, jnp.zeros(3), other, other), in_axes=1, out_axes=1)
    x = jnp.arange(6.0).reshape(3, 2)
    require_equal(WAYS[way](shift)(x + rank), np.asarray(x) + other)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.ranks(2)
def test_mistakes_are_refused_on_the_line_of_the_call():
    rank = hvd.rank()
    x = jnp.ones(2)
    for call, argument in [(hvd.send, "dest"), (hvd.recv, "source")]:
        kind = call.__name__
        for way in WAYS.values():
            with pytest.raises(
                ValueError, match=rf"{kind}: {argument} {rank} is this rank; a rank cannot send to itself"
            ):
                way(lambda x: call(x, rank))(x)  # noqa: B023 - called at once
            with pytest.raises(ValueError, match=rf"{kind}: {argument} 2 is not one of the ranks 0-1"):
                way(lambda x: call(x, 2))(x)  # noqa: B023
            with pytest.raises(TypeError, match=rf"{kind}: {argument} must be an integer, not None"):
                way(lambda x: call(x, None))(x)  # noqa: B023
            with pytest.raises(ValueError, match=rf"{kind}: tag must be at least 0 and less than 2\*\*31, not -1"):
                way(lambda x: call(x, 1 - rank, tag=-1))(x)  # noqa: B023
            with pytest.raises(TypeError, match=rf"{kind}: a str is not an array"):
                way(lambda x: call("a", 1 - rank))(x)  # noqa: B023
    with pytest.raises(ValueError, match=rf"sendrecv: dest {rank} is this rank; give it as source and as dest"):
        hvd.sendrecv(x, x, None, rank)
    with pytest.raises(
        ValueError, match=r"this rank sends itself \['float64\[2\]'\], tag 0, and receives \['float64\[1"
    ):
        hvd.sendrecv(x, x[:1], rank, rank)
    with pytest.raises(ValueError, match="recvtag must be at least 0"):
        hvd.sendrecv(x, x, rank, rank, recvtag=-1)


def fails(kind, program, *parts):
    compiled = jax.jit(program).lower(jnp.ones(3)).compile()
    hvd.barrier()
    begin = time.monotonic()
    with raises(kind) as seen:
        jax.block_until_ready(compiled(jnp.ones(3)))
    require_within(2, begin)
    for part in parts:
        assert part in seen.text, seen.text
    return seen.text


def line_of(function):
    return f"test_jax_messages.py:{function.__code__.co_firstlineno}"


@pytest.mark.ranks(2)
def test_programs_that_wait_for_each_other_are_a_deadlock():
    rank, other = hvd.rank(), 1 - hvd.rank()
    both_receive = lambda x: hvd.recv(x, other)  # noqa: E731
    sends = lambda x: hvd.send(x, other, tag=1)  # noqa: E731
    sums = lambda x: hvd.allreduce(x, name="sum")  # noqa: E731
    for _ in range(2):
        fails(
            ringtrain.DeadlockError, both_receive, "rank 0 for transfer", "rank 1 for transfer", line_of(both_receive)
        )
        own = sends if rank == 0 else sums
        fails(ringtrain.DeadlockError, own, line_of(sends), line_of(sums))
        require_equal(jax.jit(lambda x: hvd.sendrecv(x, x, other, other))(jnp.arange(3) + rank), np.arange(3) + other)


@pytest.mark.ranks(2)
def test_a_program_and_a_call_outside_of_one_are_a_deadlock():
    if hvd.rank() == 0:
        fails(ringtrain.DeadlockError, lambda x: hvd.recv(x @ x * x, 1), "rank 0 for transfer", "rank 1 for transfer")
    else:
        hvd.barrier()
        with pytest.raises(ringtrain.DeadlockError, match="rank 0 for transfer"):
            hvd.recv(jnp.ones(3), 0)


@pytest.mark.ranks(2)
def test_a_rank_that_is_still_at_work_is_not_in_a_deadlock():
    rank = hvd.rank()
    program = jax.jit(lambda x: hvd.send(x, 1) if rank == 0 else hvd.recv(x, 0))
    compiled = program.lower(jnp.ones(3)).compile()
    if rank == 0:
        time.sleep(2)
    require_equal(compiled(jnp.full(3, 1.0 - rank)), np.ones(3))


@pytest.mark.ranks(2)
def test_arrays_of_other_shapes_are_a_mismatch_on_both_ranks():
    rank, other = hvd.rank(), 1 - hvd.rank()
    for length in (3, 100_000):
        x = jnp.ones(length + rank)
        with raises(ringtrain.MismatchError) as seen:
            jax.block_until_ready(jax.jit(lambda x: hvd.send(x, 1) if rank == 0 else hvd.recv(x, 0))(x))
        assert re.search(rf"rank 0 sent float64\[{length}\], rank 1 sent float64\[{length + 1}\]", seen.text)
        require_equal(jax.jit(lambda x: hvd.sendrecv(x, x, other, other))(jnp.arange(3) + rank), np.arange(3) + other)


# ------------------------------------------------------------------------------ messages that the thread of XLA carries


def in_a_loop_of(times, tag):
    """Where the first message of a way has gone the usual way."""
    other = 1 - hvd.rank()
    return jax.jit(
        lambda x: jax.lax.fori_loop(0, times, lambda _, y: hvd.sendrecv(y, y, other, other, tag, tag) + 1, x)
    )


@pytest.mark.ranks(2)
def test_mistakes_after_many_messages_are_found_as_the_first_ones_are():
    rank, other = hvd.rank(), 1 - hvd.rank()
    for round_of in range(3):
        tag = 20 + round_of
        require_equal(in_a_loop_of(51, tag)(jnp.arange(3) + 10 * rank), np.arange(3) + 10 * other + 51)
        another_length = lambda x, tag=tag: hvd.sendrecv(x, x, other, other, tag, tag)  # noqa: E731
        with raises(ringtrain.MismatchError) as seen:
            jax.block_until_ready(jax.jit(another_length)(jnp.ones(3 + rank)))
        assert len(re.findall(r"test_jax_messages.py:\d+", seen.text)) == 2, seen.text
        tag += 10
        in_a_loop_of(50, tag)(jnp.arange(3))
        both_receive = lambda x, tag=tag: hvd.recv(x, other, tag)  # noqa: E731
        fails(
            ringtrain.DeadlockError, both_receive, "rank 0 for transfer", "rank 1 for transfer", line_of(both_receive)
        )


@pytest.mark.ranks(2)
def test_messages_inside_and_outside_of_programs_keep_their_order():
    rank, tag = hvd.rank(), 40
    exchange, receive = in_a_loop_of(20, tag), jax.jit(lambda x: hvd.recv(x, 0, tag))
    send = jax.jit(lambda x: hvd.send(x, 1, tag))
    before = ringtrain.metrics().get("transfer", {}).get("operations", 0)
    for number in range(20):
        require_equal(exchange(jnp.full(2, 1.0 * rank)), np.full(2, 20.0 + rank))
        first = np.full(2, 100.0 + number)
        if rank == 0:
            ringtrain.send(first, 1, tag)
            jax.block_until_ready(send(jnp.asarray(first + 1)))
            ringtrain.send(first + 2, 1, tag)
        else:
            into = np.zeros(2)
            handle = ringtrain.recv_async(into, 0, tag)
            require_equal(receive(jnp.zeros(2)), first + 1)
            ringtrain.synchronize(handle)
            require_equal(into, first)
            ringtrain.recv(into, 0, tag)
            require_equal(into, first + 2)
        if number % 5 == 0:
            time.sleep(0.02 * rank)  # the other rank waits for longer than a moment
    assert ringtrain.metrics()["transfer"]["operations"] - before == 20 * (2 * 20 + 3)


@pytest.mark.ranks(2)
def test_threads_have_messages_at_the_same_time():
    rank = hvd.rank()

    def work(tag):
        for number in range(10):
            require_equal(in_a_loop_of(30, tag)(jnp.full(2, number + 1.0 * rank)), np.full(2, number + 30.0 + rank))

    def work_outside():
        for number in range(200):
            into = np.zeros(1)
            handle = ringtrain.recv_async(into, 1 - rank, 52)
            ringtrain.send(np.full(1, 1.0 * number), 1 - rank, 52)
            ringtrain.synchronize(handle)
            require_equal(into, np.full(1, 1.0 * number))

    with ThreadPoolExecutor() as threads:
        for done in [threads.submit(work, 50), threads.submit(work, 51), threads.submit(work_outside)]:
            done.result()


# --------------------------------------------------------------------------------------------------------------- drawn


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_drawn_programs_that_match_have_the_right_values(count):
    for seed in range(count):
        require_right(seed)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("count", [5, pytest.param(30, marks=pytest.mark.slow)])
def test_drawn_programs_with_a_mistake_end_with_an_error_soon(count):
    for seed in range(count):
        require_found(seed)
