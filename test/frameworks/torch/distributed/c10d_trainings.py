"""Trainings as torch's documentation writes them. Each comes to a number, the same with gloo and with ringtrain."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import ringtrain.torch.distributed  # noqa: F401

torch.set_num_threads(1)
FOLDER = ""  # of the checkpoints


def make_model(width=32):
    torch.manual_seed(0)
    layers = [module for _ in range(3) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def batches(count=5, width=32):
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(count):
        yield torch.randint(-4, 5, (8, width)).float(), torch.randint(0, 4, (8,))


def train(model, optimizer, steps=None):
    loss = torch.zeros(())
    for inputs, targets in steps or batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


def ddp():
    model = DDP(make_model(), bucket_cap_mb=0.004)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def ddp_accumulate():
    model = DDP(make_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, *others = list(batches(3))
    with model.no_sync():
        F.cross_entropy(model(first[0]), first[1]).backward()
    return train(model, optimizer, others)


def ddp_unused():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = make_model(), make_model()

        def forward(self, x):
            return self.a(x) if dist.get_rank() % 2 else self.b(x)

    model = DDP(Branches(), find_unused_parameters=True)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def ddp_buffers():
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def ddp_static_graph():
    from torch.utils.checkpoint import checkpoint

    class Recomputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.unused = make_model(), nn.Linear(2, 2)

        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=False)

    torch.manual_seed(0)
    model = DDP(Recomputing(), static_graph=True)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def fp16_hook():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DDP(make_model(), bucket_cap_mb=0.004)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def builtin_hooks():
    losses = []
    for hook in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = DDP(make_model(), bucket_cap_mb=0.004)
        model._register_builtin_comm_hook(hook)
        losses.append(train(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        try:
            model._register_builtin_comm_hook(hook)
        except RuntimeError as error:
            assert "can only be called once" in str(error)
        assert model._get_ddp_logging_data()["comm_hook"] == str(hook)
    assert losses[0] != losses[1], losses  # the second one was rounded
    return losses


def power_sgd():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = DDP(make_model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def hook_of_script():
    def mean_of(state, bucket):
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda sums: sums.value()[0].div_(dist.get_world_size()))

    model = DDP(make_model())
    model.register_comm_hook(None, mean_of)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def local_sgd():
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DDP(make_model())
    own, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, own, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    return train(model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager))


def join_of_several():
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return train_uneven(model, optimizer, Join([model, optimizer]))


def join():
    model = DDP(make_model())
    return train_uneven(model, torch.optim.SGD(model.parameters(), lr=0.1), model.join())


def join_dividing_by_ranks_left():
    model = DDP(make_model())
    joining = model.join(divide_by_initial_world_size=False)
    return train_uneven(model, torch.optim.SGD(model.parameters(), lr=0.1), joining)


def train_uneven(model, optimizer, joining):
    with joining:
        for inputs, targets in batches(3 + dist.get_rank()):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    total = sum(p.detach().double().sum() for p in model.parameters())
    dist.broadcast(total, dist.get_world_size() - 1)
    return total.item()


def zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(make_model())
    return train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return train(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def fsdp2_of_16_bits():
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    losses = []
    for halves, sums in ((torch.bfloat16, torch.float32), (torch.float16, torch.float16)):
        policies = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=halves, reduce_dtype=sums),
            "offload_policy": CPUOffloadPolicy(pin_memory=False),
        }
        model = make_model()
        fully_shard(model[0], **policies)
        fully_shard(model, reshard_after_forward=False, **policies)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        first, *others = batches(4)
        model.set_requires_gradient_sync(False)
        F.cross_entropy(model(first[0]).float(), first[1]).backward()
        model.set_requires_gradient_sync(True)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        losses.append(train(model, optimizer, others))
    return losses


def hsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    fully_shard(model, mesh=mesh)
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"))
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def fsdp1_checkpoint_of_ranks_without_a_shard():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    # Its only parameter is one element, so rank 0 alone has a shard.
    torch.manual_seed(0)
    model = FullyShardedDataParallel(torch.nn.Linear(1, 1, bias=False), device_id=torch.device("cpu"))
    folder = f"{FOLDER}/shards-{dist.get_backend()}"
    with FullyShardedDataParallel.summon_full_params(model):
        before = next(model.parameters()).detach().clone()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        with FullyShardedDataParallel.summon_full_params(model):
            next(model.parameters()).data.fill_(7)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    with FullyShardedDataParallel.summon_full_params(model):
        assert torch.equal(next(model.parameters()), before)
    return before.item()


def tensor_parallel():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    loss = torch.zeros(())
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randint(-4, 5, (8, 32)).float()), torch.randint(0, 4, (8,)))
        loss.backward()
        optimizer.step()
    return loss.item()


def dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    values = torch.arange(float(4 * size * size)).reshape(2 * size, 2 * size)
    tensor = distribute_tensor(values, mesh, [Shard(0)])
    assert torch.equal(tensor.redistribute(mesh, [Shard(1)]).full_tensor(), values)
    assert torch.equal(tensor.redistribute(mesh, [Replicate()]).to_local(), values)
    product = tensor.redistribute(mesh, [Shard(1)]) @ tensor
    assert torch.equal(product.full_tensor(), values @ values)
    return product.full_tensor().sum().item()


def checkpoint():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(make_model())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{FOLDER}/{dist.get_backend()}")
    expected = [p.full_tensor().clone() for p in model.parameters()]
    torch.manual_seed(5)
    other = make_model()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other = fully_shard(other)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=f"{FOLDER}/{dist.get_backend()}")
    set_model_state_dict(other, state["model"])
    for got, want in zip(other.parameters(), expected, strict=True):
        assert torch.equal(got.full_tensor(), want)
    return sum(one.double().sum().item() for one in expected)


def checkpoint_beside_training():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    expected = [p.full_tensor().clone() for p in model.parameters()]
    # The thread that saves has a group of its own, since it calls operations while the script does.
    saved, folder = dist.new_group(), f"{FOLDER}/beside-{dist.get_backend()}"
    saving = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder, process_group=saved)
    loss = train(model, optimizer)
    saving.result()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    for got, want in zip(model.parameters(), expected, strict=True):
        assert torch.equal(got.full_tensor(), want)
    return loss


def collectives_that_are_differentiated():
    import torch.distributed.nn.functional as of_autograd

    rank, size = dist.get_rank(), dist.get_world_size()
    world = {"group": dist.group.WORLD}  # the default is the group of the time when the module was imported
    found = []
    for call in (
        lambda x: of_autograd.all_reduce(x, **world),
        lambda x: of_autograd.all_gather(x, **world),
        lambda x: of_autograd.reduce_scatter(torch.empty(2), list(x.chunk(size)), **world),
        lambda x: of_autograd.all_to_all([torch.empty(2) for _ in range(size)], list(x.chunk(size)), **world),
        lambda x: of_autograd.all_to_all_single(torch.empty_like(x), x, **world),
        lambda x: of_autograd.broadcast(x, size - 1, **world),
        lambda x: of_autograd.gather(x, 0, **world),
        lambda x: of_autograd.scatter(list(x.chunk(size)), 0, **world),
        lambda x: of_autograd.reduce(x, 0, **world),
    ):
        inputs = (torch.arange(2.0 * size) + 10 * rank).requires_grad_()
        outputs = call(inputs)
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        # Not (one.sum() * ...): gloo reads behind a gradient that is expanded.
        sum((one * (i + 2) * (rank + 1)).sum() for i, one in enumerate(tensors)).backward()
        found.append(inputs.grad.tolist())
    return found


def pipeline():
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    stage = PipelineStage(nn.Linear(16, 16), rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda out, target: F.mse_loss(out, target))
    torch.manual_seed(3)
    inputs, targets = torch.randn(8, 16), torch.randn(8, 16)
    losses = []
    if rank == 0:
        schedule.step(inputs)
    elif rank == size - 1:
        schedule.step(target=targets, losses=losses)
    else:
        schedule.step()
    loss = torch.stack(losses).sum() if losses else torch.zeros(())
    dist.all_reduce(loss)
    return loss.item()


def pipeline_of_several_stages():
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    stages = []
    for place in (rank, rank + size):
        torch.manual_seed(place)
        stages.append(PipelineStage(nn.Linear(8, 8), place, 2 * size, torch.device("cpu")))
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2 * size, loss_fn=F.mse_loss)
    losses = []
    if rank == 0:
        schedule.step(torch.ones(4 * size, 8))
    elif rank == size - 1:
        schedule.step(target=torch.zeros(4 * size, 8), losses=losses)
    else:
        schedule.step()
    total = sum(stage.submod.weight.grad.double().sum() for stage in stages)
    dist.all_reduce(total)
    return [*(loss.item() for loss in losses), total.item()]


def compiled():
    model = torch.compile(DDP(make_model()), backend="eager")
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1))


ALL = (
    *(
        ddp,
        ddp_accumulate,
        ddp_unused,
        ddp_buffers,
        ddp_static_graph,
        fp16_hook,
        builtin_hooks,
        power_sgd,
        join,
        join_dividing_by_ranks_left,
        hook_of_script,
        local_sgd,
        join_of_several,
        zero,
        fsdp1,
        fsdp2,
        fsdp2_of_16_bits,
        hsdp,
        fsdp1_checkpoint_of_ranks_without_a_shard,
    ),
    *(tensor_parallel, dtensor, checkpoint, checkpoint_beside_training, collectives_that_are_differentiated),
    *(pipeline, pipeline_of_several_stages, compiled),
)


def losses(folder, backend, url, **place):
    """Returns the number of each, by its name: with this backend, from the beginning of its group to the end."""
    global FOLDER
    FOLDER = folder
    dist.init_process_group(backend, init_method=url, **place)
    found = {one.__name__: one() for one in ALL}
    dist.destroy_process_group()
    torch._dynamo.reset()
    return found
