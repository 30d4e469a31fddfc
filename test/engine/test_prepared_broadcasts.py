"""Broadcasts in place that repeat are prepared once, and changes since then are seen."""

import gc
import weakref

import numpy as np
import pytest
from harness.exact import require_equal

import ringtrain as hvd


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
