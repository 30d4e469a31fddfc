"""Compression.powersgd for torch: the averages of the hooks, and what scripts do with an optimizer beside steps."""

import io

import numpy as np
import pytest
from elastic_ranks import elastic_job
from exact_torch import arrays_of, require_same
from harness.forked import forks_of
from harness.frameworks import on_demand
from power_sgd_reference import Reference

import ringtrain
from ringtrain.engine.compression import Compression

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")

forks = forks_of("torch", "ringtrain.torch")


def new_model(dtype="float32"):
    torch.manual_seed(5)
    layers = torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 16)
    return torch.nn.Sequential(*layers).to(getattr(torch, dtype))


def loss_of(model, step, rank=None):
    """The loss of the data that a rank has for a step."""
    dtype = next(model.parameters()).dtype
    random = torch.Generator().manual_seed(1000 * step + (hvd.rank() if rank is None else rank))
    inputs = torch.randn(8, 12, generator=random).to(dtype)
    return (model(inputs) - inputs[:, :1].sin()).square().mean()


def backward(model, step, rank=None):
    loss = loss_of(model, step, rank)
    loss.backward()
    return loss


def distributed(model, rank=2, **options):
    how = {name: options.pop(name) for name in ("start_step", "min_compression_rate") if name in options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    compression = hvd.Compression.powersgd(rank, **how)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression, **options)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def require_alike(model):
    """The parameters have the same bits on all ranks."""
    for array in arrays_of(model):
        for other in ringtrain.allgather(array[None]):
            assert (other == array).all()


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    "options", [{}, {"check_every": 1, "nan_check": True}, {"gradient_as_shared_view": True}], ids=str
)
def test_hooks_average_as_the_algorithm_of_the_paper(options):
    model = new_model()
    optimizer = distributed(model, **options)
    replicas = [new_model() for _ in range(hvd.size())]
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    references = {
        name: Reference(Compression.powersgd(2), name, tuple(shape), hvd.size())
        for name, shape in shapes.items()
        if len(shape) == 2
    }
    for step in range(4):
        for rank, replica in enumerate(replicas):
            replica.load_state_dict(model.state_dict())
            replica.zero_grad()
            backward(replica, step, rank)
        optimizer.zero_grad()
        backward(model, step)
        optimizer.synchronize()
        for number, (name, parameter) in enumerate(model.named_parameters()):
            gradients = np.stack([list(replica.parameters())[number].grad.numpy() for replica in replicas])
            expected = references[name].step(gradients) if name in references and hvd.size() > 1 else gradients.mean(0)
            np.testing.assert_allclose(parameter.grad.numpy(), expected, atol=1e-5)
        with optimizer.skip_synchronize():
            optimizer.step()
    require_alike(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_factors_of_other_dtypes_train(dtype):
    model = new_model(dtype)
    optimizer = distributed(model, check_every=1)
    first = loss_of(model, 0).item()
    train(model, optimizer, 30)
    assert loss_of(model, 0).item() < first / 2
    state = optimizer.state_dict()["powersgd"]["gradients"]["0.weight"]
    assert state["error"].dtype == (torch.float64 if dtype == "float64" else torch.float32)


@pytest.mark.ranks(2)
def test_a_convolution_in_channels_last_and_a_sparse_gradient():
    torch.manual_seed(3)
    convolution = torch.nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)
    embedding = torch.nn.Embedding(100, 16, sparse=True)
    named = [*convolution.named_parameters("convolution"), *embedding.named_parameters("embedding")]
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named, hvd.Compression.powersgd(2), check_every=1)
    for step in range(3):
        optimizer.zero_grad()
        random = torch.Generator().manual_seed(step)
        inputs = torch.randn(2, 16, 5, 5, generator=random).to(memory_format=torch.channels_last)
        rows = torch.tensor([1, 5 + hvd.rank()])
        (convolution(inputs).square().mean() + embedding(rows).square().sum()).backward()
        optimizer.step()
        assert embedding.weight.grad.is_sparse
    assert list(optimizer.state_dict()["powersgd"]["gradients"]) == ["convolution.weight"]


@pytest.mark.ranks(2)
def test_a_sparse_gradient_that_is_reduced_as_a_dense_one_travels_as_factors():
    torch.manual_seed(3)
    embedding = torch.nn.Embedding(50, 20, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    compression = hvd.Compression.powersgd(3)
    optimizer = hvd.DistributedOptimizer(optimizer, embedding.named_parameters(), compression, sparse_as_dense=True)
    for _ in range(2):
        before = embedding.weight.detach().clone()
        optimizer.zero_grad()
        (embedding(torch.tensor([1, 5 + hvd.rank()])) * torch.arange(20.0)).sum().backward()
        optimizer.step()
        expected = torch.zeros(50, 20)
        expected[1] += torch.arange(20.0)
        expected[5] += torch.arange(20.0) / 2
        expected[6] += torch.arange(20.0) / 2
        torch.testing.assert_close(before - embedding.weight.detach(), expected, atol=1e-3, rtol=0)


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("start_step", (0, 5))
def test_a_checkpoint_with_powersgd_resumes_with_the_same_bits(start_step):
    model = new_model()
    optimizer = distributed(model, start_step=start_step)
    train(model, optimizer, 4)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    train(model, optimizer, 4, first=4)
    content = torch.load(file, weights_only=True)
    other = new_model()
    other.load_state_dict(content["model"])
    resumed = distributed(other, start_step=start_step)
    resumed.load_state_dict(content["optimizer"])
    train(other, resumed, 4, first=4)
    require_same(other, arrays_of(model))
    plain = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.5)
    plain.load_state_dict(content["optimizer"])  # which has no use for the rest


