"""Stores of arrays on GPUs, of CuPy and of what knows DLPack. On fakes."""

import numpy as np
import pytest
from exact_cupy import on_gpu, require_on_gpu, use_own_gpu
from harness.exact import require_equal
from harness.foreign_arrays import OnlyDlpack, OnlyInterface
from harness.gpu_arrays import GPU, STAGED, cupy, environment
from kvstore_model import Model, Program

from ringtrain import kvstore

TWO_GPUS = environment(guard=1, gpus=2)


def run_program(kind, dtype, updates, seed):
    kv = kvstore.create(kind)
    is_distributed = "dist" in kind or kind == "horovod"
    model = Model(kv.num_workers, updates, is_distributed)
    keys = ["a", "b", "c", "d", "e"]
    Program(kv, model, seed, np.dtype(dtype), keys, on_gpu, lambda array: array.get()).run(15)
    if is_distributed:
        kv.barrier()


@pytest.mark.ranks(1, env=GPU)
@pytest.mark.parametrize("kind", ["local", "device", "nccl"])
def test_random_programs_in_one_process(kind):
    run_program(kind, "float32", True, 1)
    run_program(kind, "int32", False, 2)


@pytest.mark.ranks(1, 2, 3, fast=[2], env=GPU)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_sync_device", "horovod"])
def test_random_programs_of_sums(kind):
    run_program(kind, "float32", False, 3)


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_device_sync"])
def test_random_programs_of_updates(kind):
    run_program(kind, "float64", True, 4)


@pytest.mark.ranks(2, env=STAGED)
def test_random_programs_through_host_memory():
    run_program("dist_sync_device", "float32", False, 5)


@pytest.mark.ranks(1, env=TWO_GPUS)
def test_keys_are_spread_over_the_devices_the_largest_first():
    kv = kvstore.create("device")
    sizes = {"a": 10, "b": 400, "c": 300, "d": 90}
    values = {key: [] for key in sizes}
    for key, size in sizes.items():
        kv.init(key, np.zeros(size, "float32"))
        for device in (0, 1):
            with cupy.cuda.Device(device):
                values[key].append(cupy.full(size, device + 1, "float32"))
    kv.push(list(sizes), list(values.values()))
    for key in sizes:
        kv.pull(key, out=values[key])
        for device, value in enumerate(values[key]):
            assert value.device.id == device
            require_equal(value.get(), np.full(sizes[key], 3, "float32"))
    assert {key: kv._backend.entries[key].stored.device.id for key in sizes} == {"b": 0, "c": 1, "d": 1, "a": 1}


@pytest.mark.ranks(1, env=TWO_GPUS)
@pytest.mark.parametrize("kind", ["local", "device"])
def test_values_of_two_devices_are_summed_and_come_back_to_both(kind):
    kv = kvstore.create(kind)
    kv.init(0, np.zeros(5))
    arrays = []
    for device in (0, 1):
        with cupy.cuda.Device(device):
            arrays.append(cupy.full(5, device + 1.0))
    for expected in (3.0, 6.0):
        kv.pushpull(0, arrays)
        for array in arrays:
            require_equal(array.get(), np.full(5, expected))


@pytest.mark.ranks(1, 2, env=GPU)
@pytest.mark.parametrize("foreign", [OnlyDlpack, OnlyInterface])
@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist_sync_device"])
def test_arrays_of_other_libraries(kind, foreign):
    kv = kvstore.create(kind)
    owned = on_gpu(np.full(7, 2.0))
    kv.init("a", foreign(owned))
    kv.push("a", foreign(owned))
    out = on_gpu(np.zeros(7))
    kv.pull("a", out=foreign(out))
    require_on_gpu(out, np.full(7, 2.0 * kv.num_workers))
    kv.push("a", [foreign(owned), foreign(owned)])
    kv.pushpull("a", foreign(owned), out=foreign(out))
    require_on_gpu(out, np.full(7, 2.0 * kv.num_workers))


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_sync_device"])
def test_an_optimizer_updates_values_on_gpus(kind):
    use_own_gpu()
    kv = kvstore.create(kind)
    kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
    weight = on_gpu(np.full(5, 10.0, "float32"))
    kv.init(0, weight)
    for expected in (9.0, 7.5):
        kv.push(0, cupy.ones(5, "float32"))
        kv.pull(0, out=weight)
        require_on_gpu(weight, np.full(5, expected, "float32"))


@pytest.mark.ranks(1, env=GPU)
def test_data_are_split_onto_devices():
    data = on_gpu(np.arange(6.0))
    first, second = kvstore.split_and_load(data, [0, 0])
    require_equal(first.get(), np.arange(3.0))
    require_equal(second.get(), np.arange(3.0, 6.0))
    with pytest.raises(ValueError, match="CuPy has no device 99"):
        kvstore.split_and_load(data, [0, 99])


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist_sync_device", "horovod"])
def test_tensors_of_torch(kind):
    pytest.importorskip("torch")
    from exact_torch_gpu import on_gpu, require_on_gpu

    kv = kvstore.create(kind)
    values, out = np.full(50, 2.0, "float32"), on_gpu(np.zeros(50, "float32"))
    kv.init("a", on_gpu(values))
    kv.push("a", [on_gpu(values), on_gpu(values)])
    kv.pull("a", out=out)
    require_on_gpu(out, 2 * kv.num_workers * values)
    kv.pushpull("a", on_gpu(values), out=out)
    require_on_gpu(out, kv.num_workers * values)
    kv.pushpull("a", out)
    require_on_gpu(out, kv.num_workers * kv.num_workers * values)
