"""Training on CuPy arrays: optimizers, gradients, parameters and checks. On fakes."""

import pickle

import exact_cupy
import ml_dtypes
import numpy as np
import pytest
from exact_cupy import keep_busy, on_gpu, require_on_gpu, use_own_gpu
from gpu_checks import SLOW_S, Stopwatch, first_operation
from harness.exact import require_equal
from harness.gpu_arrays import GPU, cupy

import ringtrain as hvd
from ringtrain.optim import SGD, Adam, AdamW

OPTIMIZERS = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Adam(lr=0.1, amsgrad=True),
    AdamW(lr=0.1),
]
IDS = ["sgd", "nesterov", "amsgrad", "adamw"]
START = np.array([[1.0, -2.0, 0.5]])
GRADIENT = np.array([[0.5, -1.0, 2.0]])


def fresh(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.ranks(1, env=GPU)
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=IDS)
def test_an_optimizer_updates_cupy_arrays_as_numpy_ones(optimizer, dtype):
    on_host, on_device = fresh(optimizer), fresh(optimizer)
    host, gradient = START.astype(dtype), GRADIENT.astype(dtype)
    device, device_gradient = on_gpu(host), on_gpu(gradient)
    for _ in range(4):
        on_host.step([host], [gradient])
        on_device.step([device], [device_gradient])
    require_on_gpu(device, host)
    continued = type(optimizer)(lr=1)
    continued.load_state_dict(pickle.loads(pickle.dumps(on_device.state_dict())))
    on_host.step([host], [gradient])
    continued.step([device], [device_gradient])
    require_on_gpu(device, host)
    state = on_device.create_state("weight", device)
    assert all(type(array) is cupy.ndarray for name, array in state.items() if name != "step")


@pytest.mark.ranks(1, 2, 3, env=GPU)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=IDS)
@pytest.mark.parametrize("how", [{}, {"num_groups": 2}, {"backward_passes_per_step": 2}], ids=str)
def test_all_ranks_train_the_same_parameters_on_the_gpu(how, optimizer):
    use_own_gpu()
    params = [on_gpu(np.full((3, 2), 10.0 * hvd.rank())), on_gpu(np.full(2, 1.0 * hvd.rank())), on_gpu(0.0)]
    hvd.broadcast_parameters(params)
    numpy_params = [np.full((3, 2), 0.0), np.full(2, 0.0), np.array(0.0)]
    passes = how.get("backward_passes_per_step", 1)
    distributed = hvd.DistributedOptimizer(fresh(optimizer), op=hvd.Sum, **how)
    alone = fresh(optimizer)
    for step in range(3):
        for _ in range(passes):
            gradients = [param * 0 + hvd.rank() + step for param in params]
            distributed.step(params, gradients)
        total = passes * sum(rank + step for rank in range(hvd.size()))
        alone.step(numpy_params, [np.full(param.shape, float(total)) for param in numpy_params])
    for param, expected in zip(params, numpy_params, strict=True):
        require_on_gpu(param, expected)
    hvd.check_replicas(params)


@pytest.mark.ranks(2, env=GPU)
def test_averages_are_left_in_the_gradients_also_in_strided_ones():
    optimizer = hvd.DistributedOptimizer(SGD(lr=0.0))
    gradients = [on_gpu(np.full(4, 2.0 * hvd.rank())), on_gpu(np.full((3, 2), 2.0 * hvd.rank()))[:, 0]]
    optimizer.step([on_gpu(np.zeros(4)), on_gpu(np.zeros(3))], gradients)
    require_on_gpu(gradients[0], np.full(4, 1.0))
    require_on_gpu(gradients[1], np.full(3, 1.0))


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_float16_gradients_near_the_maximum_do_not_overflow(compression):
    largest = np.full(100, 60_000, "float32")
    optimizer = hvd.DistributedOptimizer(
        SGD(lr=1.0), compression=getattr(hvd.Compression, compression), gradient_predivide_factor=2.0
    )
    param, gradient = on_gpu(np.zeros(100, "float32")), on_gpu(largest)
    optimizer.step([param], [gradient])
    expected = largest.astype("float16" if compression == "fp16" else ml_dtypes.bfloat16).astype("float32")
    require_on_gpu(gradient, expected)
    require_on_gpu(param, -expected)


