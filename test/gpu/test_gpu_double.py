"""The doubles of the CUDA driver and of NCCL behave as the real ones do, as far as ringtrain's tests build on it."""

import ctypes
import os
import signal
import threading
import time

import numpy as np
import pytest
from gpu_calls import (
    DISABLE_TIMING,
    NON_BLOCKING,
    NOT_READY,
    HostFunction,
    call,
    code_of,
    get,
    open_gpu,
    put,
)
from gpu_processes import run, running
from harness import gpu_double
from harness.exact import require_equal

# Each body runs in processes of its own, forked from this one, which never calls the driver itself.
doubled = pytest.mark.ranks(1, env=gpu_double.environment())
SLOW_US = 20_000


def new_stream():
    return call("cuStreamCreate", NON_BLOCKING)


def is_ready(event):
    return {0: True, NOT_READY: False}[code_of("cuEventQuery", event)]


def record(stream, flags=DISABLE_TIMING):
    event = call("cuEventCreate", flags)
    call("cuEventRecord", event, stream)
    return event


class Kernel:
    """A host function on a stream; `seen` says how often each was called."""

    def __init__(self):
        self.seen = []
        self._kept = []

    def launch(self, stream, what, work=lambda: None):
        def function(_):
            work()
            self.seen.append(what)

        self._kept.append(HostFunction(function))
        call("cuLaunchHostFunc", stream, ctypes.cast(self._kept[-1], ctypes.c_void_p).value, 0)


@doubled
def test_gpus_are_those_that_cuda_visible_devices_leaves():
    def uuids(_):
        call("cuInit", 0)
        library = ctypes.CDLL("libcuda.so.1")
        found = []
        for device in range(call("cuDeviceGetCount")):
            uuid = (ctypes.c_ubyte * 16)()
            assert library.cuDeviceGetUuid_v2(uuid, device) == 0
            found.append(bytes(uuid))
        return found

    (every,) = run(1, uuids, gpus=3)
    assert len(set(every)) == 3
    assert run(2, uuids, gpus=3) == [every, every]
    assert not set(every) & set(run(1, uuids, gpus=3, salt="another")[0])
    assert run(1, uuids, gpus=3, CUDA_VISIBLE_DEVICES="2,0")[0] == [every[2], every[0]]
    assert run(1, uuids, gpus=3, CUDA_VISIBLE_DEVICES="1,7,0")[0] == [every[1]]
    digits = every[2].hex()
    name = "GPU-" + "-".join([digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]])
    assert run(1, uuids, gpus=3, CUDA_VISIBLE_DEVICES=name)[0] == [every[2]]


@doubled
def test_a_call_without_initialisation_gpu_or_context_is_refused():
    def body(_):
        assert code_of("cuDeviceGetCount") == 3
        call("cuInit", 0)
        assert code_of("cuDevicePrimaryCtxRetain", 4) == 101
        assert code_of("cuMemAlloc_v2", 8) == 201
        assert code_of("cuStreamCreate", 0) == 201
        open_gpu(3)
        assert code_of("cuStreamCreate", 0) == 0

    run(1, body)
    assert run(1, lambda _: code_of("cuInit", 0), gpus=0) == [100]
    assert run(1, lambda _: code_of("cuInit", 0), CUDA_VISIBLE_DEVICES="") == [100]


@doubled
def test_a_forked_child_cannot_use_the_driver_of_its_parent():
    def body(_):
        open_gpu()
        return run(1, lambda _: (code_of("cuInit", 0), code_of("cuMemAlloc_v2", 8)))

    assert run(1, body) == [[(3, 3)]]


@doubled
def test_contexts_are_a_stack_and_their_end_takes_all_that_is_theirs():
    def body(_):
        first, second = open_gpu(0), call("cuDevicePrimaryCtxRetain", 1)
        call("cuCtxPushCurrent_v2", second)
        memory, stream = put(np.arange(5)), new_stream()
        record(stream)
        assert call("cuCtxPopCurrent_v2") == second
        assert call("cuCtxGetCurrent") == first
        count = gpu_double.control().count
        assert [count(what) for what in ("contexts", "streams", "events", "allocations")] == [2, 1, 1, 1]
        call("cuDevicePrimaryCtxRelease_v2", 1)
        assert [count(what) for what in ("contexts", "streams", "events", "allocations")] == [1, 0, 0, 0]
        assert code_of("cuDevicePrimaryCtxRelease_v2", 1) == 201
        assert code_of("cuCtxSetCurrent", second) == 709
        assert code_of("cuMemFree_v2", memory) == 1

    run(1, body)


