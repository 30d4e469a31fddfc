"""Operations without a name that repeat are prepared by their line, and matched by their order."""

import threading

import numpy as np
import pytest
from harness.exact import require_equal
from harness.prepared import all_are_prepared

import ringtrain as hvd
from ringtrain import _core

NAMES = 240  # which operations without a name take in turn

CALLS = {
    "allreduce": lambda array, **how: hvd.allreduce(array, op=hvd.Sum, **how),
    "allreduce_async": lambda array, **how: hvd.allreduce_async(array, op=hvd.Sum, **how).wait(),
    "allreduce_": lambda array, **how: hvd.allreduce_(array, op=hvd.Sum, **how),
    "allreduce_async_": lambda array, **how: hvd.allreduce_async_(array, op=hvd.Sum, **how).wait(),
    "broadcast_": lambda array, **how: hvd.broadcast_(array, 0, **how),
    "broadcast_async_": lambda array, **how: hvd.broadcast_async_(array, 0, **how).wait(),
}


def check(call, values, dtype=np.float32, **how):
    """One operation of all ranks, from one line."""
    array = np.asarray(values, dtype)
    total = array * dtype(hvd.size()) + dtype(sum(range(hvd.size())))
    result = CALLS[call](array + dtype(hvd.rank()), **how)
    require_equal(result, array if call.startswith("broadcast") else total)


def numbers_of_last(count):
    """Of operations without a name: their places among these names."""
    names = [one["name"] for one in _core.last_operations()[-count:]]
    return [int(name.removeprefix("<unnamed ").removesuffix(">")) for name in names]


def require_successive(numbers):
    assert numbers == [(numbers[0] + i) % NAMES for i in range(len(numbers))]


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, fast=[1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_a_repeated_call_without_a_name_is_prepared_and_has_a_name_of_its_own_each_time(call):
    for step in range(3):
        check(call, [step, 2 * step])
    with all_are_prepared():
        for step in range(5):
            check(call, [step, 2 * step])
    require_successive(numbers_of_last(8))


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", CALLS)
def test_a_line_that_sends_arrays_of_several_kinds_is_prepared_for_each(call):
    kinds = (np.float32, [1, 2]), (np.float64, [1, 2]), (np.int64, [1, 2]), (np.float32, [1, 2, 3])
    for _ in range(3):
        for dtype, values in kinds:
            check(call, values, dtype)
    with all_are_prepared():
        for dtype, values in (*kinds, *reversed(kinds)):
            check(call, values, dtype)
    for length in range(12):  # more than are kept
        check(call, range(length))


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", CALLS)
def test_calls_with_and_without_a_name_take_turns_on_one_line(call):
    for step in range(6):
        check(call, [step], name=f"unnamed or not: {call}")
        check(call, [2 * step])
        check(call, [3 * step], name="")
        check(call, [4 * step])
    require_successive(numbers_of_last(3))


@pytest.mark.fast
@pytest.mark.ranks(1, 2)
def test_more_operations_without_a_name_than_there_are_names_are_in_flight_together():
    for step in range(3):
        arrays = [np.full(3, 7 * i + step + hvd.rank(), np.float64) for i in range(2 * NAMES + 50)]
        handles = [hvd.allreduce_async_(array, op=hvd.Sum) for array in arrays]
        for i, handle in reversed(list(enumerate(handles))):
            assert handle.wait() is arrays[i]
            require_equal(arrays[i], np.full(3, hvd.size() * (7 * i + step) + hvd.size() // 2, np.float64))


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", ["allreduce", "allreduce_", "allreduce_async_"])
def test_a_rank_that_does_something_else_than_its_repeated_call_is_named(call):
    for step in range(4):
        check(call, [step])
    is_first = hvd.rank() == 0
    called = r'^allreduce "<unnamed \d+>": rank 0 called allreduce, rank 1 called broadcast\.'
    with pytest.raises(hvd.MismatchError, match=called):
        if is_first:
            check(call, [5])
        else:
            hvd.broadcast_(np.zeros(1, np.float32), 0)
    with pytest.raises(hvd.MismatchError, match=r'^allreduce "<unnamed \d+>": rank 0 .*\[1\].* rank 1 .*\[2\]'):
        check(call, [5] if is_first else [5, 6])
    for step in range(4):  # all ranks have submitted as many
        check(call, [step])


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
def test_operations_without_a_name_that_repeat_in_turn_are_known_from_the_cache(count):
    def step():
        for length in range(1, count + 1):
            check("allreduce", range(length))

    for _ in range(NAMES // count + 1):
        step()
    hvd.allreduce(0.0, name="unnamed: all are known")
    before = hvd.metrics()["cache_misses"]
    hvd.allreduce(0.0, name="unnamed: all are known")
    for _ in range(NAMES // count + 1):
        step()
    assert hvd.metrics()["cache_misses"] == before


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_a_prepared_call_without_a_name_outlives_shutdown_and_init():
    for generation in range(3):
        for call in CALLS:
            for step in range(4):
                check(call, [generation, step])
        assert numbers_of_last(1)[0] == 4 * len(CALLS) - 1 or generation == 0
        if generation < 2:
            hvd.shutdown()
            with pytest.raises(hvd.NotInitializedError):
                check("allreduce_", [1])
            hvd.init()


@pytest.mark.fast
@pytest.mark.ranks(3)
def test_process_sets_number_their_repeated_calls_without_a_name():
    for _ in range(2):  # the second one has another number
        both = hvd.add_process_set([0, 1])
        array = np.full(2, 1.0)
        for step in range(4):
            require_equal(hvd.allreduce_(np.full(2, 1.0 + step), op=hvd.Sum), np.full(2, 3.0 + 3 * step))
            if both.included():
                require_equal(hvd.allreduce_(array.copy(), process_set=both), array)
                assert numbers_of_last(1) == [step]
        hvd.barrier()
        hvd.remove_process_set(both)
        with pytest.raises(ValueError, match="not registered"):
            hvd.allreduce_(array.copy(), process_set=both)


@pytest.mark.fast
@pytest.mark.ranks(3)
def test_threads_repeat_calls_without_a_name_on_one_line_in_process_sets_of_their_own():
    both = hvd.add_process_set([0, 1])
    wrong = []

    def work(process_set, value):
        size = process_set.size()
        for step in range(200):
            sent = np.full(2, value + step + hvd.rank(), np.float64)
            result = hvd.allreduce_(sent, op=hvd.Sum, process_set=process_set)
            if result.tolist() != 2 * [size * (value + step) + sum(range(size))]:
                wrong.append((value, step))

    sets = [hvd.global_process_set, both][: 1 + both.included()]
    threads = [threading.Thread(target=work, args=(one, 1000 * i)) for i, one in enumerate(sets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    hvd.barrier()
    hvd.remove_process_set(both)


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_weights_and_arguments_of_repeated_calls_without_a_name_count():
    for step in range(5):
        for factor in 1.0, 2.0:
            for weight in None, 1.0 + step, 3:
                array = np.full(3, 4.0)
                require_equal(hvd.allreduce_(array, prescale_factor=factor, weight=weight), np.full(3, 4 * factor))
    with pytest.raises(ValueError, match="weight must be"):
        hvd.allreduce_(np.ones(3), weight=-1.0)