@pytest.mark.ranks(1, 2, env=GPU)
def test_a_step_does_not_let_the_host_wait():
    first_operation(exact_cupy)
    optimizer = hvd.DistributedOptimizer(Adam(lr=0.1))
    params = [cupy.zeros(50), cupy.zeros((4, 4))]
    optimizer.step(params, [cupy.ones(50), cupy.ones((4, 4))])
    gradients = [cupy.ones(50), cupy.ones((4, 4))]
    keep_busy(SLOW_S)
    with Stopwatch() as host:
        optimizer.step(params, gradients)
    assert host.seconds < SLOW_S / 2


@pytest.mark.ranks(1, 2, 3, env=GPU)
def test_a_tree_of_arrays_here_and_there_is_broadcast():
    root = hvd.size() - 1

    def tree_of(rank):
        return {"scale": np.array(float(rank)), "layers": ({"weight": np.arange(6.0).reshape(2, 3) + 10 * rank},)}

    mine = {"on host": tree_of(hvd.rank()), "on gpu": tree_of(hvd.rank())}
    mine["on gpu"]["scale"] = on_gpu(mine["on gpu"]["scale"])
    mine["on gpu"]["layers"][0]["weight"] = on_gpu(mine["on gpu"]["layers"][0]["weight"])
    hvd.broadcast_parameters(mine, root_rank=root)
    require_on_gpu(mine["on gpu"]["scale"], np.float64(root))
    require_on_gpu(mine["on gpu"]["layers"][0]["weight"], tree_of(root)["layers"][0]["weight"])
    require_equal(mine["on host"]["layers"][0]["weight"], tree_of(root)["layers"][0]["weight"])


@pytest.mark.ranks(2, env=GPU)
def test_an_object_may_have_cupy_arrays_in_it():
    received = hvd.broadcast_object({"weight": on_gpu(np.arange(3))} if hvd.rank() == 0 else None)
    require_on_gpu(received["weight"], np.arange(3))


@pytest.mark.ranks(3, env=GPU)
@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16], ids=str)
def test_parameters_that_differ_are_named(dtype):
    same = on_gpu(np.arange(5).astype(dtype))
    weight = on_gpu(np.arange(12).reshape(3, 4).astype(dtype))
    hvd.check_replicas({"same": same, "weight": weight.T})
    if hvd.rank() == 1:
        weight[1, 2] = 7
    message = r'parameter "weight" is .* rank 1 differs from ranks 0, 2; on rank 1 first at \[2, 1\]: 7\S* instead of 6'
    with pytest.raises(hvd.ReplicaError, match=message):
        hvd.check_replicas({"same": same, "weight": weight.T})
    optimizer = hvd.DistributedOptimizer(SGD(0.1), {"same": None, "weight": None}, check_every=1)
    with pytest.raises(hvd.ReplicaError, match='parameter "weight"'):
        optimizer.step([same, weight], [same * 0, weight * 0])


@pytest.mark.ranks(2, env=GPU)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_named_and_not_used(value):
    weights = [on_gpu(np.ones(2)), on_gpu(np.ones(3))]
    optimizer = hvd.DistributedOptimizer(SGD(0.1), {"a": None, "b": None}, nan_check=True)
    bad = value if hvd.rank() == 1 else 1.0
    with pytest.raises(hvd.NonFiniteError, match='gradient of "b" is NaN or infinite on rank 1 in step 1'):
        optimizer.step(weights, [on_gpu(np.zeros(2)), on_gpu(np.array([0.0, bad, 0.0]))])
    for weight in weights:
        require_on_gpu(weight, np.ones(weight.shape))