@doubled
def test_a_stream_works_in_order_while_the_host_goes_on():
    def body(_):
        open_gpu()
        stream, kernel, may_go_on = new_stream(), Kernel(), threading.Event()
        begin = time.monotonic()
        for number in range(5):
            kernel.launch(stream, number, lambda: may_go_on.wait(20))
        event = record(stream)
        assert not is_ready(event) and not may_go_on.is_set()
        assert code_of("cuStreamQuery", stream) == NOT_READY
        may_go_on.set()
        call("cuEventSynchronize", event)
        assert kernel.seen == [0, 1, 2, 3, 4]
        assert time.monotonic() - begin >= 0.1
        call("cuStreamSynchronize", stream)
        assert code_of("cuStreamQuery", stream) == 0

    run(1, body, delay_us=SLOW_US)


@doubled
def test_a_stream_waits_for_the_record_that_was_last_when_it_was_told_to():
    def body(_):
        open_gpu()
        first, second, kernel = new_stream(), new_stream(), Kernel()
        event = call("cuEventCreate", DISABLE_TIMING)
        call("cuStreamWaitEvent", second, event, 0)  # never recorded: nothing to wait for
        kernel.launch(first, "first")
        call("cuEventRecord", event, first)
        call("cuStreamWaitEvent", second, event, 0)
        call("cuEventDestroy_v2", event)
        kernel.launch(second, "second")
        late = threading.Event()
        kernel.launch(first, "late", late.wait)
        another = record(first)
        call("cuStreamSynchronize", second)
        assert kernel.seen == ["first", "second"]
        assert not is_ready(another)
        late.set()
        call("cuStreamSynchronize", first)
        assert kernel.seen == ["first", "second", "late"]

    run(1, body, delay_us=SLOW_US)


@doubled
def test_a_wait_that_is_missing_shows():
    def body(_):
        open_gpu()
        memory, first, second = put(np.zeros(4)), new_stream(), new_stream()
        call("cuMemsetD8Async", memory, 1, 8, second)
        call("cuMemsetD8Async", memory, 2, 8, second)
        return get(memory, (8,), np.uint8, first).tolist()

    assert run(1, body, delay_us=SLOW_US) != [[2] * 8]


@doubled
def test_the_legacy_stream_and_blocking_streams_wait_for_each_other():
    def body(_):
        open_gpu()
        blocking, free, kernel, late = call("cuStreamCreate", 0), new_stream(), Kernel(), threading.Event()
        kernel.launch(blocking, "blocking", late.wait)
        kernel.launch(0, "legacy")
        kernel.launch(blocking, "behind")
        kernel.launch(2, "thread")
        kernel.launch(free, "free")
        call("cuStreamSynchronize", free)
        assert kernel.seen == ["free"]
        late.set()
        call("cuStreamSynchronize", blocking)
        call("cuStreamSynchronize", 2)
        assert kernel.seen[:3] == ["free", "blocking", "legacy"]
        assert sorted(kernel.seen[3:]) == ["behind", "thread"]

    run(1, body)


@doubled
def test_events_tell_the_time_between_them():
    def body(_):
        open_gpu()
        stream = new_stream()
        begin, end, silent = record(stream, 0), record(stream, 0), record(stream)
        elapsed, library = ctypes.c_float(), ctypes.CDLL("libcuda.so.1")

        def ask(first, last):
            return library.cuEventElapsedTime(ctypes.byref(elapsed), ctypes.c_void_p(first), ctypes.c_void_p(last))

        assert ask(begin, end) == NOT_READY
        call("cuStreamSynchronize", stream)
        assert ask(begin, end) == 0
        assert SLOW_US / 1000 <= elapsed.value < 1000
        assert ask(begin, silent) == 400
        open_gpu(1)
        assert code_of("cuEventRecord", begin, new_stream()) == 400
        call("cuStreamWaitEvent", 0, end, 0)

    run(1, body, delay_us=SLOW_US)


