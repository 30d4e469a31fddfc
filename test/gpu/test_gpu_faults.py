"""Ranks that die or stop while GPUs work, where NCCL and who waits for the GPU would wait for ever. On fakes."""

import os
import signal
import sys
import time

import numpy as np
import pytest
from exact_cupy import keep_busy, on_gpu, require_on_gpu, use_own_gpu
from harness import gpu_double
from harness.clocks import require_within
from harness.faults import require_clean_end, require_error, run, victim
from harness.gpu_arrays import GPU, cupy, environment
from measure.faults.injection import kill, raises, stop
from measure.process import threads_that_take_signals

import ringtrain as hvd

HANDSHAKES = {"RINGTRAIN_GPU_DOUBLE_HANDSHAKE": "1"}
GONE = "is gone: its process was killed or exited early"


@pytest.fixture
def on_doubles(monkeypatch):
    """The jobs of this test find the doubles."""
    gpu_double.prepare(GPU)
    for name, value in GPU.items():
        monkeypatch.setenv(name, value)


@pytest.mark.ranks(2, env=GPU, initialised=False)
def test_the_thread_that_calls_nccl_takes_no_signal():
    hvd.init()
    use_own_gpu()
    before = threads_that_take_signals()
    array = on_gpu(np.ones(3, np.float32))
    require_on_gpu(hvd.allreduce(array, op=hvd.Sum, name="x"), np.full(3, 2, np.float32))
    assert gpu_double.control().count("communicators") > 0
    assert threads_that_take_signals() <= before  # a thread of before may have ended


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", ["nccl", "staged"])
def test_a_killed_rank_is_named_and_the_gpus_of_the_others_go_on(on_doubles, way, ranks):
    outcome = run(kill(rank=1).during("reduce on a GPU"), ranks, gpu_algorithm=way)
    require_error(outcome, hvd.PeerLostError, victim(outcome), GONE)
    require_clean_end(outcome)


@pytest.mark.parametrize("fault", [kill, stop])
def test_a_rank_for_which_calls_of_nccl_wait_is_noticed(on_doubles, monkeypatch, fault):
    for name, value in HANDSHAKES.items():
        monkeypatch.setenv(name, value)
    limits = {"stall_warning_time_s": 0.3, "stall_shutdown_time_s": 1} if fault is stop else {}
    outcome = run(fault(rank=1).during("reduce on a GPU"), gpu_algorithm="nccl", **limits)
    require_error(outcome, hvd.StalledError if fault is stop else hvd.PeerLostError, limit_s=4)
    require_clean_end(outcome)


@pytest.mark.parametrize("way", ["nccl", "hierarchical"])
def test_a_killed_rank_is_named_on_all_hosts(on_doubles, way):
    outcome = run(kill(rank=1).during("reduce on a GPU"), hosts=(2, 2), gpu_algorithm=way, gpu_cross_algorithm="mpi")
    require_error(outcome, hvd.PeerLostError, victim(outcome), GONE)
    require_clean_end(outcome)


@pytest.mark.parametrize("after_s", [0, 0.01])
def test_a_rank_that_is_killed_while_nccl_connects_is_named(on_doubles, after_s):
    outcome = run(kill(rank=1).during("connect on a GPU", after_s), gpu_algorithm="nccl")
    require_error(outcome, hvd.PeerLostError, victim(outcome), GONE)
    require_clean_end(outcome)


def test_an_exception_reaches_those_whose_gpus_wait(on_doubles):
    outcome = run(raises(rank=0).during("reduce on a GPU"))
    require_error(outcome, hvd.RemoteError, victim(outcome) + " raised InjectedError: told to fail")
    require_clean_end(outcome)


def test_a_stopped_rank_is_noticed_on_the_gpu(on_doubles):
    outcome = run(stop(rank=1).during("reduce on a GPU"), stall_warning_time_s=0.3, stall_shutdown_time_s=1)
    require_error(outcome, hvd.StalledError, limit_s=4)


def reduce_behind_work_that_takes(seconds):
    """After init(): an array whose sum rank 0's GPU cannot begin with for so long."""
    hvd.init()
    mine = on_gpu(np.ones(5))
    hvd.allreduce_(mine, name="first")
    if hvd.rank() == 0:
        keep_busy(seconds)
    hvd.allreduce_(mine, name="late")
    return mine


