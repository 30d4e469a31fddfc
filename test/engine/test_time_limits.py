"""Waits with a limit of their own: `timeout_s` of a barrier and of synchronize, and those within time_limit()."""

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


def _arrays_of_numpy():
    return hvd, np.ones(2)


def _arrays_of_jax():
    from jax.numpy import ones

    import ringtrain.jax

    return ringtrain.jax, ones(2)


def _arrays_of_torch():
    from torch import ones

    import ringtrain.torch as face

    assert face.time_limit is hvd.time_limit
    return face, ones(2)


@pytest.mark.parametrize("face_of", [_arrays_of_numpy, _arrays_of_jax, _arrays_of_torch])
@pytest.mark.ranks(3)
def test_time_limit_holds_for_the_operations_of_every_face(face_of):
    face, array = face_of()
    first = face.add_process_set([0, 1])
    calls = [lambda: face.allreduce(array, op=face.Sum, name="one")]
    if first.included():
        calls += [lambda: face.allgather(array, name="two", process_set=first), lambda: face.barrier(first)]
    if hvd.rank() == 0:
        for call in calls:
            begin = time.monotonic()
            with pytest.raises(hvd.StalledError, match=r"within 0\.3 s"), face.time_limit(0.3):
                call()
            assert 0.25 < time.monotonic() - begin < 5
        hvd.barrier()
    else:
        hvd.barrier()
        for call in calls:
            call()
    face.remove_process_set(first)


@pytest.mark.ranks(2)
def test_a_rank_that_waits_with_a_limit_is_not_a_part_of_a_deadlock():
    if hvd.rank() == 0:
        with pytest.raises(hvd.StalledError), hvd.time_limit(3):  # a deadlock is found after about one second
            hvd.allreduce(np.ones(1), name="never")
    hvd.allreduce(np.ones(1), name="both")
    if hvd.rank() == 1:
        hvd.allreduce(np.ones(1), name="never")


@pytest.mark.ranks(2)
def test_a_receive_that_has_met_its_limit_still_takes_its_message():
    values = np.zeros(2)
    if hvd.rank() == 0:
        with pytest.raises(hvd.StalledError), hvd.time_limit(0.2):
            hvd.recv(values, source=1)
        hvd.barrier()
        assert np.array_equal(hvd.recv(np.zeros(2), source=1), [2, 2])
        assert np.array_equal(values, [1, 1])
    else:
        hvd.barrier()
        hvd.send(np.ones(2), dest=0)
        hvd.send(np.full(2, 2.0), dest=0)


@pytest.mark.parametrize("wrong", [0, -1, "1", True, float("nan")])
@pytest.mark.ranks(1)
def test_a_limit_is_a_number_of_seconds(wrong):
    handle = hvd.allreduce_async(np.ones(1))
    with pytest.raises(ValueError, match="timeout_s must be a number of seconds above 0"):
        hvd.synchronize(handle, timeout_s=wrong)
    hvd.synchronize(handle)
    with pytest.raises(ValueError, match="barrier: timeout_s"):
        hvd.barrier(timeout_s=wrong)
    with pytest.raises(ValueError, match="time_limit: timeout_s"), hvd.time_limit(wrong):
        pass
