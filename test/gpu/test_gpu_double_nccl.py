"""The double of NCCL computes what NCCL computes, between real processes, and fails as NCCL does."""

import tempfile
import threading
import time
from multiprocessing import SimpleQueue
from pathlib import Path

import numpy as np
import pytest
from gpu_calls import (
    NCCL_DTYPES,
    NON_BLOCKING,
    NOT_READY,
    Refused,
    call,
    code_of,
    get,
    last_error,
    new_communicator,
    new_unique_id,
    open_gpu,
    put,
)
from gpu_processes import run, running
from harness import gpu_double
from harness.clocks import require_within
from harness.exact import require_equal

# Each body runs in processes of its own, forked from this one, which never calls the driver itself.
doubled = pytest.mark.ranks(1, env=gpu_double.environment(join_timeout_s=20))
SLOW_US = 20_000
FLOAT32 = NCCL_DTYPES.index(np.dtype("float32"))
INVALID_ARGUMENT, INVALID_USAGE = 4, 5


def on_ranks(size, body, *arguments, **settings):
    """Returns the results of `body(rank, communicator, stream, *arguments)` on each rank, with its own GPU."""
    return run(size, _joined, SimpleQueue(), size, body, *arguments, **settings)


def _joined(rank, ids, size, body, *arguments):
    open_gpu(rank)
    communicator = new_communicator(_unique_id(rank, ids, size), rank, size)
    result = body(rank, communicator, call("cuStreamCreate", NON_BLOCKING), *arguments)
    assert not _open_places()
    return result


def _unique_id(rank, ids, size):
    """Made by rank 0, and passed on through the queue."""
    if rank > 0:
        return ids.get()
    made = new_unique_id()
    for _ in range(1, size):
        ids.put(made)
    return made


def _open_places():
    """The files of this process in which communicators may meet."""
    folder = Path("/proc/self/fd")
    return [path for path in folder.iterdir() if path.is_symlink() and "memfd:gpu_double" in str(path.readlink())]


def error_of(communicator):
    return call("ncclCommGetAsyncError", communicator)


def allreduced(communicator, stream, array, op=0):
    memory = put(array)
    number = NCCL_DTYPES.index(array.dtype)
    call("ncclAllReduce", memory, memory, array.size, number, op, communicator, stream)
    return get(memory, array.shape, array.dtype, stream)


@doubled
def test_messages_that_do_not_match_fail_both():
    def body(rank, communicator, stream):
        memory = put(np.zeros(50_000, np.float32))
        name, peer = ("ncclSend", 1) if rank == 0 else ("ncclRecv", 0)
        call(name, memory, 50_000 - rank, FLOAT32, peer, communicator, stream)
        call("cuStreamSynchronize", stream)
        return wait_for_error(communicator)

    assert on_ranks(2, body) == [INVALID_USAGE, INVALID_USAGE]


def wait_for_error(communicator):
    deadline = time.monotonic() + 10
    while error_of(communicator) == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
    return error_of(communicator)


@doubled
@pytest.mark.parametrize("what", ["count", "dtype", "op", "call"])
def test_a_collective_that_differs_is_an_error_of_all_ranks(what):
    def body(rank, communicator, stream):
        memory, is_other = put(np.ones(8, np.float32)), rank == 1
        count, dtype, op = 7 if is_other and what == "count" else 8, FLOAT32, 0
        if is_other and what == "dtype":
            dtype = 2
        if is_other and what == "op":
            op = 1
        if is_other and what == "call":
            call("ncclBroadcast", memory, memory, count, dtype, 0, communicator, stream)
        else:
            call("ncclAllReduce", memory, memory, count, dtype, op, communicator, stream)
        call("cuStreamSynchronize", stream)
        assert error_of(communicator) == INVALID_USAGE
        assert code_of("ncclAllReduce", memory, memory, 8, FLOAT32, 0, communicator, stream) == INVALID_USAGE
        assert "failed before" in last_error()
        require_equal(get(memory, 8, np.float32, stream), np.ones(8, np.float32))
        call("ncclCommAbort", communicator)

    on_ranks(3, body)