@pytest.mark.ranks(2)
def test_broadcast_and_elastic_states_leave_each_rank_its_errors():
    model = new_model()
    optimizer = distributed(model)
    state = hvd.elastic.TorchState(model, optimizer)
    train(model, optimizer, 3)

    def kept():
        return optimizer.state_dict()["powersgd"]["gradients"]["2.weight"]

    error, factor = kept()["error"].clone(), kept()["factor"].clone()
    state.commit()
    train(model, optimizer, 2, first=3)
    state.restore()
    state.sync()
    assert (kept()["error"] == error).all() and (kept()["factor"] == factor).all()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert (kept()["error"] == error).all() and (kept()["factor"] == factor).all()
    train(model, optimizer, 2, first=3)
    expected = arrays_of(model)
    state.restore()
    train(model, optimizer, 2, first=3)
    require_same(model, expected)
    late = distributed(model)
    if hvd.rank() == 0:
        late.load_state_dict(optimizer.state_dict())
    hvd.elastic.TorchState(model, late).sync()
    joined = late.state_dict()["powersgd"]["gradients"]["2.weight"]
    assert joined["steps"] == 5 and (joined["factor"] == kept()["factor"]).all()
    assert (joined["error"] is None) == (hvd.rank() == 1)


@pytest.mark.ranks(2)
def test_a_grad_scaler_skips_the_overflow_of_one_rank_and_training_goes_on():
    model, unbroken = new_model(), new_model()
    optimizer, other = distributed(model), distributed(unbroken)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, backoff_factor=0.5, growth_interval=100)
    for step in range(4):
        if step == 2:
            optimizer.zero_grad()
            before = arrays_of(model)
            scaler.scale(loss_of(model, step) * (float("inf") if hvd.rank() else 1)).backward()
            scaler.step(optimizer)
            scaler.update(1.0)
            require_same(model, before)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update(1.0)
        other.zero_grad()
        backward(unbroken, step)
        other.step()
    require_same(model, arrays_of(unbroken))


@pytest.mark.ranks(2, 3)
def test_join_with_powersgd_keeps_the_replicas_alike():
    model = new_model()
    optimizer = distributed(model)
    with hvd.Join(optimizer):
        train(model, optimizer, 2 + 2 * hvd.rank())
    require_alike(model)
    train(model, optimizer, 2, first=10)
    require_alike(model)


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_bad_arguments_with_powersgd_are_refused():
    model = new_model()
    with pytest.raises(ValueError, match=r"groups are not for Compression\.powersgd"):
        distributed(model, num_groups=2)
    with pytest.raises(ValueError, match="needs op=Average or op=Sum"):
        distributed(model, op=hvd.Adasum)
    methods = dict(hvd.optimizer._DistributedOptimizer.__dict__)
    overridable = type("SGD", (torch.optim.SGD,), methods)  # as scripts for Horovod make it
    with pytest.raises(TypeError, match=r"powersgd\(4\) is for a DistributedOptimizer"):
        overridable([{"params": list(model.parameters()), "lr": 0.1}], None, hvd.Compression.powersgd(4))
    with pytest.raises(TypeError, match=r"powersgd\(4\) is for a DistributedOptimizer"):
        hvd.allreduce(torch.ones(100, 100), compression=hvd.Compression.powersgd(4))


# --- ranks that are killed --------------------------------------------------------------------------------------------

TRAINING = """
import time, torch, ringtrain.torch as hvd
torch.set_num_threads(1)
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Linear(40, 16))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
compression = hvd.Compression.powersgd(1, start_step=10)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression, check_every=1)

@hvd.elastic.run
def train(state):
    while state.step < 40:
        random = torch.Generator().manual_seed(100 * state.step + hvd.rank())
        inputs = torch.randn(8, 12, generator=random)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :1].sin()).square().mean().backward()
        time.sleep(0.005)
        optimizer.step()
        state.step += 1
        state.commit()
        print("step", state.step, hvd.size(), flush=True)

state = hvd.elastic.TorchState(model, optimizer, step=0)
train(state)
kept = optimizer.state_dict()["powersgd"]["gradients"]["0.weight"]
print("steps", kept["steps"], "sum", sum(p.sum() for p in model.parameters()).item(), flush=True)
"""


def test_an_elastic_job_with_powersgd_loses_one_rank_and_gains_another(forks, tmp_path):
    with elastic_job(TRAINING, tmp_path, 3, most=3, forks=forks) as job:
        job.start()  # one too many: it waits
        victim = job.process(job.formed(1).members[0])
        victim.wait_for("step 20 ")
        victim.kill()
        ends = [process.ends() for process in job.processes if process is not victim]
    assert all("step 40 3" in text for text in ends)
    assert len({text.split("steps ")[1] for text in ends}) == 1
    assert ends[0].split("steps ")[1].startswith("40 ")
