"""Operations on GPUs that repeat in every step are prepared once: exact, in order, and changes are seen. On fakes.

CuPy's arrays are looked at through Python; torch's tensors through DLPack's exchange API, or where torch has none
through Python.
"""

import importlib
import inspect

import numpy as np
import pytest
import repeated_gpu_checks as checks
from exact_torch import TORCH_DTYPES, tensor_of
from harness import gpu_arrays, gpu_double
from harness.gpu_arrays import GPU, STAGED, cupy
from repeated_gpu_checks import ASYNC_WAYS, CHANGES, WAYS, all_are_prepared

import ringtrain as hvd

LIBRARIES = ["cupy", "torch", "torch without the exchange API"]


def library(name, patch):
    """Forgets all that was prepared before, with or without the API."""
    from ringtrain.ops import exchanges, reductions

    reductions._tensors.known.clear()
    exchanges._broadcasts.known.clear()
    if name == "cupy":
        return importlib.import_module("exact_cupy")
    module = importlib.import_module("exact_torch_gpu")
    if name != "torch":
        patch.setattr(importlib.import_module("harness.gpu_tensors").GpuTensor, "__dlpack_c_exchange_api__", None)
    return module


def run(name, check, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        check(library(name, patch), *arguments)


@pytest.mark.ranks(1, 2, 3, env=GPU, fast=[2], slow=[3])
@pytest.mark.parametrize("name", LIBRARIES)
def test_each_repeat_is_exact(name):
    for way in WAYS:
        run(name, checks.check_each_repeat_is_exact, way, "float32")


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_of_all_dtypes_are_prepared(dtype):
    run("torch", checks.check_each_repeat_is_exact, "allreduce_", dtype)


@pytest.mark.ranks(2, env=STAGED)
@pytest.mark.parametrize("name", LIBRARIES)
def test_each_repeat_is_exact_through_host_memory(name):
    run(name, checks.check_each_repeat_is_exact, "allreduce_async_", "float32")


@pytest.mark.ranks(1, 2, env=GPU)
@pytest.mark.parametrize("name", LIBRARIES)
def test_ways_to_repeat(name):
    run(name, checks.check_many_in_flight)
    run(name, checks.check_weights_and_priorities)
    run(name, checks.check_broadcasts)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_change_is_seen(name, change):
    for way in WAYS:
        run(name, checks.check_a_change_is_seen, way, change)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_name_goes_from_host_memory_to_a_gpu_and_back(name):
    for way in WAYS:
        run(name, checks.check_host_memory_and_a_gpu_take_turns, way, np.copy if name == "cupy" else tensor_of)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_repeat_lies_between_the_kernels_of_its_stream(name, way):
    run(name, checks.check_it_lies_between_the_kernels_of_its_stream, way)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_the_host_does_not_wait_for_the_gpu(name, way):
    run(name, checks.check_the_host_does_not_wait, way)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_the_stream_that_waits_is_the_one_that_is_current_then(name, way):
    run(name, checks.check_the_stream_that_waits_is_the_one_that_is_current_then, way)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_memory_of_a_dropped_array_is_not_used_again_meanwhile(name, way):
    run(name, checks.check_memory_of_a_dropped_array_is_not_used_again_meanwhile, way)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_dropped_array_is_kept_while_it_is_in_use(name):
    run(name, checks.check_a_dropped_array_is_kept)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("way", ASYNC_WAYS)
def test_the_default_stream_of_a_thread_is_another_one_in_each_thread(way):
    """So memory of it is kept until the operation is over, whichever stream waits."""
    import exact_cupy

    start, name = WAYS[way](), f"repeated: of thread {way}"
    checks.prepare(exact_cupy, start, name, (64,))
    with cupy.cuda.Stream.ptds, all_are_prepared():
        mine = exact_cupy.on_gpu(np.ones(64))
        exact_cupy.keep_busy(checks.SLOW_S / 4)
        mine += 1
        assert start(mine, name)() is mine
        exact_cupy.require_on_gpu(mine + 1, np.full(64, 2.0 * hvd.size() + 1))


@pytest.mark.ranks(1, env=GPU)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_repeat_cannot_be_captured(name, way):
    def check(of):
        start = WAYS[way]()
        checks.prepare(of, start, "repeated: captured", (1000,))
        captured = cupy.cuda.Stream()
        mine = of.on_gpu(np.ones(1000))
        gpu_double.control().mark_capturing(captured.ptr, True)
        try:
            for stream in (captured, cupy.cuda.Stream.null):
                with all_are_prepared(), stream, pytest.raises(ValueError, match="is being captured into a CUDA graph"):
                    start(mine, "repeated: captured")()
        finally:
            gpu_double.control().mark_capturing(captured.ptr, False)
        with all_are_prepared():
            start(mine, "repeated: captured")()
        of.require_on_gpu(mine, np.ones(1000))

    run(name, check)


@pytest.mark.ranks(2, env=gpu_arrays.environment(gpus=2, guard=1))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LIBRARIES)
def test_an_array_on_the_gpu_of_another_rank_is_refused_on_the_line_of_the_call(name, way):
    def check(of):
        start = WAYS[way]()
        checks.prepare(of, start, "repeated: elsewhere", (9,))
        other = 1 - hvd.rank()
        with cupy.cuda.Device(other):
            elsewhere = cupy.ones(9) if name == "cupy" else gpu_tensor_of(np.ones(9))
        line = inspect.currentframe().f_lineno + 2
        with pytest.raises(ValueError, match=f"an array is on GPU {other}, but this rank works on GPU") as raised:
            start(elsewhere, "repeated: elsewhere")()
        assert any(entry.lineno == line - 1 for entry in raised.traceback)
        mine = of.on_gpu(np.ones(9))
        start(mine, "repeated: elsewhere")()
        of.require_on_gpu(mine, np.full(9, 2.0))

    run(name, check)


def gpu_tensor_of(array):
    return importlib.import_module("harness.gpu_tensors").to_gpu(tensor_of(array))


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_repeat_on_a_gpu_here_and_in_host_memory_there_is_a_mismatch(name):
    def check(of):
        checks.prepare(of, WAYS["allreduce_async_"](), "repeated: mixed", (4,))
        mine = of.on_gpu(np.ones(4)) if hvd.rank() == 0 else np.ones(4)
        with pytest.raises(hvd.MismatchError, match='allreduce "repeated: mixed"'):
            hvd.allreduce_(mine, op=hvd.Sum, name="repeated: mixed")
        mine = of.on_gpu(np.ones(4))
        hvd.allreduce_(mine, op=hvd.Sum, name="repeated: mixed")
        of.require_on_gpu(mine, np.full(4, 2.0))

    run(name, check)


@pytest.mark.ranks(1, env=GPU)
def test_a_tensor_is_looked_at_without_python():
    def check(of):
        from ringtrain.arrays import torch as adapter

        checks.prepare(of, WAYS["allreduce_async_"](), "repeated: without Python", (9,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter, "view_in_place", None)
            handle = hvd.allreduce_async_(of.on_gpu(np.ones(9)), op=hvd.Sum, name="repeated: without Python")
        of.require_on_gpu(handle.wait(), np.ones(9))

    run("torch", check)
