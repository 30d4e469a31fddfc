"""join: ranks with less data contribute zeros until all have joined."""

import time

import numpy as np
import pytest
from harness.exact import require_equal

import ringtrain as hvd


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("is_named", [True, False], ids=["named", "unnamed"])
def test_uneven_numbers_of_batches(is_named):
    size, rank = hvd.size(), hvd.rank()
    for epoch in range(3):
        for batch in range(2 * rank + epoch):
            # a rank still works in this batch if it has so many
            working = [r for r in range(size) if batch < 2 * r + epoch]
            name = f"batch{batch}" if is_named else None
            result = hvd.allreduce(np.full(1000, rank + 1.0), op=hvd.Sum, name=name)
            require_equal(result, np.full(1000, float(sum(r + 1 for r in working))))
            average = hvd.grouped_allreduce([np.ones(3), np.ones(20_000, "float32")], name=name and f"group{batch}")
            np.testing.assert_array_equal(average[0], np.full(3, len(working) / size))
        assert hvd.join() == size - 1
        require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, float(size)))


@pytest.mark.ranks(2, 3)
def test_operations_that_a_joined_rank_cannot_do_fail_on_the_others():
    if hvd.rank() > 0:
        with pytest.raises(hvd.MismatchError, match=r"rank 0 called join\(\)"):
            hvd.allgather(np.ones(2), name="gather")
        with pytest.raises(hvd.MismatchError, match=r"rank 0 called join\(\)"):
            hvd.allreduce(np.ones(2), op=hvd.Max, name="largest")
        hvd.barrier()
    assert hvd.join() > 0
    require_equal(hvd.allgather(np.array([hvd.rank()])), np.arange(hvd.size()))


@pytest.mark.ranks(2, 3)
def test_a_cached_operation_is_pending_while_all_join():
    for _ in range(100):
        require_equal(hvd.allreduce(np.ones(4), op=hvd.Sum, name="k"), np.full(4, float(hvd.size())))
        handle = hvd.allreduce_async(np.ones(4), op=hvd.Sum, name="k") if hvd.rank() == 0 else None
        hvd.join()
        if handle is not None:
            require_equal(hvd.synchronize(handle), np.ones(4))


@pytest.mark.ranks(2, 3)
def test_a_cached_operation_is_pending_while_the_others_join():
    hvd.allgather(np.ones(2), name="gather")
    if hvd.rank() == 0:
        with pytest.raises(hvd.MismatchError, match=r"called join\(\)"):
            hvd.allgather(np.ones(2), name="gather")
    hvd.join()


@pytest.mark.ranks(2, 3)
def test_more_operations_without_a_name_than_there_are_names_before_a_join():
    handles = [hvd.allreduce_async(np.full(3, float(i)), op=hvd.Sum) for i in range(600)]
    hvd.join()
    for i, handle in enumerate(handles):
        require_equal(hvd.synchronize(handle), np.full(3, float(i * hvd.size())))


@pytest.mark.ranks(2)
def test_pending_operations_are_finished_before_the_join_is():
    handles = [hvd.allreduce_async(np.ones(10), op=hvd.Sum, name=f"pending{i}") for i in range(5)]
    hvd.join()
    assert all(hvd.poll(handle) for handle in handles)
    for handle in handles:
        require_equal(hvd.synchronize(handle), np.full(10, 2.0))


@pytest.mark.ranks(2, env={"RINGTRAIN_FUSION_THRESHOLD_MB": "1"})
def test_operations_agreed_before_a_join_take_nothing_submitted_after_it():
    if hvd.rank() == 0:
        patient = [
            hvd.allreduce_async(np.ones(2_000_000, np.float32), op=hvd.Sum, name=f"patient{i}", priority=-1)
            for i in range(20)
        ]
        last = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="x", priority=-2)
    hvd.join()  # goes before all of them
    if hvd.rank() == 0:
        assert not hvd.poll(last)
        for handle in patient:
            require_equal(hvd.synchronize(handle), np.ones(2_000_000, np.float32))
        require_equal(hvd.synchronize(last), np.ones(3))  # rank 1 had joined
    require_equal(hvd.allreduce(np.full(3, 10.0 * hvd.rank()), op=hvd.Sum, name="x"), np.full(3, 10.0))


@pytest.mark.ranks(2, 3, env={"RINGTRAIN_STALL_WARNING_TIME_S": "1", "RINGTRAIN_STALL_SHUTDOWN_TIME_S": "3"})
def test_join_fails_while_the_last_rank_does_nothing():
    last = hvd.size() - 1
    hvd.barrier()
    if hvd.rank() < last:
        stalled = rf"join: waited 3 s since the last operation\. .* rank {last} did not"
        with pytest.raises(hvd.StalledError, match=stalled):
            hvd.join()
    else:
        time.sleep(5)  # stuck in something else
    hvd.join()
    require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, float(hvd.size())))


@pytest.mark.ranks(2, 3, env={"RINGTRAIN_STALL_WARNING_TIME_S": "1", "RINGTRAIN_STALL_SHUTDOWN_TIME_S": "3"})
def test_join_waits_for_as_long_as_the_last_rank_goes_on():
    last = hvd.size() - 1
    if hvd.rank() == last:
        for _ in range(10):
            require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum, name="alone"), np.ones(2))
            time.sleep(0.6)
    assert hvd.join() == last
