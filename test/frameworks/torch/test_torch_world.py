"""The names of ringtrain.torch that are those of ringtrain: the job, its errors, its timeline, its process sets."""

import json

import pytest
from harness.frameworks import on_demand

import ringtrain

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")


@pytest.mark.ranks(1, 2)
def test_the_place_of_a_rank_and_what_there_is():
    rank, size = hvd.rank(), hvd.size()
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
    assert hvd.is_initialized() and hvd.is_homogeneous() and hvd.mpi_threads_supported()
    assert hvd.mpi_built() and hvd.mpi_enabled() == (size > 1)
    assert not (hvd.gloo_built() or hvd.gloo_enabled() or hvd.rocm_built() or hvd.ddl_built() or hvd.ccl_built())
    assert isinstance(hvd.cuda_built(), bool) and (hvd.cuda_built() or hvd.nccl_built() == 0)
    assert hvd.get_process_set_ids_and_ranks() == {0: list(range(size))}


@pytest.mark.ranks(2)
def test_operations_are_counted_and_shown_in_a_timeline(tmp_path):
    before = hvd.metrics()
    hvd.start_timeline(str(tmp_path / "timeline.json"))
    handle = hvd.allreduce_async(torch.ones(10), name="shown")
    assert isinstance(handle, hvd.Handle) and hvd.synchronize(handle).tolist() == [1.0] * 10
    hvd.stop_timeline()
    hvd.barrier()
    assert hvd.metrics()["allreduce"]["bytes"] - before.get("allreduce", {"bytes": 0})["bytes"] == 40
    events = json.loads((tmp_path / "timeline.json").read_text())
    shown = [event["pid"] for event in events if event.get("args", {}).get("name") == "shown" and event["ph"] == "X"]
    assert sorted(shown) == [0, 1]


@pytest.mark.ranks(2, initialised=False)
def test_init_shutdown_and_init_again():
    for _ in range(2):
        assert not hvd.is_initialized()
        hvd.init()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
        hvd.shutdown()


@pytest.mark.ranks(2, isolated=True)  # a thread that another test has left might still submit something
def test_an_operation_that_cannot_end_is_an_error_of_horovod():
    hvd.init()
    with pytest.raises(hvd.DeadlockError) as raised:
        hvd.allreduce(torch.ones(2), name=f"of {hvd.rank()}")
    assert isinstance(raised.value, hvd.HorovodInternalError)


def test_every_error_of_the_job_is_caught_as_in_horovod():
    of_job = (hvd.DeadlockError, hvd.MismatchError, hvd.PeerLostError, hvd.RemoteError, hvd.ShutDownError)
    of_checks = (hvd.StalledError, hvd.NotInitializedError, hvd.NonFiniteError, hvd.ReplicaError, hvd.StepOrderError)
    for error in (*of_job, *of_checks):
        assert issubclass(error, hvd.HorovodInternalError) and issubclass(error, hvd.RingtrainError)
        assert error is getattr(ringtrain, error.__name__)
    assert issubclass(ringtrain.StepOrderError, AssertionError)  # as the one that Horovod raises