@doubled
def test_a_destroyed_stream_finishes_its_work_and_is_unknown():
    def body(_):
        open_gpu()
        stream, kernel = new_stream(), Kernel()
        kernel.launch(stream, "done")
        event = record(stream)
        call("cuStreamDestroy_v2", stream)
        assert code_of("cuStreamSynchronize", stream) == 400
        assert code_of("cuStreamDestroy_v2", stream) == 400
        call("cuEventSynchronize", event)
        assert kernel.seen == ["done"]

    run(1, body, delay_us=SLOW_US)


@doubled
def test_a_capturing_stream_says_so_and_refuses_work():
    def body(_):
        open_gpu()
        stream, blocking, address = new_stream(), call("cuStreamCreate", 0), put(np.zeros(1))
        assert call("cuStreamIsCapturing", stream) == 0
        gpu_double.control().mark_capturing(stream, True)
        assert call("cuStreamIsCapturing", stream) == 1
        assert code_of("cuStreamSynchronize", stream) == 900
        assert code_of("cuMemsetD8Async", address, 0, 8, stream) == 900
        gpu_double.control().mark_capturing(stream, False)
        assert code_of("cuStreamSynchronize", stream) == 0
        gpu_double.control().mark_capturing(blocking, True)
        assert code_of("cuStreamIsCapturing", 0) == 906

    run(1, body)


@doubled
def test_calls_that_are_unsafe_during_a_capture_are_for_relaxed_threads():
    def body(_):
        open_gpu()
        stream, event = new_stream(), record(0)
        gpu_double.control().mark_capturing(stream, True)
        assert code_of("cuEventQuery", event) == 900
        assert code_of("cuMemAlloc_v2", 8) == 900
        mode = ctypes.c_int(2)
        call("cuThreadExchangeStreamCaptureMode", ctypes.addressof(mode))
        assert mode.value == 0
        assert code_of("cuEventQuery", event) != 900
        assert code_of("cuMemAlloc_v2", 8) == 0

    run(1, body)


@doubled
def test_a_host_function_must_not_call_the_driver():
    def body(_):
        open_gpu()
        kernel, codes = Kernel(), []
        kernel.launch(0, "called", lambda: codes.append(code_of("cuMemAlloc_v2", 8)))
        call("cuStreamSynchronize", 0)
        assert codes == [800]

    run(1, body)


@doubled
def test_memory_has_an_end():
    def body(_):
        open_gpu()
        first = call("cuMemAlloc_v2", 3 * 4096)
        assert code_of("cuMemAlloc_v2", 4097 * 2) == 2
        left, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total)) == 0
        assert (left.value, total.value) == (2 * 4096, 5 * 4096)
        call("cuMemFree_v2", first)
        assert call("cuMemAlloc_v2", 5 * 4096) != first
        open_gpu(1)
        call("cuMemAlloc_v2", 5 * 4096)
        assert gpu_double.control().count("device bytes") == 10 * 4096

    run(1, body, memory=5 * 4096)


@doubled
def test_memory_is_freed_when_all_streams_have_done_with_it():
    def body(_):
        open_gpu()
        memory, stream = put(np.arange(8)), new_stream()
        call("cuMemsetD8Async", memory, 1, 64, stream)
        event = record(stream)
        call("cuMemFree_v2", memory)
        assert is_ready(event)

    run(1, body, delay_us=SLOW_US)


@doubled
def test_wrong_pointers_are_refused():
    def body(_):
        open_gpu()
        host = np.zeros(64, np.uint8)
        at, memory, freed = host.ctypes.data, put(host), put(host)
        call("cuMemFree_v2", freed)
        assert code_of("cuMemFree_v2", freed) == 1
        assert code_of("cuMemFree_v2", memory + 8) == 1
        assert code_of("cuMemcpyDtoHAsync_v2", at, freed, 64, 0) == 1
        assert code_of("cuMemcpyDtoHAsync_v2", at, memory + 1, 64, 0) == 1
        assert code_of("cuMemcpyDtoHAsync_v2", memory, memory, 64, 0) == 1
        assert code_of("cuMemcpyHtoDAsync_v2", memory, memory, 64, 0) == 1
        assert code_of("cuMemcpyHtoDAsync_v2", at, at, 64, 0) == 1
        assert code_of("cuMemcpyDtoDAsync_v2", memory, at, 64, 0) == 1
        assert code_of("cuMemsetD8Async", at, 0, 64, 0) == 1
        assert code_of("cuPointerGetAttribute", 9, at) == 1
        assert call("cuPointerGetAttribute", 9, memory + 7) == 0
        assert call("cuPointerGetAttribute", 2, memory) == 2
        assert code_of("cuMemcpyAsync", memory, at, 64, 0) == 0
        assert code_of("cuStreamSynchronize", 12345) == 400

    run(1, body)


