"""Arrays that repeat in every step are prepared once, and changes since then are seen."""

import copy
import gc
import signal
import weakref

import numpy as np
import pytest
from harness.exact import require_equal

import ringtrain as hvd
from ringtrain import _core
from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.handles import Handle
from ringtrain.engine.submission import Prepared
from ringtrain.failure import call_site
from ringtrain.ops import reductions
from ringtrain.training.gradient_batch import GradientBatch


def submitted_under(name):
    return [one for one in _core.last_operations() if one["name"] == name]


def average_of(values):
    return np.asarray([hvd.rank() + value for value in values], np.float32), np.asarray(
        [(hvd.size() - 1) / 2 + value for value in values], np.float32
    )


# Averages, or brings the values of the last rank. In place, under a name.
OPERATIONS = {
    "allreduce": lambda array, name, **how: hvd.allreduce_async_(array, name=name, **how),
    "broadcast": lambda array, name, **how: hvd.broadcast_async_(array, hvd.size() - 1, name=name, **how),
}
AWAITED = {
    "allreduce": lambda array, name, **how: hvd.allreduce_(array, name=name, **how),
    "broadcast": lambda array, name, **how: hvd.broadcast_(array, hvd.size() - 1, name=name, **how),
}
of_each_kind = pytest.mark.parametrize("kind", OPERATIONS)


def result_of(kind, values):
    """Returns what all ranks have in the end of arrays of `average_of`."""
    array, average = average_of(values)
    return average if kind == "allreduce" else array + np.float32(hvd.size() - 1 - hvd.rank())


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
@of_each_kind
def test_a_prepared_array_is_changed_where_it_lies_in_each_step(kind):
    for step in range(5):
        for run in (AWAITED[kind], lambda *given: OPERATIONS[kind](*given).wait()):
            array, _ = average_of([step, 2 * step])
            assert run(array, "prepared: each step") is array
            require_equal(array, result_of(kind, [step, 2 * step]))


CHANGES = {
    "dtype": lambda array: array.astype(np.float64),
    "complex": lambda array: array.astype(np.complex64),
    "shape": lambda array: array.reshape(2, 3),
    "length": lambda array: array[:3],
    "strides": lambda array: np.repeat(array, 2)[::2],
}


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", CHANGES)
@of_each_kind
def test_a_change_of_a_prepared_array_is_seen(kind, change):
    own, result = average_of(range(6))[0], result_of(kind, range(6))
    for make in 3 * [np.copy] + 3 * [CHANGES[change]] + 3 * [np.copy]:
        array = make(own.copy())
        AWAITED[kind](array, f"prepared: {change}")
        require_equal(array, make(result))


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_objects_that_are_not_arrays_are_refused_under_a_prepared_name():
    for _ in range(3):
        hvd.allreduce_(np.zeros(1, np.float32), name="prepared: number")
    with pytest.raises(TypeError, match="in place needs a NumPy array"):
        hvd.allreduce_(np.float32(1), name="prepared: number")


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_other_arguments_under_a_prepared_name_count():
    array, average = average_of([1, 3])
    for op, factor, expected in ((hvd.Average, 1, average), (hvd.Sum, 1, 2 * average), (hvd.Sum, 4, 8 * average)):
        for priority in (0, 0, 0, 7, 7):
            sent = array.copy()
            hvd.allreduce_(sent, op=op, prescale_factor=factor, name="prepared: arguments", priority=priority)
            require_equal(sent, expected)


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_a_read_only_array_under_a_prepared_name_is_refused():
    array = np.zeros(3, np.float32)
    for _ in range(3):
        hvd.allreduce_(array, name="prepared: read only")
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        hvd.allreduce_(array, name="prepared: read only")


