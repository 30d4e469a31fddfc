"""DiLoCo for torch: any optimizer of torch, and what scripts do with it beside steps."""

import copy
import io
import pickle
import re
import warnings

import numpy as np
import pytest
from exact_torch import arrays_of, require_same
from harness.frameworks import on_demand

import ringtrain
from ringtrain import optim
from ringtrain.engine.compression import Compression

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")


def new_model(dtype="float32"):
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2)).to(getattr(torch, dtype))


def backward(model, step, rank=None):
    """The gradients of the data that a rank has for a step."""
    dtype = next(model.parameters()).dtype
    random = torch.Generator().manual_seed(1000 * step + (hvd.rank() if rank is None else rank))
    inputs = torch.randn(8, 6, generator=random).to(dtype)
    loss = (model(inputs) - inputs[:, :2].sin()).square().mean()
    loss.backward()
    return loss


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("code", ("none", "int4"))
def test_torch_and_numpy_take_the_same_outer_steps(code):
    how = {"fragments": 2, "overlap": 1, "compression": getattr(Compression, code), "islands": "rank"}
    model = new_model()
    optimizer = hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.5), 3, **how)
    arrays = arrays_of(model)
    other = ringtrain.DiLoCo(optim.SGD(lr=0.5), arrays, 3, **how)
    for step in range(10):
        optimizer.zero_grad()
        backward(model, step)
        gradients = [parameter.grad.numpy().copy() for parameter in model.parameters()]
        optimizer.step()
        other.step(arrays, gradients)
        require_same(model, arrays)
    assert (optimizer.inner_steps, optimizer.outer_steps) == (10, 3)


@pytest.mark.fast
@pytest.mark.ranks(4)
def test_the_ranks_of_an_island_have_the_same_parameters_after_each_step():
    model = new_model("float64")
    lists = [[0, 2], [1, 3]]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DiLoCo(sgd, 4, named_parameters=model.named_parameters(), islands=lists)
    islands = [hvd.add_process_set(ranks) for ranks in lists]
    alone, single = new_model("float64"), None
    single = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        own = islands[hvd.rank() % 2]
        hvd.check_replicas(model.state_dict(), own)
        # beside one process that has the data of both ranks of the island
        single.zero_grad()
        for rank in own.ranks:
            backward(alone, step, rank)
        for parameter in alone.parameters():
            parameter.grad /= 2
        single.step()
        require_same(model, arrays_of(alone))
    with pytest.raises(hvd.ReplicaError):
        hvd.check_replicas(model.state_dict())
    optimizer.zero_grad()
    backward(model, 3)
    optimizer.step()
    hvd.check_replicas(model.state_dict())
    for one in (*islands, optimizer._local_steps.islands.of_rank):
        hvd.remove_process_set(one)


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_it_stays_an_optimizer_for_schedulers_and_scripts():
    model = new_model()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    early = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    optimizer = hvd.DiLoCo(sgd, 2, islands="rank")
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that step() was not called before the scheduler
        train(model, optimizer, 1)
        early.step()
        late.step()
    assert optimizer.param_groups[0]["lr"] == 0.25 == sgd.param_groups[0]["lr"]
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(optimizer.inner_steps))
    train(model, optimizer, 2, 1)
    assert len(calls) == 2
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_a_closure_is_that_of_the_wrapped_optimizer():
    model = new_model("float64")
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    optimizer = hvd.DiLoCo(lbfgs, 2, islands="rank")

    def closure():
        optimizer.zero_grad()
        return backward(model, 0)

    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    hvd.check_replicas(model.state_dict())
    assert optimizer.inner_steps == 4


@pytest.mark.fast
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("unscales", (False, True))
def test_ranks_whose_gradients_overflow_take_part_in_outer_steps(unscales):
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("this torch has no GradScaler for CPUs")
    islands = [[rank for rank in range(hvd.size()) if rank % 2 == island] for island in range(2)]
    model, plain = new_model(), new_model()
    optimizer = hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.5), 3, islands=islands)
    other = hvd.DiLoCo(torch.optim.SGD(plain.parameters(), lr=0.5), 3, islands=islands)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        overflows = step == 1 and hvd.rank() == 1
        is_left_out = step == 1 and hvd.rank() % 2 == 1  # by all ranks of the island
        optimizer.zero_grad()
        scaler.scale(backward_loss(model, step) * (float("inf") if overflows else 1.0)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

        other.zero_grad()
        backward(plain, step)
        if is_left_out:
            other.synchronize() if hasattr(other, "synchronize") else None
            for parameter in plain.parameters():
                parameter.grad.zero_()
        other.step()
        require_same(model, arrays_of(plain))
    assert optimizer.inner_steps == 6
    assert scaler.get_scale() == (2.0 if hvd.rank() % 2 else 4.0)
    hvd.check_replicas(model.state_dict())
    for one in (optimizer, other):
        hvd.remove_process_set(one._local_steps.islands.of_rank)


def backward_loss(model, step):
    random = torch.Generator().manual_seed(1000 * step + hvd.rank())
    inputs = torch.randn(8, 6, generator=random)
    return (model(inputs) - inputs[:, :2].sin()).square().mean()


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", (0, 6, 7))
def test_a_checkpoint_of_torch_resumes_exactly(steps):
    def new():
        model = new_model()
        adam = torch.optim.AdamW(model.parameters(), lr=0.1)
        how = {"fragments": 2, "overlap": 2, "compression": Compression.int4, "islands": "rank"}
        return model, hvd.DiLoCo(adam, 4, named_parameters=model.named_parameters(), **how)

    model, optimizer = new()
    train(model, optimizer, steps)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, 10, steps)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again, other = new()
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert other.inner_steps == steps
    train(again, other, 10, steps)
    require_same(again, arrays_of(model))


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_bfloat16_parameters_have_outer_parameters_in_float32():
    model = new_model("bfloat16")
    optimizer = hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.5), 2, islands="rank")
    train(model, optimizer, 4)
    hvd.check_replicas(model.state_dict())
    state = optimizer.state_dict()["diloco"]["fragments"][0]
    assert state["outer"].dtype == torch.float32
    assert (state["outer"].bfloat16() == torch.cat([one.detach().reshape(-1) for one in model.parameters()])).all()
    assert (state["outer"].bfloat16().float() != state["outer"]).any()


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_another_shape_on_one_rank_is_told_on_all():
    model = torch.nn.Linear(2 + hvd.rank(), 2)
    with pytest.raises(hvd.MismatchError, match=re.escape('"weight" is float32[2, 2] on rank 0 and float32[2, 3]')):
        hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=1.0), 2, named_parameters=model.named_parameters())


