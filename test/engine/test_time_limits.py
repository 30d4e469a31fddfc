"""Waits with a limit of their own: `timeout_s` of a barrier and of synchronize."""

import time

import numpy as np
import pytest

import ringtrain as hvd


@pytest.mark.ranks(2)
def test_a_barrier_ends_with_its_limit_and_the_job_goes_on():
    if hvd.rank() == 0:
        begin = time.monotonic()
        with pytest.raises(hvd.StalledError) as seen:
            hvd.barrier(timeout_s=0.3)
        assert 0.25 < time.monotonic() - begin < 5
        assert "within 0.3 s (timeout_s)" in str(seen.value)
        hvd.allreduce(np.ones(1), name="both")
    else:
        hvd.allreduce(np.ones(1), name="both")
        hvd.barrier(timeout_s=60)  # the other rank has called it
    assert np.array_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), [2, 2])


@pytest.mark.ranks(2)
def test_a_handle_may_be_waited_for_again():
    if hvd.rank() == 1:
        hvd.barrier()
    handle = hvd.allreduce_async(np.full(3, hvd.rank() + 1.0), op=hvd.Sum, name="late")
    if hvd.rank() == 0:
        with pytest.raises(hvd.StalledError):
            hvd.synchronize(handle, timeout_s=0.05)
        hvd.barrier()
    assert np.array_equal(hvd.synchronize(handle, timeout_s=60), [3, 3, 3])


@pytest.mark.parametrize("wrong", [0, -1, "1", True, float("nan")])
@pytest.mark.ranks(1)
def test_a_limit_is_a_number_of_seconds(wrong):
    handle = hvd.allreduce_async(np.ones(1))
    with pytest.raises(ValueError, match="timeout_s must be a number of seconds above 0"):
        hvd.synchronize(handle, timeout_s=wrong)
    hvd.synchronize(handle)
    with pytest.raises(ValueError, match="barrier: timeout_s"):
        hvd.barrier(timeout_s=wrong)
