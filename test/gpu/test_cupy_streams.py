"""CuPy's streams: ringtrain reads after what was put into them, they go on after its result, and the host never waits.

The kernels here sleep, so what does not wait for them sees rubbish. On fakes.
"""

import os
import threading
import time

import exact_cupy
import numpy as np
import pytest
from exact_cupy import keep_busy, on_gpu, require_on_gpu, use_own_gpu
from gpu_checks import (
    SLOW_S,
    Stopwatch,
    check_an_operation_lies_between_the_kernels_of_its_stream,
    first_operation,
)
from harness import gpu_double
from harness.gpu_arrays import GPU, cupy

import ringtrain as hvd
from ringtrain.training.gradient_batch import GradientBatch


def new_streams():
    return [cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(), cupy.cuda.Stream.null, cupy.cuda.Stream.ptds]


@pytest.mark.ranks(1, 2, 3, fast=[2], env=GPU)
@pytest.mark.parametrize("which", range(4), ids=["non-blocking", "blocking", "default", "per thread"])
def test_an_operation_lies_between_the_kernels_of_its_stream(which):
    first_operation(exact_cupy)
    with new_streams()[which]:
        check_an_operation_lies_between_the_kernels_of_its_stream(exact_cupy)


@pytest.mark.ranks(1, 2, env=GPU)
@pytest.mark.parametrize("groups", [[], [["first", "second"]]], ids=["alone", "in another group"])
def test_a_gradient_of_another_stream_that_waited_for_its_group_is_read_when_it_is_there(groups):
    first_operation(exact_cupy)
    batch, first, second = GradientBatch(), on_gpu(np.zeros(99)), on_gpu(np.zeros(99))
    cupy.cuda.get_current_stream().synchronize()
    batch.group([["first", "never ready"]])
    with cupy.cuda.Stream(non_blocking=True):
        keep_busy(SLOW_S)
        first += hvd.rank() + 1
        batch.ready("first", first)
    batch.group(groups)  # from the stream of the script, which has nothing to wait for
    second += hvd.rank() + 1
    batch.ready("second", second)
    averages = batch.wait()
    for average in averages.values():
        require_on_gpu(average, np.full(99, (hvd.size() + 1) / 2))
    assert len(averages) == 2


@pytest.mark.ranks(1, 2, env=GPU)
def test_compression_does_not_let_the_host_wait():
    first_operation(exact_cupy)
    mine = cupy.ones(64, "float32")
    keep_busy(SLOW_S)
    with Stopwatch() as host:
        hvd.allreduce_(mine, op=hvd.Sum, compression=hvd.Compression.fp16)
        hvd.grouped_allreduce_([mine, mine[::2]], op=hvd.Sum, compression=hvd.Compression.bf16)
    assert host.seconds < SLOW_S / 2


@pytest.mark.ranks(1, 2, env=GPU)
def test_a_slow_rank_keeps_only_the_gpus_of_the_others():
    first_operation(exact_cupy)
    mine = cupy.ones(64)
    if hvd.rank() == hvd.size() - 1:
        keep_busy(SLOW_S)
    with Stopwatch() as host:
        hvd.allreduce_(mine, op=hvd.Sum)
        mine += 1
    assert host.seconds < SLOW_S / 2
    require_on_gpu(mine, np.full(64, hvd.size() + 1.0))


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.bf16])
def test_a_group_of_gradients_waits_for_the_streams_of_all(compression):
    batch, first, second = GradientBatch(compression=compression), on_gpu(np.zeros(99)), on_gpu(np.zeros(99))
    cupy.cuda.get_current_stream().synchronize()
    batch.group([["first", "second"]])
    with cupy.cuda.Stream(non_blocking=True):
        keep_busy(0.2)
        first += hvd.rank()
        batch.ready("first", first)
    second += 2 * hvd.rank()
    batch.ready("second", second)
    averages = batch.wait()
    require_on_gpu(averages["first"], np.full(99, 0.5))
    require_on_gpu(averages["second"], np.full(99, 1.0))


@pytest.mark.ranks(1, 2, env=GPU)
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_memory_is_not_used_again_while_an_operation_reads_it(compression):
    first_operation(exact_cupy)
    begun_in, ended_in = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with begun_in:
        strided = [cupy.ones((64, 2), "float32")[:, 0] for _ in range(3)]
        begun_in.synchronize()
    with ended_in:
        if hvd.rank() == hvd.size() - 1:
            keep_busy(SLOW_S)
        before = hvd.allreduce_async(cupy.ones(8), name="before")  # which the others stand behind
    how = {"op": hvd.Sum, "compression": getattr(hvd.Compression, compression)}
    with begun_in:  # copies are made here
        handles = [hvd.allreduce_async(strided[0], **how), hvd.grouped_allreduce_async(strided[1:], **how)]
    with ended_in:
        one, others = map(hvd.synchronize, handles)
        hvd.synchronize(before)
        del handles, before
    with begun_in:  # which does not wait, and takes what CuPy's pool has for it
        _rubbish = [cupy.empty(64, dtype) for dtype in ("float16", "float32") for _ in range(8)]
    with ended_in:
        for result in (one, *others):
            require_on_gpu(result, np.full(64, hvd.size(), "float32"))