@pytest.mark.ranks(2)
def test_join_is_for_ranks_that_average_each_step():
    model = new_model()
    optimizer = hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=1.0), 2, islands=[[0, 1]])
    with pytest.raises(TypeError, match="Join takes what DistributedOptimizer returned"):
        hvd.Join(optimizer)
    hvd.remove_process_set(optimizer._local_steps.islands.of_rank)


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("islands", ["rank", [[0, 1]]], ids=str)
def test_unequal_batches_weigh_gradients_and_differences(islands):
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DiLoCo(sgd, 2, outer=optim.SGD(lr=1.0), islands=islands)
    for _ in range(2):
        optimizer.set_weight([6, 2][hvd.rank()])
        optimizer.zero_grad()
        (model.weight * 8.0 * hvd.rank()).sum().backward()
        optimizer.step()
    assert model.weight.item() == 1 - 2 * 8.0 * 2 / 8
    with pytest.raises(ValueError, match="weight must be a finite number that is not negative, not -1"):
        optimizer.set_weight(-1)
    hvd.remove_process_set(optimizer._local_steps.islands.of_rank)


@pytest.mark.ranks(1)
def test_bad_arguments_for_torch_are_refused():
    model = new_model()
    parameters = list(model.parameters())
    sgd = torch.optim.SGD(parameters, lr=1.0)
    with pytest.raises(
        TypeError, match=r"SGD is not a torch.optim.Optimizer; for other arrays there is DiLoCo of ring"
    ):
        hvd.DiLoCo(optim.SGD(lr=1.0), 2)
    with pytest.raises(TypeError, match=re.escape("wrap it with DiLoCo of ringtrain.torch")):
        ringtrain.DiLoCo(sgd, [np.ones(2)], 2)
    with pytest.raises(ValueError, match=re.escape('each parameter once, but "0.1", "0.2", "0.3" is in none')):
        hvd.DiLoCo(sgd, 2, fragments=[parameters[:1]])
    with pytest.raises(ValueError, match="a parameter is not one of the optimizer"):
        hvd.DiLoCo(sgd, 2, fragments=[[torch.ones(2)]])
    with pytest.raises(TypeError, match="fragments must be a number, or a list of lists of parameters, not"):
        hvd.DiLoCo(sgd, 2, fragments=parameters)
    with pytest.raises(TypeError, match=r"outer must be an optimizer of ringtrain\.optim, .*, not SGD"):
        hvd.DiLoCo(sgd, 2, outer=sgd)
    with pytest.raises(TypeError, match="lists of the parameters of each part"):
        hvd.DiLoCo(sgd, 2, fragments=[["0.weight"]])
    with pytest.raises(ValueError, match="named_parameters does not name all parameters"):
        hvd.DiLoCo(sgd, 2, named_parameters=[("first", parameters[0])])
    optimizer = hvd.DiLoCo(sgd, 2)
    for make in (lambda: hvd.DiLoCo(optimizer, 2), lambda: hvd.DistributedOptimizer(optimizer)):
        with pytest.raises(ValueError, match="this optimizer is distributed already"):
            make()
    with pytest.raises(ValueError, match="this optimizer is distributed already"):
        hvd.DiLoCo(hvd.DistributedOptimizer(torch.optim.SGD(new_model().parameters(), lr=1.0)), 2)
    with pytest.raises(ValueError, match="not the state of DiLoCo"):
        optimizer.load_state_dict(torch.optim.SGD(parameters, lr=1.0).state_dict())
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="an optimizer of DiLoCo cannot be"):
            copied(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="5 parameters, but DiLoCo was constructed for 4"):
        optimizer.step()