@pytest.mark.ranks(2, env={**GPU, "RINGTRAIN_STALL_SHUTDOWN_TIME_S": "1"}, isolated=True)
def test_work_before_it_that_never_ends_is_a_stall_too():
    mine = reduce_behind_work_that_takes(6)
    with pytest.raises(hvd.RingtrainError):
        for number in range(100):
            cupy.cuda.get_current_stream().synchronize()
            hvd.allreduce_(mine, name=f"later {number}")
    hvd.shutdown()


@pytest.mark.ranks(2, env={**GPU, "RINGTRAIN_STALL_SHUTDOWN_TIME_S": "1"}, isolated=True)
def test_a_first_shutdown_does_not_wait_for_it_either():
    reduce_behind_work_that_takes(30)
    begin = time.monotonic()
    hvd.shutdown()
    assert time.monotonic() - begin < 15


@pytest.mark.ranks(2, env={**GPU, "RINGTRAIN_STALL_SHUTDOWN_TIME_S": "1"}, isolated=True)
def test_shutdown_does_not_wait_for_work_that_never_ends():
    reduce_behind_work_that_takes(30)
    begin = time.monotonic()
    with pytest.raises(hvd.RingtrainError):
        for number in range(1000):
            hvd.allreduce_(np.ones(5), name=f"on the host {number}")
            time.sleep(0.01)
    hvd.shutdown()
    assert time.monotonic() - begin < 15


@pytest.mark.ranks(2, env=environment(destroy_us=1_000_000), isolated=True)
def test_a_shutdown_that_stalls_is_called_one(tmp_path):
    hvd.init(stall_warning_time_s=0.2)
    use_own_gpu()
    hvd.allreduce(on_gpu(np.ones(3, np.float32)), name="x")
    with open(tmp_path / f"errors of rank {hvd.rank()}", "w+") as errors:
        before = os.dup(2)
        os.dup2(errors.fileno(), 2)
        hvd.shutdown()
        os.dup2(before, 2)
        errors.seek(0)
        assert "waiting for other ranks in the shutdown" in errors.read()


@pytest.mark.ranks(2, env=GPU, isolated=True)
@pytest.mark.parametrize("dtype", ["float32", "int16"], ids=["nccl", "staged"])
def test_a_gpu_that_fails_is_an_error_and_does_not_end_the_process(dtype):
    hvd.init()
    use_own_gpu()
    mine = cupy.ones(1000, dtype)
    hvd.allreduce_(mine, op=hvd.Sum, name="first")
    if hvd.rank() == 1:
        gpu_double.control().set_failures("cuEventQuery:*:700")
    keep_busy(0.5)
    with pytest.raises(hvd.RingtrainError, match="cuEventQuery: an illegal memory access"):
        for number in range(1000):
            hvd.allreduce_(mine, op=hvd.Sum, name=f"later {number}")
            cupy.cuda.get_current_stream().synchronize()
    hvd.shutdown()


@pytest.mark.ranks(3, env=GPU, isolated=True)
def test_the_communicators_of_all_process_sets_are_ended_at_once():
    """NCCL frees memory of the GPU at the end, and CUDA waits with that for the kernels of all communicators."""
    hvd.init()
    pair = hvd.add_process_set([1, 2])
    use_own_gpu()
    mine = cupy.ones(1000)
    for process_set in [hvd.global_process_set, *([pair] if pair.included() else [])]:
        hvd.allreduce_(mine, name="first", process_set=process_set)
    hvd.barrier()
    rank = hvd.rank()
    if rank == 2:
        keep_busy(4)
    hvd.allreduce_(mine, name="all")
    if pair.included():
        hvd.allreduce_(mine, name="pair", process_set=pair)
    if rank == 2:
        gpu_double.control().set_failures("ncclCommGetAsyncError:*:6")  # ncclRemoteError
    begin = time.monotonic()
    with pytest.raises(hvd.RingtrainError, match="NCCL lost"):
        for number in range(1000):
            hvd.allreduce_(np.ones(5), name=f"on the host {number}")
            time.sleep(0.01)
    hvd.shutdown()
    if rank != 2:
        require_within(2, begin)


