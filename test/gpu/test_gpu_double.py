"""The doubles of the CUDA driver and of NCCL behave as the real ones do, as far as ringtrain's tests build on it."""

import ctypes
import functools
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


def alone(**settings):
    """The body runs in one such process, with these settings of the doubles."""

    def in_a_process(body):
        @doubled
        @functools.wraps(body)
        def test():
            run(1, lambda _: body(), **settings)

        return test

    return in_a_process


def new_stream():
    return call("cuStreamCreate", NON_BLOCKING)


def is_ready(event):
    return {0: True, NOT_READY: False}[code_of("cuEventQuery", event)]


def record(stream):
    event = call("cuEventCreate", DISABLE_TIMING)
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


@alone()
def test_a_call_without_initialisation_gpu_or_context_is_refused():
    assert code_of("cuDeviceGetCount") == 3
    call("cuInit", 0)
    assert code_of("cuDevicePrimaryCtxRetain", 4) == 101
    assert code_of("cuMemAlloc_v2", 8) == 201
    assert code_of("cuStreamCreate", 0) == 201
    open_gpu(3)
    assert code_of("cuStreamCreate", 0) == 0


@doubled
def test_without_a_gpu_there_is_no_driver():
    assert run(1, lambda _: code_of("cuInit", 0), gpus=0) == [100]
    assert run(1, lambda _: code_of("cuInit", 0), CUDA_VISIBLE_DEVICES="") == [100]


@doubled
def test_a_forked_child_cannot_use_the_driver_of_its_parent():
    def body(_):
        open_gpu()
        return run(1, lambda _: (code_of("cuInit", 0), code_of("cuMemAlloc_v2", 8)))

    assert run(1, body) == [[(3, 3)]]


@alone()
def test_contexts_are_a_stack_and_their_end_takes_all_that_is_theirs():
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


@alone(delay_us=SLOW_US)
def test_a_stream_works_in_order_while_the_host_goes_on():
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


@alone(delay_us=SLOW_US)
def test_a_stream_waits_for_the_record_that_was_last_when_it_was_told_to():
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


@doubled
def test_a_wait_that_is_missing_shows():
    def body(_):
        open_gpu()
        memory, first, second = put(np.zeros(4)), new_stream(), new_stream()
        call("cuMemsetD8Async", memory, 1, 8, second)
        call("cuMemsetD8Async", memory, 2, 8, second)
        return get(memory, (8,), np.uint8, first).tolist()

    assert run(1, body, delay_us=SLOW_US) != [[2] * 8]


@alone()
def test_the_legacy_stream_and_blocking_streams_wait_for_each_other():
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


@alone(delay_us=SLOW_US)
def test_a_destroyed_stream_finishes_its_work_and_is_unknown():
    open_gpu()
    stream, kernel = new_stream(), Kernel()
    kernel.launch(stream, "done")
    event = record(stream)
    call("cuStreamDestroy_v2", stream)
    assert code_of("cuStreamSynchronize", stream) == 400
    assert code_of("cuStreamDestroy_v2", stream) == 400
    call("cuEventSynchronize", event)
    assert kernel.seen == ["done"]


@alone()
def test_a_capturing_stream_says_so_and_refuses_work():
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


@alone()
def test_calls_that_are_unsafe_during_a_capture_are_for_relaxed_threads():
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


@alone()
def test_a_host_function_must_not_call_the_driver():
    open_gpu()
    kernel, codes = Kernel(), []
    kernel.launch(0, "called", lambda: codes.append(code_of("cuMemAlloc_v2", 8)))
    call("cuStreamSynchronize", 0)
    assert codes == [800]


@alone(delay_us=SLOW_US)
def test_memory_is_freed_when_all_streams_have_done_with_it():
    open_gpu()
    memory, stream = put(np.arange(8)), new_stream()
    call("cuMemsetD8Async", memory, 1, 64, stream)
    event = record(stream)
    call("cuMemFree_v2", memory)
    assert is_ready(event)


@alone()
def test_wrong_pointers_are_refused():
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
    assert code_of("cuMemcpyAsync", memory, at, 64, 0) == 0
    assert code_of("cuStreamSynchronize", 12345) == 400


@alone(delay_us=SLOW_US)
def test_the_host_waits_for_a_copy_of_pageable_memory_only():
    open_gpu()
    host = np.arange(8)
    memory, stream = put(host), new_stream()
    pinned = call("cuMemHostAlloc", 64, 0)
    call("cuMemcpyDtoHAsync_v2", pinned, memory, 64, stream)
    assert code_of("cuStreamQuery", stream) == NOT_READY
    call("cuMemcpyDtoHAsync_v2", np.empty_like(host).ctypes.data, memory, 64, stream)
    assert code_of("cuStreamQuery", stream) == 0
    require_equal(np.frombuffer((ctypes.c_byte * 64).from_address(pinned), np.int64), host)


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
