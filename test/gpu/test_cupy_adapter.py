"""The adapters of GPU arrays, and the stand-in that the tests of CuPy rest on. No rank sends."""

import copy
import json
import os
import pickle
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
from exact_cupy import keep_busy
from harness import gpu_double
from harness.exact import DTYPES, require_equal
from harness.foreign_arrays import OnlyDlpack, OnlyInterface, UnversionedDlpack
from harness.gpu_arrays import GPU, cupy

from ringtrain import _core
from ringtrain.arrays.adapter import adapter_for


def adapter_of(array):
    adapter = adapter_for(array)
    return adapter, adapter.view_in_place(array)


# CuPy


@pytest.mark.ranks(1, env=GPU)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_says_where_an_array_lies(dtype):
    array = cupy.zeros((3, 4), dtype)
    adapter, view = adapter_of(array)
    expected = (array.data.ptr, _core.DTYPES[dtype.name], (3, 4), 0, 0)
    assert view == adapter.view(array) == expected
    assert adapter.prepare(array) is array
    assert adapter.dtype_name(array) == dtype.name
    part = array[1:]
    assert adapter.view_in_place(part) == (array.data.ptr + 4 * dtype.itemsize, expected[1], (2, 4), 0, 0)


@pytest.mark.ranks(1, env=GPU)
def test_a_view_names_the_current_stream_of_the_arrays_device():
    with cupy.cuda.Device(1):
        there = cupy.ones(3)
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.use()
    adapter, view = adapter_of(there)
    assert view[3:] == (1, stream.ptr)
    assert adapter.stream(there) == stream.ptr
    assert adapter.stream(cupy.ones(3)) == 0
    with cupy.cuda.Stream() as other:
        assert adapter.stream(cupy.ones(3)) == other.ptr
    with cupy.cuda.Device(1):
        cupy.cuda.Stream.null.use()


@pytest.mark.ranks(1, env=GPU)
def test_new_arrays_are_made_on_the_arrays_device():
    with cupy.cuda.Device(1):
        there = cupy.arange(6, dtype="float32").reshape(2, 3)
    adapter = adapter_for(there)
    made = {
        "copy": adapter.prepare(there.T),
        "empty": adapter.empty_like(there),
        "cast": adapter.cast(there, "bfloat16"),
        "splits": adapter.received_splits([1, 2], there),
    }
    assert {name: array.device.id for name, array in made.items()} == dict.fromkeys(made, 1)
    require_equal(adapter.on_host(made["copy"]), np.arange(6, dtype="float32").reshape(2, 3).T)
    require_equal(adapter.on_host(made["cast"]), np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16))
    adapter.assign(there, 2 * np.float32(1))
    assert adapter.is_finite(there)
    assert adapter.on_host(there).tolist() == [[2] * 3] * 2
    assert cupy.cuda.Device().id == 0


@pytest.mark.ranks(1, env=GPU)
def test_an_array_that_is_not_contiguous_is_not_in_place():
    array = cupy.arange(12.0).reshape(3, 4)
    adapter, view = adapter_of(array.T)
    assert view is None and not adapter.is_in_place(array.T) and adapter.is_in_place(array)
    copied = adapter.prepare(array[:, 1:3])
    assert copied.flags.c_contiguous
    require_equal(copied.get(), np.arange(12.0).reshape(3, 4)[:, 1:3])
    assert adapter.view_in_place(array[:0].T) is not None  # nothing is contiguous
    with pytest.raises(ValueError, match="this one was broadcast"):
        adapter.is_in_place(cupy.broadcast_to(cupy.ones(()), (3,)))


@pytest.mark.ranks(1, env=GPU)
def test_the_device_says_what_is_finite():
    large = cupy.full(10, 3e38, "float32")
    adapter = adapter_for(large)
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for value, is_finite in ((1, True), (np.inf, False), (np.nan, False)):
            array = cupy.ones(5).astype(dtype)
            array[3] = value
            assert bool(adapter.is_finite(array)) is is_finite
    assert adapter.is_finite(large) and adapter.is_finite(cupy.arange(3)) and adapter.is_finite(cupy.ones(0))


# Other libraries


