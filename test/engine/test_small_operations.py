"""Operations so small that their values travel with the negotiation, in one exchange."""

import threading

import numpy as np
import pytest
from harness.exact import DTYPES, data_of_ranks, require_equal

import ringtrain as hvd

OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}
STEPS = 4
APART = {"RINGTRAIN_SHARED_MEMORY": "off"}
MOST_BYTES = 64 << 10  # of values among two ranks, or nodes


def came_with_values():
    return hvd.metrics()["came_with_values"]


def ops_of(dtype):
    return ["sum", "min", "max", "product"] if dtype.kind == "b" else list(OPS)


@pytest.mark.fast
@pytest.mark.ranks(2, 3, 4, fast=[2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_values_are_reduced_exactly(dtype):
    for op in ops_of(dtype):
        for elements in (1, 3, 64 // dtype.itemsize, 64 // dtype.itemsize + 1):
            arrays = data_of_ranks(hvd.size(), (elements,), dtype, op=op)
            expected = hvd.allreduce(np.repeat(arrays[hvd.rank()], 100), op=OPS[op])[::100]  # by way of the mailboxes
            before = came_with_values()
            for _ in range(STEPS):
                result = hvd.allreduce(arrays[hvd.rank()], op=OPS[op], name=f"small: {dtype} {op} {elements}")
                require_equal(result, expected)
            assert came_with_values() - before == (STEPS - 1 if elements * dtype.itemsize <= 64 else 0)


def require_bits_of_messages(dtype, most_bytes):
    """Calls operations of up to so many bytes, which come with their values, and of one element more, which do not.

    An operation with a new name comes without its value.
    """
    longest = most_bytes // dtype.itemsize
    values = 100 * np.random.default_rng(hvd.rank()).standard_normal(longest + 1)
    for op in ops_of(dtype):
        for elements in (1, 3, 64 // dtype.itemsize + 1, longest, longest + 1):
            array, name = values[:elements].astype(dtype), f"apart: {dtype} {op} {elements}"
            expected = hvd.allreduce(array, op=OPS[op], name=name)
            before = came_with_values()
            for _ in range(STEPS):
                assert hvd.allreduce(array, op=OPS[op], name=name).tobytes() == expected.tobytes()
            assert came_with_values() - before == (STEPS if elements <= longest else 0), (op, elements)


@pytest.mark.fast
@pytest.mark.ranks(2, 3, 5, fast=[2], env=APART)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_over_a_network_have_the_bits_of_messages(dtype):
    require_bits_of_messages(dtype, MOST_BYTES // (hvd.size() - 1) ** 2)


def sums_of_nodes(nodes, dtype):
    """Calls operations whose values are added up on each node, 16-bit floats in 32 bits."""
    widens = dtype.name in ("float16", "bfloat16")
    require_bits_of_messages(dtype, MOST_BYTES // (nodes - 1) ** 2 // (2 if widens else 1))


@pytest.mark.ranks(4, hosts=(2, 2))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_two_nodes_have_the_bits_of_messages(dtype):
    sums_of_nodes(2, dtype)


@pytest.mark.ranks(7, hosts=(3, 1, 2, 1))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_uneven_nodes_have_the_bits_of_messages(dtype):
    sums_of_nodes(4, dtype)


@pytest.mark.ranks(4, hosts=(2, 2))
def test_sums_of_nodes_of_a_process_set_in_another_order():
    values = np.random.default_rng(hvd.rank()).standard_normal(100)
    some = hvd.add_process_set([3, 0, 2])
    for _ in range(STEPS):
        if some.included():
            result = hvd.allreduce(values, op=hvd.Sum, name="sums: set", process_set=some)
            require_equal(hvd.allgather(result, process_set=some), np.tile(result, 3))
    hvd.remove_process_set(some)


@pytest.mark.fast
@pytest.mark.ranks(2, 3, fast=[2])
def test_a_rounded_sum_has_the_same_bits_on_all_ranks_and_those_of_a_large_one():
    values = np.random.default_rng(hvd.rank()).standard_normal(16).astype(np.float32)
    large = hvd.allreduce(np.concatenate([values, np.zeros(16, np.float32)]), op=hvd.Average)
    for _ in range(STEPS):
        require_equal(hvd.allreduce(values, op=hvd.Average, name="small: rounded"), large[:16])
    require_equal(hvd.allgather(large), np.tile(large, hvd.size()))


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_small_values_are_scaled_as_large_ones_are():
    for prescale, postscale in ((1.0, 0.5), (2.0, 1.0), (3.0, 0.25)):
        for dtype in (np.float32, np.int64):
            array = np.full(2, 4 * (hvd.rank() + 1), dtype)
            for _ in range(STEPS):
                name = f"small: {prescale} {postscale} {np.dtype(dtype)}"
                factors = {"prescale_factor": prescale, "postscale_factor": postscale}
                result = hvd.allreduce(array, op=hvd.Sum, name=name, **factors)
                require_equal(result, np.full(2, 12 * prescale * postscale, dtype))


@pytest.mark.fast
@pytest.mark.ranks(3, 4, fast=[3])
def test_a_process_set_reduces_its_small_values():
    some = hvd.add_process_set([0, hvd.size() - 1])
    for step in range(STEPS):
        if some.included():
            result = hvd.allreduce(np.array([hvd.rank() + step]), op=hvd.Sum, name="small: set", process_set=some)
            require_equal(result, np.array([hvd.size() - 1 + 2 * step]))
        require_equal(hvd.allreduce(np.array([step]), op=hvd.Sum, name="small: all"), np.array([hvd.size() * step]))
    hvd.remove_process_set(some)


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_many_small_values_at_once_are_reduced():
    for step in range(STEPS):
        arrays = [np.array([place * step, hvd.rank()]) for place in range(20)]
        order = range(20) if hvd.rank() == 0 else reversed(range(20))
        handles = {place: hvd.allreduce_async_(arrays[place], op=hvd.Sum, name=f"many: {place}") for place in order}
        for place, handle in handles.items():
            require_equal(handle.wait(), np.array([2 * place * step, 1]))


@pytest.mark.ranks(2)
def test_small_values_of_several_threads_do_not_mix():
    def work(thread):
        for step in range(200):
            result = hvd.allreduce(np.array([thread, step, hvd.rank()]), op=hvd.Sum, name=f"thread {thread}")
            require_equal(result, np.array([2 * thread, 2 * step, 1]))
        ended.append(thread)

    ended = []
    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.ranks(2)
def test_a_small_value_waits_for_a_large_tensor_that_is_more_urgent():
    large, small = np.ones(100_000, np.float32), np.array([hvd.rank()])
    for step in range(STEPS):
        large[:] = step
        handles = [hvd.allreduce_async_(large, op=hvd.Sum, name="large", priority=1)]
        handles += [hvd.allreduce_async(small, op=hvd.Sum, name="small: beside a large one")]
        require_equal(handles[1].wait(), np.array([1]))
        assert (handles[0].wait() == 2 * step).all()


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_ranks_that_disagree_about_a_small_value_are_told():
    for _ in range(2):
        hvd.allreduce(np.zeros(1), name="small: disagree")
    with pytest.raises(hvd.MismatchError, match="small: disagree"):
        hvd.allreduce(np.zeros(1 + hvd.rank()), name="small: disagree")
    for _ in range(STEPS):
        require_equal(hvd.allreduce(np.ones(1), op=hvd.Sum, name="small: agree again"), np.full(1, 2.0))


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_a_rank_that_has_joined_adds_zeros_to_small_values():
    for step in range(STEPS):
        require_equal(hvd.allreduce(np.ones(1), op=hvd.Sum, name="small: uneven"), np.full(1, 2.0))
        if hvd.rank() == 0:
            for _ in range(step):
                require_equal(hvd.allreduce(np.ones(1), op=hvd.Sum, name="small: uneven"), np.ones(1))
        hvd.join()


@pytest.mark.ranks(2, env=APART)
def test_small_values_over_a_network_are_scaled_wait_and_are_told_apart():
    test_small_values_are_scaled_as_large_ones_are()
    test_many_small_values_at_once_are_reduced()
    test_small_values_of_several_threads_do_not_mix()
    test_a_small_value_waits_for_a_large_tensor_that_is_more_urgent()
    test_ranks_that_disagree_about_a_small_value_are_told()
    test_a_rank_that_has_joined_adds_zeros_to_small_values()


@pytest.mark.ranks(3, env=APART)
def test_a_process_set_reduces_its_small_values_over_a_network():
    test_a_process_set_reduces_its_small_values()


@pytest.mark.ranks(3, env={**APART, "RINGTRAIN_ALLREDUCE_ALGORITHM": "ring"})
def test_small_values_are_reduced_in_the_ring_where_the_user_asks_for_it():
    values = 100 * np.random.default_rng(hvd.rank()).standard_normal(8)
    expected = hvd.allreduce(values, op=hvd.Sum, name="ring: small")
    for _ in range(STEPS):
        require_equal(hvd.allreduce(values, op=hvd.Sum, name="ring: small"), expected)


def sums_with_values_over_hosts():
    before = came_with_values()
    for step in range(STEPS):
        require_equal(hvd.allreduce(np.array([hvd.rank() + step]), op=hvd.Sum, name="hosts"), np.array([3 + 3 * step]))
    return came_with_values() - before


@pytest.mark.ranks(3, hosts=(1, 1, 1))
def test_small_values_travel_between_hosts_of_one_rank_each():
    assert sums_with_values_over_hosts() == STEPS - 1


@pytest.mark.ranks(3, hosts=(2, 1))
def test_sums_of_small_values_travel_between_hosts_of_several_ranks():
    assert sums_with_values_over_hosts() == STEPS - 1


@pytest.mark.ranks(4, hosts=(2, 2))
def test_a_rank_that_has_joined_adds_zeros_to_sums_of_nodes():
    for step in range(STEPS):
        require_equal(hvd.allreduce(np.ones(1), op=hvd.Sum, name="sums: uneven"), np.full(1, 4.0))
        if hvd.rank() != 2:
            for _ in range(step):
                require_equal(hvd.allreduce(np.ones(1), op=hvd.Sum, name="sums: uneven"), np.full(1, 3.0))
        hvd.join()