@pytest.mark.fast
@pytest.mark.ranks(2)
@of_each_kind
def test_a_prepared_name_in_flight_is_refused_and_the_place_of_the_call_is_known(kind):
    begin, name = OPERATIONS[kind], f"prepared: {kind} in flight"
    arrays = [np.ones(2, np.float32) for _ in range(2)]
    for _ in range(2):
        begin(arrays[0], name).wait()
    hvd.barrier()
    if hvd.rank() == 0:  # the other rank comes later, so this is in flight
        handle = begin(arrays[0], name)
        with pytest.raises(ValueError, match=f'{kind} "{name}": an operation of this name is in flight'):
            begin(arrays[1], name)
        hvd.barrier()
        handle.wait()
    else:
        hvd.barrier()
        begin(arrays[0], name).wait()
    place = f"test_prepared.py:{begin.__code__.co_firstlineno}"
    assert all(one["site"].endswith(place) for one in submitted_under(name))


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_arguments_that_are_equal_repeat_a_prepared_array_and_others_do_not():
    name = "prepared: equal arguments"

    def prepared_by(factor, **arguments):
        array, average = average_of([1, 3])
        scales = {"prescale_factor": float(factor), "postscale_factor": float(f"{1 / factor}")}
        require_equal(hvd.allreduce_(array, name=name, **scales, **arguments), average)
        return reductions._tensors.known[name]

    prepared_by(0.5)
    first = prepared_by(0.5)
    assert prepared_by(0.5) is first is not None
    second = prepared_by(0.25)
    assert prepared_by(0.25) is second is not first
    third = prepared_by(0.25, op=hvd.Average)
    assert prepared_by(0.25, op=hvd.Average) is third is not second
    weighted = prepared_by(0.25, weight=2.0)
    assert weighted is not third
    for weight in 0.5, 7, np.float64(2):
        assert prepared_by(0.25, weight=weight) is weighted
    for weight in -1.0, float("nan"), "1", 10**400:
        with pytest.raises((ValueError, TypeError), match="weight must be"):
            prepared_by(0.25, weight=weight)
    with pytest.raises(ValueError, match="add_process_set"):
        prepared_by(0.25, process_set=hvd.ProcessSet([0, 1]))


@pytest.mark.fast
@pytest.mark.ranks(1)
def test_a_compressor_that_keeps_what_was_prepared_with_it_is_freed():
    class Compressor(hvd.Compression.none):
        pass

    array = np.ones(2)
    agreed = "prepared: circle", hvd.Sum, 1.0, 1.0, 0, 0
    view = adapter_for(array).view_in_place(array)
    prepared = Prepared(view, *agreed, call_site(), np.ndarray, None, None, None)
    compressor = Compressor()
    prepared.set_key((agreed[0], compressor, hvd.global_process_set, 0), None)
    compressor.prepared = prepared
    freed = weakref.ref(compressor)
    del prepared, compressor
    gc.collect()
    assert freed() is None


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_a_signal_handler_that_raises_leaves_room_for_the_next_call_of_a_prepared_name():
    name = "prepared: signal"
    array, average = average_of([1])
    for _ in range(3):
        require_equal(hvd.allreduce_(array.copy(), name=name), average)
    hvd.barrier()

    def handler(*_):
        raise TimeoutError("time is over")

    interrupted = array.copy()
    if hvd.rank() == 0:
        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError, match="time is over"):
            hvd.allreduce_(interrupted, name=name)  # the other rank comes when this has ended
        signal.signal(signal.SIGALRM, before)
        hvd.broadcast_(np.zeros(1), 0, name=f"{name}: go on")
    else:
        hvd.broadcast_(np.zeros(1), 0, name=f"{name}: go on")
        hvd.allreduce_(interrupted, name=name)
    hvd.barrier()
    require_equal(interrupted, average)
    for _ in range(2):
        require_equal(hvd.allreduce_(array.copy(), name=name), average)


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_an_array_that_another_thread_begins_during_a_look_stays_begun():
    first, second = np.ones(2), np.full(2, 5.0)
    view_of = adapter_for(first).view_in_place

    def look(array):
        if array is second:  # as a thread that Python lets run now
            assert prepared.begin(first, True, "", None)
        return view_of(array)

    agreed = "prepared: two threads", hvd.Sum, 1.0, 1.0, 0, 0
    prepared = Prepared(view_of(first), *agreed, call_site(), np.ndarray, look, None, None)
    Handle(prepared.start(first, False, "", None), first).wait()
    key = agreed[0], hvd.Sum, hvd.global_process_set, 0
    prepared.set_key(key, None)
    assert _core.run_repeated({agreed[0]: prepared}, second, None, *key, None) is None
    require_equal(prepared.wait(), np.full(2, 4.0))
    require_equal(second, np.full(2, 5.0))


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_a_prepared_array_outlives_shutdown_and_init():
    array, average = average_of([1, 3])
    batch = GradientBatch()
    for generation in range(2):
        for _ in range(3):
            for kind, run in AWAITED.items():
                sent = array.copy()
                run(sent, "prepared: generations")
                require_equal(sent, result_of(kind, [1, 3]))
            of_batch = array.copy()
            batch.ready("prepared: of a batch", of_batch)
            batch.wait()
            require_equal(of_batch, average)
        if generation == 0:
            hvd.shutdown()
            for call in (*AWAITED.values(), *OPERATIONS.values()):
                with pytest.raises(hvd.NotInitializedError):
                    call(array.copy(), "prepared: generations")
            hvd.init()