@pytest.mark.ranks(2, env=GPU)
def test_a_handle_that_is_dropped_keeps_its_arrays():
    first_operation(exact_cupy)
    for number in range(20):
        keep_busy(0.005)
        hvd.allreduce_async_(cupy.ones(500), name=f"dropped {number}")
    mine = cupy.ones(500)
    require_on_gpu(hvd.allreduce_(mine, op=hvd.Sum), np.full(500, 2.0))


@pytest.mark.ranks(2, env=GPU)
def test_poll_says_when_the_gpu_has_done_it():
    first_operation(exact_cupy)
    mine = cupy.ones(64)
    keep_busy(SLOW_S)
    handle = hvd.allreduce_async_(mine, op=hvd.Sum)
    assert not hvd.poll(handle)
    assert hvd.synchronize(handle) is mine
    assert not hvd.poll(handle)
    cupy.cuda.get_current_stream().synchronize()
    assert hvd.poll(handle)


@pytest.mark.ranks(2, env=GPU)
def test_threads_have_streams_and_devices_of_their_own():
    first_operation(exact_cupy)
    results = {}

    def work(number):
        use_own_gpu()
        with cupy.cuda.Stream(non_blocking=True):
            mine = cupy.zeros(100)
            keep_busy(0.05)
            mine += number
            results[number] = hvd.allreduce(mine, op=hvd.Sum, name=f"{number}").get()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((results[number] == 2 * number).all() for number in range(4))


@pytest.mark.ranks(1, env=GPU)
def test_the_current_device_and_context_stay_what_they_were():
    first_operation(exact_cupy)
    mine = cupy.ones(3)
    with cupy.cuda.Device(1):
        elsewhere = cupy.ones(3)
        hvd.allreduce_(mine, name="another device is current")
        hvd.allreduce(mine[::2], name="another device is current, and the array is copied")
        assert cupy.cuda.Device().id == 1
        assert elsewhere.get().tolist() == [1, 1, 1]
    assert mine.get().tolist() == [1, 1, 1]
    assert cupy.cuda.Device().id == 0


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_nothing_passes_through_the_host(compression, tmp_path):
    first_operation(exact_cupy)
    mine = on_gpu(np.ones(1000, "float32"))
    cupy.cuda.get_current_stream().synchronize()
    gpu_double.control().set_log(tmp_path)
    hvd.allreduce_(mine, op=hvd.Sum, compression=getattr(hvd.Compression, compression))
    hvd.allreduce(mine, compression=getattr(hvd.Compression, compression))
    cupy.cuda.get_current_stream().synchronize()
    gpu_double.control().set_log("")
    calls = (tmp_path / f"{os.getpid()}").read_text().splitlines()
    assert any(call.startswith("ncclAllReduce") for call in calls)
    assert not [call for call in calls if call.startswith(("cuMemcpyDtoH", "cuMemcpyHtoD", "cuMemcpyAsync"))]


# While streams are captured into CUDA graphs


@pytest.mark.ranks(1, 2, env=GPU)
@pytest.mark.parametrize("dtype", ["float32", "int16"], ids=["nccl", "staged"])
def test_operations_go_on_while_another_stream_is_captured(dtype):
    first_operation(exact_cupy)
    mine = cupy.ones(1000, dtype)
    captured = cupy.cuda.Stream(non_blocking=True)
    gpu_double.control().mark_capturing(captured.ptr, True)
    try:
        keep_busy(SLOW_S / 4)
        handle = hvd.allreduce_async_(mine, op=hvd.Sum)
        while not hvd.poll(handle):
            time.sleep(1e-3)
        hvd.synchronize(handle)
    finally:
        gpu_double.control().mark_capturing(captured.ptr, False)
    require_on_gpu(mine, np.full(1000, hvd.size(), dtype))


@pytest.mark.ranks(1, env=GPU)
def test_an_operation_cannot_be_captured():
    first_operation(exact_cupy)
    mine, captured = cupy.ones(1000), cupy.cuda.Stream()
    gpu_double.control().mark_capturing(captured.ptr, True)
    try:
        with captured, pytest.raises(ValueError, match="is being captured into a CUDA graph"):
            hvd.allreduce_(mine)
        with cupy.cuda.Stream.null, pytest.raises(ValueError, match="is being captured into a CUDA graph"):
            hvd.allreduce_(mine)
    finally:
        gpu_double.control().mark_capturing(captured.ptr, False)
    hvd.allreduce_(mine)


@pytest.mark.ranks(2, env=GPU)
def test_each_thread_has_a_default_stream_of_its_own():
    first_operation(exact_cupy)

    def submit(name, array, seconds):
        use_own_gpu()
        with cupy.cuda.Stream.ptds:
            keep_busy(seconds)
            array += 1
            handles[name] = hvd.allreduce_async_(array, op=hvd.Sum, name=name)

    for attempt in range(4):
        handles, arrays = {}, [cupy.zeros(1000), cupy.zeros(1000)]
        cupy.cuda.get_current_stream().synchronize()
        # Both are submitted while the engine is at work, so that they are carried out together.
        busy = hvd.allreduce_async_(np.ones(20_000_000, "float32"), name=f"busy {attempt}")
        for array, seconds in zip(arrays, (SLOW_S / 2, 0), strict=True):
            thread = threading.Thread(target=submit, args=(f"{attempt} {seconds}", array, seconds))
            thread.start()
            thread.join()
        hvd.synchronize(busy)
        for array, handle in zip(arrays, handles.values(), strict=True):
            hvd.synchronize(handle)
            require_on_gpu(array, np.full(1000, 2.0))