@pytest.mark.ranks(1, env=GPU)
@pytest.mark.parametrize("kind", [OnlyDlpack, UnversionedDlpack, OnlyInterface])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_foreign_array_lies_where_its_library_says(dtype, kind):
    if kind is OnlyInterface and dtype == ml_dtypes.bfloat16:
        pytest.skip("the interface has no letter for bfloat16")
    owned = cupy.zeros((4, 6), dtype)[1:]
    adapter = adapter_for(kind(owned))
    borrowed = adapter.prepare(kind(owned))
    assert adapter.view(borrowed) == (owned.data.ptr, _core.DTYPES[dtype.name], (3, 6), 0, 1)
    assert adapter.is_in_place(kind(owned)) and not adapter.is_in_place(kind(owned.T))
    assert adapter.view(adapter.prepare(kind(owned.T)))[2] == (6, 3)
    empty = adapter.prepare(kind(cupy.zeros((0, 2), dtype)))
    assert adapter.view(empty)[1:4] == (_core.DTYPES[dtype.name], (0, 2), 0)
    number = adapter.prepare(kind(cupy.zeros((), dtype)))
    assert adapter.view(number)[2] == () and adapter.view(adapter.rows(number))[2] == (1,)


@pytest.mark.ranks(1, env=GPU)
def test_a_foreign_array_is_read_after_the_work_of_its_library():
    with cupy.cuda.Stream(non_blocking=True) as stream:
        owned = cupy.ones(3)
        keep_busy(0.2)
        adapter = adapter_for(OnlyDlpack(owned))
        assert adapter.view(adapter.prepare(OnlyDlpack(owned)))[4] == 1
        assert adapter.stream(OnlyDlpack(owned)) == -1
        cupy.cuda.Stream.null.synchronize()
        assert stream.done
        with_interface = adapter.prepare(OnlyInterface(owned))
        assert adapter.view(with_interface)[4] == adapter.stream(OnlyInterface(owned)) == stream.ptr
        assert adapter.stream(with_interface) == stream.ptr and adapter.stream(adapter.prepare(OnlyDlpack(owned))) == -1
        assert adapter.stream(OnlyInterface(owned, stream=None)) == -1


@pytest.mark.ranks(1, env=GPU)
def test_operations_that_a_foreign_array_cannot_do_are_refused():
    owned = cupy.ones(3)
    adapter = adapter_for(OnlyDlpack(owned))
    for read_only in (OnlyDlpack(owned, flags=1), OnlyDlpack(owned, flags=2), OnlyInterface(owned, is_read_only=True)):
        with pytest.raises(ValueError, match="read-only"):
            adapter.is_in_place(read_only)
    with pytest.raises(TypeError, match="mask"):
        adapter.prepare(OnlyInterface(owned, mask=owned))
    with pytest.raises(TypeError, match="dtype >f4"):
        adapter.prepare(OnlyInterface(owned, typestr=">f4"))
    with pytest.raises(TypeError, match="type code 5, 32 bits, 1 lanes"):
        adapter.prepare(OnlyDlpack(owned, code=5, bits=32))
    with pytest.raises(TypeError, match="not on a CUDA device"):
        adapter.prepare(OnlyDlpack(owned, device=(1, 0)))
    with pytest.raises(TypeError, match=r"cannot send a str; it takes arrays of numpy, cupy, .*torch, what else"):
        adapter_for("text")


@pytest.mark.ranks(1, env=GPU)
def test_a_foreign_array_is_changed_in_its_own_memory():
    owned = cupy.zeros((2, 3))
    adapter = adapter_for(OnlyDlpack(owned))
    keep_busy(0.05)
    adapter.assign(OnlyDlpack(owned.T), cupy.ones((3, 2)))
    assert cupy.cuda.get_current_stream().done
    assert owned.get().tolist() == [[1] * 3] * 2
    assert adapter.is_finite(OnlyDlpack(owned)) and adapter.dtype_name(OnlyDlpack(owned)) == "float64"
    cast = adapter.cast(adapter.prepare(OnlyDlpack(owned)), "float16")
    assert type(cast) is cupy.ndarray and cast.dtype == np.float16
    assert type(adapter.empty_like(adapter.prepare(OnlyDlpack(owned)))) is cupy.ndarray