@pytest.mark.fast
@pytest.mark.ranks(3)
@of_each_kind
def test_a_removed_process_set_is_refused_under_a_prepared_name(kind):
    array = np.ones(2, np.float32)
    for _ in range(2):  # the second one has another number
        pair = hvd.add_process_set([1, 2])
        for _ in range(3 * pair.included()):
            sent = array * hvd.rank()
            AWAITED[kind](sent, "prepared: set", process_set=pair)
            require_equal(sent, array * np.float32(1.5 if kind == "allreduce" else 2))
        hvd.barrier()
        hvd.remove_process_set(pair)
        for call in (AWAITED[kind], OPERATIONS[kind]):
            with pytest.raises(ValueError, match="not registered"):
                call(array.copy(), "prepared: set", process_set=pair)


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_prepared_arrays_in_shared_memory_and_elsewhere_take_turns():
    shared, average = average_of(range(3))
    there = hvd.empty(3, np.float32)
    for step in range(8):
        array = there if step % 4 < 2 else np.empty(3, np.float32)
        array[:] = shared
        hvd.allreduce_(array, name="prepared: places")
        require_equal(array, average)
    kinds = [one["is_registered"] for one in submitted_under("prepared: places")]
    assert kinds == [True, True, False, False] * 2


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_a_batch_sees_what_has_changed_since_the_step_before():
    batch = GradientBatch()
    array, average = average_of(range(4))
    for dtype, priority in ((np.float32, 0), (np.float32, 0), (np.float64, 0), (np.float64, 3), (np.float32, 3)):
        sent = array.astype(dtype)
        batch.ready("x", sent, priority)
        batch.wait()
        require_equal(sent, average.astype(dtype))
    sent = array.copy()
    copied = copy.deepcopy(batch)
    copied.ready("x", sent)
    require_equal(copied.wait()["x"], average)
    batch.group([["x", "y"]])
    both = [array.copy(), array.copy()]
    batch.ready("x", both[0])
    batch.ready("y", both[1])
    batch.wait()
    for one in both:
        require_equal(one, average)


@pytest.mark.ranks(2)
def test_a_prepared_array_that_a_batch_has_forgotten_stays_until_nobody_writes_to_it():
    batch = GradientBatch("forgotten")
    for _ in range(3):
        batch.ready("x", np.zeros(3, np.float32))
        batch.wait()
    if hvd.rank() == 0:
        array = np.ones(3, np.float32)
        batch.ready("x", array)
        batch.forget()
        awaited = weakref.ref(array)
        del batch, array
        gc.collect()
        assert awaited() is not None
        require_equal(awaited(), np.ones(3, np.float32))
        hvd.barrier()
    else:
        hvd.barrier()
        batch.ready("x", np.full(3, 3, np.float32))
        require_equal(batch.wait()["x"], np.full(3, 2, np.float32))
    hvd.barrier()
    if hvd.rank() == 0:
        hvd.allreduce(0.0, name="after the forgotten one")
        assert awaited() is None
    else:
        hvd.allreduce(0.0, name="after the forgotten one")