@doubled
def test_pinned_memory_is_counted_and_known():
    def body(_):
        open_gpu()
        count, host = gpu_double.control().count, np.zeros(3000, np.uint8)
        at, pinned = host.ctypes.data, call("cuMemHostAlloc", 1000, 0)
        call("cuMemHostRegister_v2", at, 3000, 0)
        assert code_of("cuMemHostRegister_v2", at + 100, 10, 0) == 712
        assert call("cuPointerGetAttribute", 2, pinned) == call("cuPointerGetAttribute", 2, at + 2999) == 1
        assert count("pinned bytes") == 4000
        call("cuMemHostUnregister", at)
        assert code_of("cuMemHostUnregister", at) == 713
        call("cuMemFreeHost", pinned)
        assert code_of("cuMemFreeHost", pinned) == 1
        assert (count("pinned bytes"), count("most pinned bytes")) == (0, 4000)

    run(1, body)


@doubled
def test_the_host_waits_for_a_copy_of_pageable_memory_only():
    def body(_):
        open_gpu()
        host = np.arange(8)
        memory, stream = put(host), new_stream()
        pinned = call("cuMemHostAlloc", 64, 0)
        call("cuMemcpyDtoHAsync_v2", pinned, memory, 64, stream)
        assert code_of("cuStreamQuery", stream) == NOT_READY
        call("cuMemcpyDtoHAsync_v2", np.empty_like(host).ctypes.data, memory, 64, stream)
        assert code_of("cuStreamQuery", stream) == 0
        require_equal(np.frombuffer((ctypes.c_byte * 64).from_address(pinned), np.int64), host)

    run(1, body, delay_us=SLOW_US)


@doubled
def test_the_host_cannot_touch_guarded_memory():
    def body(_):
        open_gpu()
        memory = put(np.arange(8))
        require_equal(get(memory, (8,), np.int64), np.arange(8))
        view = gpu_double.control().host_view(memory, 64)
        assert ctypes.c_int64.from_address(view + 56).value == 7
        return ctypes.c_int64.from_address(memory).value

    with running(1, body, guard=1) as processes:
        assert processes.signal_of(0) == signal.SIGSEGV
    assert run(1, body) == [0]


@doubled
def test_calls_fail_as_they_were_told(tmp_path):
    def body(rank):
        open_gpu()
        codes = [code_of("cuMemAlloc_v2", 8) for _ in range(4)]
        gpu_double.control().set_failures("cuStreamSynchronize:*:719")
        return [*codes, code_of("cuStreamSynchronize", 0), code_of("cuMemAlloc_v2", 8)]

    assert run(1, body, fail="cuMemAlloc_v2:3:2") == [[0, 0, 2, 0, 719, 0]]
    assert run(1, body, fail="cuMemAlloc_v2:3:2:rank=1", PMI_RANK=0) == [[0, 0, 0, 0, 719, 0]]
    assert run(1, body, fail="cuMemAlloc_v2:1:2:rank=1,cuMemAlloc_v2:4:1", OMPI_COMM_WORLD_RANK=1) == [
        [2, 0, 0, 1, 719, 0]
    ]


@doubled
def test_the_log_has_the_calls_in_their_order(tmp_path):
    def body(_):
        open_gpu()
        memory = call("cuMemAlloc_v2", 24)
        gpu_double.control().set_log("")
        call("cuMemFree_v2", memory)
        return os.getpid()

    (pid,) = run(1, body, log=tmp_path)
    lines = (tmp_path / str(pid)).read_text().splitlines()
    assert lines[:2] == ["cuInit 0", "cuDevicePrimaryCtxRetain 0"]
    assert lines[2].startswith("cuCtxSetCurrent 0x")
    assert lines[3:] == ["cuMemAlloc_v2 24"]


@pytest.mark.ranks(1, env=gpu_double.environment(left_out=["cuMemsetD8Async", "ncclMemAlloc"]))
def test_libraries_lack_the_symbols_that_are_left_out():
    driver, nccl = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnccl.so.2")
    assert hasattr(driver, "cuMemcpyAsync") and not hasattr(driver, "cuMemsetD8Async")
    assert hasattr(nccl, "ncclMemFree") and not hasattr(nccl, "ncclMemAlloc")