@doubled
def test_collectives_are_work_of_their_stream():
    def body(rank, communicator, stream):
        array = np.full(1000, rank + 1, np.int32)
        memory, other = put(array), call("cuStreamCreate", NON_BLOCKING)
        gpu_double.control().set_delay_us(SLOW_US)
        for on in (stream, other, stream):  # one after another, on whatever stream
            call("ncclAllReduce", memory, memory, 1000, 2, 0, communicator, on)
        assert code_of("cuStreamQuery", stream) == NOT_READY
        require_equal(get(memory, 1000, np.int32, stream), np.full(1000, 3 * 2 * 2, np.int32))

    on_ranks(2, body)


@doubled
def test_a_group_is_behind_all_of_its_streams_and_before_what_follows_there():
    def body(rank, communicator, stream):
        first, second, other = put(np.zeros(8, np.int64)), put(np.zeros(8, np.int64)), call("cuStreamCreate", 1)
        gpu_double.control().set_delay_us(SLOW_US // 2)
        for _ in range(3):
            call("cuMemsetD8Async", second, 1, 64, other)
        call("ncclGroupStart")
        call("ncclAllReduce", first, first, 8, 4, 0, communicator, stream)
        call("ncclAllReduce", second, second, 64, 0, 0, communicator, other)
        call("ncclGroupEnd")
        require_equal(get(second, 64, np.int8, other), np.full(64, 2, np.int8))

    on_ranks(2, body)


@doubled
def test_a_refused_call_refuses_its_group():
    def body(rank, communicator, stream):
        memory = put(np.ones(8, np.float32))
        assert code_of("ncclGroupEnd") == INVALID_USAGE
        call("ncclGroupStart")
        call("ncclAllReduce", memory, memory, 8, FLOAT32, 0, communicator, stream)
        assert code_of("ncclAllReduce", memory, memory, 9, FLOAT32, 0, communicator, stream) == INVALID_ARGUMENT
        assert "too short" in last_error()
        assert code_of("ncclGroupEnd") == INVALID_ARGUMENT
        gpu_double.control().set_failures("ncclGroupEnd:1:3")
        call("ncclGroupStart")
        call("ncclAllReduce", memory, memory, 8, FLOAT32, 0, communicator, stream)
        assert code_of("ncclGroupEnd") == 3
        require_equal(allreduced(communicator, stream, np.ones(8, np.float32)), np.full(8, 2, np.float32))
        require_equal(get(memory, 8, np.float32, stream), np.ones(8, np.float32))

    on_ranks(2, body)


@doubled
def test_wrong_buffers_streams_and_communicators_are_refused():
    def body(rank, communicator, stream):
        memory, host = put(np.ones(8, np.float32)), np.ones(8, np.float32)

        def allreduce(send=memory, receive=memory, count=8, of=communicator, on=stream, dtype=FLOAT32):
            return code_of("ncclAllReduce", send, receive, count, dtype, 0, of, on)

        assert allreduce(send=host.ctypes.data) == INVALID_ARGUMENT
        assert allreduce(receive=host.ctypes.data) == INVALID_ARGUMENT
        assert allreduce(count=9) == INVALID_ARGUMENT
        assert allreduce(dtype=10) == INVALID_ARGUMENT
        assert allreduce(of=communicator + 1) == INVALID_ARGUMENT
        assert allreduce(on=4711) == 1
        assert code_of("ncclBroadcast", memory, memory, 8, FLOAT32, 1, communicator, stream) == INVALID_ARGUMENT
        assert allreduce(send=call("cuMemHostAlloc", 32, 0)) == 0
        call("cuStreamSynchronize", stream)
        open_gpu(1)
        assert allreduce(send=put(host)) == INVALID_ARGUMENT
        assert allreduce(on=call("cuStreamCreate", 1)) == 1
        assert allreduce() == 0
        call("ncclCommDestroy", communicator)
        assert allreduce() == INVALID_ARGUMENT

    on_ranks(1, body)


@doubled
def test_a_dead_peer_makes_collectives_hang_until_they_are_aborted():
    def body(rank, communicator, stream, folder):
        memory = put(np.ones(8, np.float32))
        call("ncclAllReduce", memory, memory, 8, FLOAT32, 0, communicator, stream)
        call("cuStreamSynchronize", stream)
        (folder / str(rank)).touch()
        if rank == 1:
            time.sleep(60)
        while not (folder / "killed").exists():
            time.sleep(0.002)
        for _ in range(2):
            call("ncclAllReduce", memory, memory, 8, FLOAT32, 0, communicator, stream)
        call("cuMemsetD8Async", memory, 0, 4, stream)
        time.sleep(0.1)
        assert code_of("cuStreamQuery", stream) == NOT_READY
        assert error_of(communicator) == 0
        begin = time.monotonic()
        call("ncclCommAbort", communicator)
        call("cuStreamSynchronize", stream)
        require_within(1, begin)
        require_equal(get(memory, 2, np.float32, stream), np.array([0, 2], np.float32))

    _kill_rank_1(body)


@doubled
def test_a_split_ends_when_its_communicator_is_aborted():
    def body(rank, communicator, stream, folder):
        (folder / str(rank)).touch()
        if rank == 1:
            time.sleep(60)
        while not (folder / "killed").exists():
            time.sleep(0.002)
        aborting = threading.Timer(0.1, call, ("ncclCommAbort", communicator))
        aborting.start()
        assert code_of("ncclCommSplit", communicator, 0, 0, 0) == 3
        assert "aborted" in last_error()
        aborting.join()

    _kill_rank_1(body)


@doubled
def test_ranks_that_do_not_come_are_not_waited_for_longer_than_was_asked():
    def body(rank):
        open_gpu()
        begin, unique_id = time.monotonic(), new_unique_id()
        assert len(_open_places()) == 1
        with pytest.raises(Refused, match="answered 2"):
            new_communicator(unique_id, 0, 2)
        assert 0.2 <= time.monotonic() - begin < 5
        assert "in time" in last_error()
        assert not _open_places()

    run(1, body, join_timeout_s=0.2)


@doubled
def test_two_ranks_share_a_gpu_from_nccl_2_30_on_where_it_is_enabled():
    def body(rank, ids):
        open_gpu()
        try:
            communicator = new_communicator(_unique_id(rank, ids, 2), rank, 2)
        except Refused as refused:
            assert "Duplicate GPU" in last_error()
            return refused.code
        require_equal(allreduced(communicator, 0, np.ones(8, np.float32)), np.full(8, 2, np.float32))
        return 0

    for version, enabled, expected in [(22703, 1, 5), (23000, 0, 5), (23000, 1, 0)]:
        settings = {"nccl_version": version, "NCCL_MULTI_RANK_GPU_ENABLE": enabled}
        assert run(2, body, SimpleQueue(), **settings) == [expected, expected]


@doubled
def test_a_destroyed_communicator_has_finished():
    def body(rank, communicator, stream):
        memory = put(np.full(8, rank + 1, np.int32))
        gpu_double.control().set_delay_us(SLOW_US)
        call("ncclAllReduce", memory, memory, 8, 2, 0, communicator, stream)
        call("ncclCommDestroy", communicator)
        assert code_of("cuStreamQuery", stream) == 0

    on_ranks(2, body)


def _kill_rank_1(body):
    """Kill it when both ranks have said that they are there, in a folder which then tells the other one."""
    with tempfile.TemporaryDirectory() as name, running(2, _joined, SimpleQueue(), 2, body, Path(name)) as processes:
        folder, deadline = Path(name), time.monotonic() + 20
        while not ((folder / "0").exists() and (folder / "1").exists()):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        processes.kill(1)
        (folder / "killed").touch()
        processes.results()
