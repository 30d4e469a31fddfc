"""Training with PyTorch on a real GPU: autograd's threads and streams, GradScaler, fused optimizers, normalization."""

import numpy as np
import pytest
import torch_gpu_checks
from exact_torch_gpu import on_gpu, require_on_gpu, synchronize
from gpu_checks import SLOW_S, Stopwatch
from harness.frameworks import on_demand
from real_gpus import library, need_gpu, need_nccl
from torch_gpu_checks import WAYS

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")

need_gpu()
NCCL = {"RINGTRAIN_GPU_ALGORITHM": "nccl"}


@pytest.mark.ranks(1, 2, 4, timeout=300)
@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_train_the_same_parameters_as_the_cpu(way):
    library("torch")
    torch_gpu_checks.check_all_ranks_train_as_the_cpu(way)


@pytest.mark.ranks(2, env=NCCL, timeout=300)
@pytest.mark.parametrize("way", ["plain", "compressed", "grouped"])
def test_a_step_does_not_let_the_host_wait(way):
    need_nccl(library("torch"))
    torch_gpu_checks.check_a_step_does_not_let_the_host_wait(way)


@pytest.mark.ranks(2, timeout=300)
def test_gradients_of_another_stream_are_averaged_in_order():
    library("torch")
    torch_gpu_checks.check_gradients_of_another_stream()


@pytest.mark.ranks(2, timeout=300)
def test_the_state_of_an_optimizer_goes_where_each_rank_has_its_own():
    library("torch")
    torch_gpu_checks.check_the_state_of_an_optimizer_goes_where_each_rank_has_its_own()


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("how", [{}, {"fused": True}], ids=["plain", "fused"])
def test_all_ranks_agree_about_an_overflow(how, optimizer):
    library("torch")
    parameter = on_gpu(np.zeros(4, "float32")).requires_grad_()
    wrapped = getattr(torch.optim, optimizer)([parameter], lr=1.0, **how)
    distributed = hvd.DistributedOptimizer(wrapped, named_parameters=[("weight", parameter)])
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for step in range(2):
        distributed.zero_grad()
        factor = float("inf") if step == 0 and hvd.rank() == 1 else 1.0
        scaler.scale((parameter * factor).sum()).backward()
        scaler.unscale_(distributed)
        hvd.clip_grad_norm_([parameter], max_norm=1e9)
        scaler.step(distributed)
        scaler.update()
        if step == 0:
            require_on_gpu(parameter, np.zeros(4, "float32"))
    assert scaler.get_scale() == 2
    assert (parameter < 0).all()
    hvd.check_replicas([parameter])


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_named(value, dtype):
    library("torch")
    parameters = [torch.zeros(5000, dtype=getattr(torch, dtype), device="cuda", requires_grad=True) for _ in range(2)]
    names = zip("ab", parameters, strict=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), names, nan_check=True)
    gradients = [torch.full_like(parameter, 60_000) for parameter in parameters]  # whose sum overflows in 16 bits
    if hvd.rank() == 1:
        gradients[1][4321] = value
    sum((one * gradient).sum() for one, gradient in zip(parameters, gradients, strict=True)).backward()
    with pytest.raises(hvd.NonFiniteError, match='gradient of "b" is NaN or infinite on rank 1'):
        optimizer.step()


@pytest.mark.ranks(1, 2, timeout=300)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("memory_format", ["contiguous_format", "channels_last"])
def test_batches_of_all_ranks_are_normalized_as_one_on_the_cpu(memory_format, dtype, momentum):
    library("torch")
    everything = torch.randn(hvd.size() * 4, 3, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    everything = everything.to(getattr(torch, dtype)).double()
    alone = torch.nn.BatchNorm2d(3, momentum=momentum).double()
    batches = everything.clone().requires_grad_()
    (alone(batches) ** 3).sum().backward()
    layer = hvd.SyncBatchNorm(3, momentum=momentum).cuda()
    if dtype == "float64":
        layer = layer.double()
    mine = slice(4 * hvd.rank(), 4 * hvd.rank() + 4)
    images = everything[mine].to("cuda", getattr(torch, dtype), memory_format=getattr(torch, memory_format))
    images.requires_grad_()
    normalized = layer(images)
    (normalized.double() ** 3).sum().backward()
    near = {"rtol": 3e-2, "atol": 3e-2} if dtype == "bfloat16" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(images.grad.double().cpu(), batches.grad[mine], **near)
    torch.testing.assert_close(layer.running_mean.double().cpu(), alone.running_mean, **near)
    torch.testing.assert_close(layer.running_var.double().cpu(), alone.running_var, **near)
    of_weight = hvd.allreduce(layer.weight.grad, op=hvd.Sum)
    torch.testing.assert_close(of_weight.double().cpu(), alone.weight.grad, rtol=3e-2, atol=3e-1)


@pytest.mark.ranks(1, timeout=300)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_normalization_does_not_let_the_host_wait(momentum):
    of = library("torch")
    of.use_own_gpu()
    layer = hvd.SyncBatchNorm(3, momentum=momentum).cuda()
    images = torch.randn(4, 3, 5, 6, device="cuda", requires_grad=True)
    for step in range(3):
        synchronize()
        if step == 2:  # the first step has made the gradients, and the second one has added to them
            of.keep_busy(SLOW_S)
        with Stopwatch() as host:
            layer(images).sum().backward()
    assert host.seconds < SLOW_S / 2


@pytest.mark.ranks(2, timeout=300)
def test_sparse_gradients_are_gathered_on_the_gpu():
    library("torch").use_own_gpu()
    table = torch.nn.Embedding(5, 2, sparse=True, device="cuda")
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
    table(torch.tensor([0, 1 + hvd.rank()], device="cuda")).sum().backward()
    optimizer.step()
    require_on_gpu(table.weight, np.repeat([[-1], [-0.5], [-0.5], [0], [0]], 2, axis=1).astype("float32"))