@pytest.mark.ranks(2, env=GPU, isolated=True)
def test_an_error_that_nccl_finds_later_reaches_all_ranks():
    hvd.init()
    use_own_gpu()
    mine = cupy.ones(1000)
    hvd.allreduce_(mine, name="first")
    if hvd.rank() == 1:
        gpu_double.control().set_failures("ncclCommGetAsyncError:*:6")  # ncclRemoteError
    keep_busy(0.5)
    with pytest.raises((hvd.PeerLostError, hvd.RemoteError), match="NCCL lost"):
        for number in range(1000):
            hvd.allreduce_(mine, name=f"later {number}")
            cupy.cuda.get_current_stream().synchronize()
    hvd.shutdown()


FAILING = {**GPU, "RINGTRAIN_GPU_DOUBLE_FAIL": "ncclAllReduce:60:1:rank=1"}


@pytest.mark.ranks(2, env=FAILING, isolated=True, way="failing")
@pytest.mark.ranks(2, env={**FAILING, **HANDSHAKES}, isolated=True, way="others wait")
def test_a_call_of_nccl_that_fails_names_the_operation():
    hvd.init()
    mine = on_gpu(np.ones(1000))
    with pytest.raises(hvd.RingtrainError, match=r'allreduce "number.*ncclAllReduce: unhandled cuda error'):
        for number in range(100):
            hvd.allreduce_(mine, name=f"number {number}")
            cupy.cuda.get_current_stream().synchronize()
    hvd.shutdown()


def fill_gpu():
    """Arrays that leave no room for another one."""
    filler = []
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        while True:
            filler.append(cupy.empty(300_000, "float32"))
    return filler


@pytest.mark.ranks(2, env={**GPU, "RINGTRAIN_GPU_DOUBLE_MEMORY": str(16 << 20)}, isolated=True)
def test_a_result_without_room_on_the_gpu_is_not_lost():
    hvd.init()
    use_own_gpu()
    mine = cupy.full(150_000, hvd.rank(), "float32")
    hvd.allreduce_(cupy.ones(3), name="first")
    filler = fill_gpu()
    handle = hvd.allgather_async(mine, name="gathered")  # NCCL writes to the host's memory
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError) as caught:
        hvd.synchronize(handle)
    if sys.version_info >= (3, 11):  # exceptions have notes
        assert caught.value.__notes__ == ['ringtrain was making room for allgather "gathered"']
    filler.clear()
    require_on_gpu(hvd.synchronize(handle), np.repeat(np.arange(2, dtype="float32"), 150_000))
    hvd.shutdown()


FULL_SOON = {**GPU, "RINGTRAIN_GPU_DOUBLE_MEMORY": str(16 << 20), "RINGTRAIN_STALL_SHUTDOWN_TIME_S": "1"}


@pytest.mark.ranks(2, env=FULL_SOON, isolated=True)
def test_a_rank_without_room_notices_that_the_gpu_waits_for_a_stopped_one():
    hvd.init()
    use_own_gpu()
    pids = hvd.allgather(np.array([os.getpid()]))
    mine = cupy.ones(700_000, "float32")  # gathered it is larger than any block that there is
    hvd.allreduce_(mine, name="first")
    hvd.allgather(mine[:100], name="first")  # leaves a block that can be given back to the driver
    cupy.cuda.get_current_stream().synchronize()
    filler = fill_gpu() if hvd.rank() == 0 else []
    if hvd.rank() == 1:
        keep_busy(5)  # so that its part of the next operation does not begin
    handles = [hvd.allreduce_async_(mine, name="late"), hvd.allgather_async(mine, name="too large")]
    if hvd.rank() == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(hvd.StalledError):
        hvd.synchronize(handles[1])
        for number in range(100):
            cupy.cuda.get_current_stream().synchronize()
            hvd.allreduce_(mine, name=f"later {number}")
    if hvd.rank() == 0:
        require_within(5, begin)
        os.kill(int(pids[1]), signal.SIGCONT)
    filler.clear()
    hvd.shutdown()