def test_a_capsule_of_another_library_is_read_as_it_means_it():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    from ringtrain.arrays import dlpack

    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T[1:]
    for arguments in ({}, {"max_version": (1, 0)}):
        capsule = tensor.__dlpack__(**arguments)
        found, flags = dlpack._tensor_in(capsule)
        assert found.data + found.byte_offset == tensor.data_ptr()
        assert (found.shape[:2], found.strides[:2], found.device_type, flags) == ([2, 2], [1, 3], 1, 0)
        assert dlpack._dtype_of(found.dtype) == ml_dtypes.bfloat16


# The stand-in


@pytest.mark.ranks(1, env=GPU)
def test_the_stand_in_computes_as_numpy():
    host = np.arange(1, 13, dtype="float32").reshape(3, 4)
    array = cupy.asarray(host)
    pairs = [
        (array @ array.T, host @ host.T),
        (2 / (array + 1) - array**2, 2 / (host + 1) - host**2),
        (array.sum(axis=0), host.sum(axis=0)),
        (cupy.maximum(array, 5).mean(), np.maximum(host, 5).mean()),
        (cupy.where(array > 3, array, 0), np.where(host > 3, host, np.float32(0))),
        (array[::-1, 1::2], host[::-1, 1::2]),
        (array[cupy.asarray([2, 0]), cupy.asarray([1, 3])], host[[2, 0], [1, 3]]),
        (array.argmax(axis=1), host.argmax(axis=1)),
        (copy.deepcopy(array), host),
        (pickle.loads(pickle.dumps(array)), host),
        (array.astype("bfloat16"), host.astype(ml_dtypes.bfloat16)),
        (array.ravel().view("uint32"), host.ravel().view("uint32")),
        (cupy.from_dlpack(array.T), host.T),
        (cupy.asarray(OnlyInterface(array[1:])), host[1:]),
    ]
    for on_gpu, expected in pairs:
        require_equal(on_gpu.get(), np.asarray(expected))
    array[1] = 7
    array += 1
    host[1] = 7
    require_equal(array.get(), host + 1)
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(array)
    with pytest.raises(TypeError, match="Unsupported type"):
        array + host


@pytest.mark.ranks(1, env=GPU)
def test_the_stand_in_shows_what_does_not_wait():
    may_go_on = threading.Event()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.zeros(10)
        stream.launch_host_func(may_go_on.wait, 20)
        array += 1
        with cupy.cuda.Stream(non_blocking=True):
            too_early = (array + 0).get()
        assert not may_go_on.is_set() and not stream.done
        may_go_on.set()
        assert array.get().tolist() == [1] * 10
        assert too_early.tolist() != [1] * 10


@pytest.mark.ranks(1, env=GPU)
def test_the_stand_in_gives_freed_memory_to_others_of_the_same_stream():
    first = cupy.ones(100)
    address = first.data.ptr
    del first
    with cupy.cuda.Stream():
        assert cupy.empty(100).data.ptr != address
    again = cupy.empty(100)
    assert again.data.ptr == address and again.get()[0] != 1


@pytest.mark.ranks(1, env=GPU)
def test_the_stand_in_wants_arrays_of_the_current_device():
    with cupy.cuda.Device(1):
        there = cupy.ones(3)
    with pytest.raises(ValueError, match="array device = 1 while current = 0"):
        there + 1
    assert there.copy().device.id == 0


_NAMES = """
import inspect, json, cupy
from cupy import cuda
places = {"cupy": cupy, "cuda": cuda, "runtime": cuda.runtime, "ndarray": cupy.ndarray, "Stream": cuda.Stream,
          "Event": cuda.Event, "Device": cuda.Device, "MemoryPointer": cuda.MemoryPointer}
print(json.dumps({place: [name for name, value in vars(found).items() if not inspect.ismodule(value)]
                  for place, found in places.items()}))
"""


def test_the_stand_in_has_nothing_that_cupy_has_not():
    cupy_itself = pytest.importorskip("cupy", reason="CuPy is not installed in this environment")
    gpu_double.prepare(GPU)
    asked = subprocess.run([sys.executable, "-c", _NAMES], env={**os.environ, **GPU}, capture_output=True, timeout=60)
    names = json.loads(asked.stdout)
    for place, found in names.items():
        itself = cupy_itself if place == "cupy" else getattr(cupy_itself, place, getattr(cupy_itself.cuda, place, None))
        unknown = [name for name in found if not name.startswith("_") and not hasattr(itself, name)]
        assert not unknown, f"{place} has {unknown}"
