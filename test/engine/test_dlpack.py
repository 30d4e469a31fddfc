"""Operations on arrays of libraries that show DLPack or `__cuda_array_interface__` only. On fakes."""

import sys

import numpy as np
import pytest
from exact_cupy import keep_busy, on_gpu, require_on_gpu
from harness.exact import DTYPE_OF_EACH_SIZE, data, data_of_ranks, reference, require_equal
from harness.foreign_arrays import OnlyDlpack, OnlyInterface, UnversionedDlpack
from harness.gpu_arrays import GPU, cupy

import ringtrain as hvd
from ringtrain.arrays.adapter import adapter_for

KINDS = [OnlyDlpack, UnversionedDlpack, OnlyInterface]


@pytest.mark.ranks(1, 2, 3, env=GPU)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_SIZE, ids=str)
def test_every_operation(dtype, kind):
    if kind is OnlyInterface and dtype.name == "bfloat16":
        pytest.skip("the interface has no letter for bfloat16")
    size, rank = hvd.size(), hvd.rank()
    everybody = data_of_ranks(size, (size * 3, 2), dtype)
    total = reference("sum", everybody)
    owned = on_gpu(everybody[rank])
    require_on_gpu(hvd.allreduce(kind(owned), op=hvd.Sum), total)
    require_on_gpu(hvd.allgather(kind(owned)), np.concatenate(everybody))
    require_on_gpu(hvd.reducescatter(kind(owned), op=hvd.Sum), np.array_split(total, size)[rank])
    require_on_gpu(hvd.broadcast(kind(owned), size - 1), everybody[-1])
    require_on_gpu(hvd.alltoall(kind(owned)), np.concatenate([np.split(one, size)[rank] for one in everybody]))
    require_on_gpu(hvd.allgather(kind(on_gpu(np.asarray(everybody[rank][0, 0])))), [one[0, 0] for one in everybody])
    require_on_gpu(owned, everybody[rank])
    foreign = kind(owned)
    assert hvd.allreduce_(foreign, op=hvd.Sum) is foreign
    require_on_gpu(owned, total)


@pytest.mark.ranks(1, 2, env=GPU)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_strided_and_compressed_arrays_are_changed_in_place(kind, compression):
    compressor = getattr(hvd.Compression, compression)
    owned = on_gpu(data(hvd.rank(), (6, 4), "float32"))
    foreign = [kind(owned[:3]), kind(owned[3:, ::2])]
    hvd.grouped_allreduce_(foreign, op=hvd.Sum, compression=compressor)
    expected = data(hvd.rank(), (6, 4), "float32")
    total = reference("sum", data_of_ranks(hvd.size(), (6, 4), "float32"))
    expected[:3], expected[3:, ::2] = total[:3], total[3:, ::2]
    require_on_gpu(owned, expected)


@pytest.mark.ranks(1, 2, env=GPU)
@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_there_whatever_stream_its_library_uses(kind):
    with cupy.cuda.Stream(non_blocking=True):
        owned = cupy.zeros(100)
        keep_busy(0.1)
        owned += hvd.rank() + 1
        hvd.allreduce_(kind(owned), op=hvd.Sum)
        require_equal((owned + 0).get(), np.full(100, hvd.size() * (hvd.size() + 1) / 2))
    if kind is not OnlyInterface:  # which tells its stream, so that only this one waits
        with cupy.cuda.Stream(non_blocking=True):
            require_equal(owned.get(), np.full(100, hvd.size() * (hvd.size() + 1) / 2))


@pytest.mark.ranks(1, 2, env=GPU)
def test_without_cupy_operations_in_place_work_and_others_are_refused():
    owned = on_gpu(np.full(4, float(hvd.rank())))
    adapter_for(OnlyDlpack(owned))  # which asks CuPy's adapter, once
    with pytest.MonkeyPatch.context() as without_cupy:
        without_cupy.setitem(sys.modules, "ringtrain.arrays.cupy", None)  # so its import fails
        without_cupy.delattr("ringtrain.arrays.cupy", raising=False)
        hvd.allreduce_(OnlyDlpack(owned), op=hvd.Sum)
        hvd.broadcast_(OnlyDlpack(owned), 0)
        hvd.grouped_allreduce_([OnlyDlpack(owned)], op=hvd.Max)
        refused = [hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, lambda one: hvd.broadcast(one, 0)]
        for operation in refused:
            with pytest.raises(TypeError, match="without CuPy"):
                operation(OnlyDlpack(owned))
        with pytest.raises(TypeError, match="without CuPy"):
            hvd.allreduce_(OnlyDlpack(owned[::2]))
    require_equal(owned.get(), np.full(4, float(sum(range(hvd.size())))))


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_such_a_library_are_broadcast(kind):
    class WithShape(kind):
        dtype, shape = np.dtype(np.float32), (4, 2)

    owned = [on_gpu(np.full((4, 2), i + hvd.rank(), np.float32)) for i in range(3)]
    on_host = np.full(3, hvd.rank())
    hvd.broadcast_parameters([*map(WithShape, owned), on_host], root_rank=1)
    for i, array in enumerate(owned):
        require_on_gpu(array, np.full((4, 2), i + 1, np.float32))
    require_equal(on_host, np.full(3, 1))


@pytest.mark.ranks(2, env=GPU)
def test_read_only_arrays_are_read():
    owned = on_gpu(np.full(3, 1.0 + hvd.rank()))
    for read_only in (OnlyDlpack(owned, flags=1), OnlyInterface(owned, is_read_only=True)):
        require_on_gpu(hvd.allreduce(read_only, op=hvd.Sum), np.full(3, 3.0))
        with pytest.raises(ValueError, match="read-only"):
            hvd.allreduce_(read_only)
