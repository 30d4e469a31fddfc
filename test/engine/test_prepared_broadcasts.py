"""Broadcasts in place that repeat are prepared once, and changes since then are seen."""

import gc
import weakref

import numpy as np
import pytest
from harness.exact import require_equal

import ringtrain as hvd
from ringtrain import _core


def submitted_under(name):
    return [one for one in _core.last_operations() if one["name"] == name]


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_a_repeated_broadcast_brings_the_values_of_each_step():
    root = hvd.size() - 1
    for step in range(5):
        array = np.full(7, 10 * step + hvd.rank(), np.int64)
        assert hvd.broadcast_(array, root, name="broadcast: each step") is array
        require_equal(array, np.full(7, 10 * step + root))


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
def test_many_repeated_broadcasts_are_in_flight_together():
    root = hvd.size() - 1
    for step in range(4):
        arrays = [np.full(i, hvd.rank() + i + step, np.float32) for i in range(50)]
        handles = [hvd.broadcast_async_(array, root, name=f"broadcast: {i}") for i, array in enumerate(arrays)]
        for i, (handle, array) in enumerate(zip(handles, arrays, strict=True)):
            assert handle.wait() is array and handle.wait() is array
            require_equal(array, np.full(i, root + i + step, np.float32))


CHANGES = {
    "dtype": lambda array: array.astype(np.float64),
    "complex": lambda array: array.astype(np.complex64),
    "shape": lambda array: array.reshape(2, 3),
    "strides": lambda array: np.repeat(array, 2)[::2],
}


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_repeated_array_is_seen(change):
    own, of_root = (np.arange(6, dtype=np.float32) + rank for rank in (hvd.rank(), 1))
    name = f"broadcast: {change}"
    for make in 3 * [np.copy] + 3 * [CHANGES[change]] + 3 * [np.copy]:
        array = make(own)
        hvd.broadcast_(array, 1, name=name)
        require_equal(array, make(of_root))


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_another_root_under_a_repeated_name_counts():
    for root in (0, 0, 0, 1, 1, 1, 0):
        array = np.full(3, hvd.rank())
        hvd.broadcast_(array, root, name="broadcast: roots")
        require_equal(array, np.full(3, root))


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_bad_arguments_under_a_repeated_name_are_refused():
    array = np.zeros(3, np.float32)
    for _ in range(3):
        hvd.broadcast_(array, 0, name="broadcast: bad")
    with pytest.raises(ValueError, match=r'broadcast "broadcast: bad": root_rank 2 is not one of the ranks 0-1'):
        hvd.broadcast_(array, 2, name="broadcast: bad")
    with pytest.raises(TypeError, match="root_rank must be an integer in 0-1, not 'x'"):
        hvd.broadcast_(array, "x", name="broadcast: bad")
    with pytest.raises(TypeError, match="priority must be an integer"):
        hvd.broadcast_(array, 0, name="broadcast: bad", priority="high")
    with pytest.raises(TypeError, match="in place needs a NumPy array"):
        hvd.broadcast_(1.5, 0, name="broadcast: bad")
    with pytest.raises(TypeError, match="the name of an operation is a str or None"):
        hvd.broadcast_(array, 0, name=["broadcast: bad"])
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        hvd.broadcast_(array, 0, name="broadcast: bad")


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_a_rank_with_another_shape_under_a_repeated_name_is_named():
    for _ in range(3):
        hvd.broadcast_(np.zeros(3), 0, name="broadcast: shapes")
    with pytest.raises(hvd.MismatchError, match=r'"broadcast: shapes": rank 0 sent float64\[3\], rank 1 sent .*\[4\]'):
        hvd.broadcast_(np.zeros(3 + hvd.rank()), 0, name="broadcast: shapes")
    array = np.full(3, hvd.rank())
    hvd.broadcast_(array, 1, name="broadcast: shapes")
    require_equal(array, np.ones(3, int))


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_a_repeated_name_in_flight_is_refused():
    arrays = [np.full(2, hvd.rank()) for _ in range(2)]
    for _ in range(2):
        hvd.broadcast_(arrays[0], 0, name="broadcast: in flight")
    hvd.barrier()
    if hvd.rank() == 0:  # the other rank comes later, so this is in flight
        handle = hvd.broadcast_async_(arrays[0], 0, name="broadcast: in flight")
        with pytest.raises(ValueError, match='broadcast "broadcast: in flight": an operation of this name is in fl'):
            hvd.broadcast_async_(arrays[1], 0, name="broadcast: in flight")
        hvd.barrier()
        handle.wait()
    else:
        hvd.barrier()
        hvd.broadcast_(arrays[0], 0, name="broadcast: in flight")
    assert all("test_prepared_broadcasts.py:" in one["site"] for one in submitted_under("broadcast: in flight"))


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_an_allreduce_and_a_broadcast_of_one_name_are_told_apart():
    for _ in range(4):
        summed, sent = np.full(2, hvd.rank() + 1), np.full(2, hvd.rank() + 1)
        handles = [
            hvd.allreduce_async_(summed, name="broadcast: two kinds", op=hvd.Sum),
            hvd.broadcast_async_(sent, 1, name="broadcast: two kinds"),
        ]
        for handle in handles:
            handle.wait()
        assert summed.tolist() == [3, 3] and sent.tolist() == [2, 2]


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_a_repeated_broadcast_outlives_shutdown_and_init():
    for generation in range(2):
        for step in range(3):
            array = np.full(3, hvd.rank() + step)
            hvd.broadcast_(array, 1, name="broadcast: generations")
            require_equal(array, np.full(3, 1 + step))
        if generation == 0:
            hvd.shutdown()
            with pytest.raises(hvd.NotInitializedError):
                hvd.broadcast_(array, 1, name="broadcast: generations")
            hvd.init()


@pytest.mark.fast
@pytest.mark.ranks(3)
def test_a_removed_process_set_is_refused_under_a_repeated_name():
    for _ in range(2):  # the second one has another number
        both = hvd.add_process_set([0, 2])
        for step in range(3 * both.included()):
            array = np.full(2, hvd.rank() + step)
            hvd.broadcast_(array, 2, name="broadcast: set", process_set=both)
            require_equal(array, np.full(2, 2 + step))
        hvd.barrier()
        hvd.remove_process_set(both)
        with pytest.raises(ValueError, match="not registered"):
            hvd.broadcast_(np.ones(2), 2, name="broadcast: set", process_set=both)


@pytest.mark.ranks(2)
def test_an_array_of_a_dropped_handle_stays_until_it_is_written():
    for _ in range(3):
        hvd.broadcast_(np.zeros(3), 1, name="broadcast: dropped")
    if hvd.rank() == 0:
        array = np.zeros(3)
        hvd.broadcast_async_(array, 1, name="broadcast: dropped")
        awaited = weakref.ref(array)
        del array
        gc.collect()
        assert awaited() is not None
        hvd.barrier()
    else:
        hvd.barrier()
        hvd.broadcast_(np.ones(3), 1, name="broadcast: dropped")
    hvd.barrier()
    hvd.allreduce(0.0, name="after the dropped one")
    assert hvd.rank() or awaited() is None
