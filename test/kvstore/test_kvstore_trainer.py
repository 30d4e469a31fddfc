"""The Trainer of a store trains as gluon's does, on the store and on each worker."""

import numpy as np
import pytest
from harness.frameworks import on_demand

import ringtrain as hvd
from ringtrain import kvstore, optim
from ringtrain.kvstore import Trainer

torch = on_demand("torch")

START = [[1.0, -2.0, 0.5], [4.0]]


def parameters(rank=0):
    """Two, which are those of START on rank 0, and one that needs no gradient."""
    made = [torch.nn.Parameter(torch.tensor(values) + rank) for values in START]
    return [*made, torch.nn.Parameter(torch.ones(2), requires_grad=False)]


def give_gradients(params, factor=1.0):
    """Those of all ranks together are 3 times the factor, whatever their number: exact in float32."""
    share = 3.0 * factor if hvd.rank() == 0 else 0.0
    for param in params:
        if param.requires_grad:
            param.grad = torch.full_like(param, share)


def values_of(params):
    return [param.detach().numpy() for param in params[:2]]


def require_moved(params, by):
    for values, start in zip(values_of(params), START, strict=True):
        assert np.array_equal(values, np.array(start, np.float32) - by)


@pytest.mark.ranks(1, 2, 3, fast=[2])
@pytest.mark.parametrize("updates_on_store", [True, False])
@pytest.mark.parametrize("optimizer", ["name", "object"])
def test_a_step_moves_all_workers_by_the_sum_of_the_gradients(optimizer, updates_on_store):
    params = parameters(hvd.rank())
    given = ("sgd", {"learning_rate": 0.5}) if optimizer == "name" else (optim.SGD(lr=0.5), None)
    trainer = Trainer(params, *given, kvstore="dist_sync", update_on_kvstore=updates_on_store)
    require_moved(params, 0)  # all have what rank 0 had
    for batch_size, factor in ((2, 1.0), (2, 1.0), (4, 2.0)):
        give_gradients(params, factor)
        trainer.step(batch_size)
    require_moved(params, 3 * 0.5 * 3 / 2)
    assert torch.equal(params[2], torch.ones(2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("store", ["ringtrain", "dist_sync"])
def test_an_optimizer_of_torch_updates_on_each_worker(store):
    params = parameters(hvd.rank())
    trainer = Trainer(params, torch.optim.SGD(params[:2], lr=0.5), kvstore=store)
    give_gradients(params)
    trainer.step(2)
    require_moved(params, 0.75)
    with pytest.raises(ValueError, match="use the method of the optimizer of torch"):
        trainer.set_learning_rate(0.1)


@pytest.mark.ranks(2)
def test_sums_can_be_changed_before_the_update():
    params = parameters(hvd.rank())
    trainer = Trainer(dict(zip("abc", params, strict=True)), "sgd", {"learning_rate": 0.5}, "ringtrain")
    give_gradients(params)
    trainer.allreduce_grads()
    assert torch.equal(params[0].grad, torch.full((3,), 3.0))
    for param in params[:2]:
        param.grad.clamp_(max=1.0)
    trainer.update(1)
    require_moved(params, 0.5)


WAYS = {
    "store": ("sgd", {"update_on_kvstore": True}),
    "worker": ("sgd", {"update_on_kvstore": False}),
    "torch": (None, {}),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_without_a_backward_pass_contributes_zeros(way, sets_to_none):
    params = parameters()
    optimizer, arguments = WAYS[way]
    numbers = {"learning_rate": 0.5} if optimizer else None
    optimizer = optimizer or torch.optim.SGD(params[:2], lr=0.5)
    trainer = Trainer(params, optimizer, numbers, kvstore="dist_sync", **arguments)
    for has_batch in (True, hvd.rank() == 0, hvd.rank() == 1):
        if has_batch:
            for param in params[:2]:
                param.grad = None if sets_to_none else torch.zeros_like(param)
            sum(param.sum() for param in params[:2]).backward()
        trainer.step(1, ignore_stale_grad=True)
    require_moved(params, 0.5 * (2 + 1 + 1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("takes_apart", [False, True])
def test_a_gradient_is_used_once(takes_apart):
    params = parameters()
    trainer = Trainer(params, "sgd", {"learning_rate": 0.5}, "ringtrain")

    def step():
        if takes_apart:
            trainer.allreduce_grads()
            trainer.update(1)
        else:
            trainer.step(1)

    sum(param.sum() for param in params[:2]).backward()
    step()
    with pytest.raises(ValueError, match=r"parameter 0 .* no gradient of this step: call"):
        step()
    with torch.no_grad():
        for param in params[:2]:
            param.grad.fill_(1.0)  # as a script may
    step()
    require_moved(params, 0.5 * 2 * 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("updates_on_store", [True, False])
def test_another_learning_rate_counts_from_the_next_step(updates_on_store):
    params = parameters()
    numbers = {"learning_rate": 0.5, "momentum": 0.5}
    trainer = Trainer(params, "sgd", numbers, kvstore="dist_sync", update_on_kvstore=updates_on_store)
    give_gradients(params)
    trainer.step(1)
    trainer.set_learning_rate(0.25)
    assert trainer.learning_rate == 0.25
    give_gradients(params)
    trainer.step(1)
    require_moved(params, 1.5 + (0.75 + 0.75))  # MXNet's momentum keeps the old rate


@pytest.mark.ranks(2)
@pytest.mark.parametrize("updates_on_store", [True, False])
def test_saved_states_continue_the_same_way(updates_on_store, tmp_path):
    def trainer_of(params):
        numbers = {"learning_rate": 0.5, "momentum": 0.5}
        return Trainer(params, "sgd", numbers, kvstore="dist_sync", update_on_kvstore=updates_on_store)

    path = hvd.broadcast_object(str(tmp_path / "states.npz"), root_rank=0)
    first = parameters()
    trainer = trainer_of(first)
    give_gradients(first)
    trainer.step(1)
    trainer.save_states(path)
    hvd.barrier()
    second = [torch.nn.Parameter(param.detach().clone()) for param in first[:2]]
    continued = trainer_of(second)
    continued.load_states(path)
    for params, one in ((first, trainer), (second, continued)):
        give_gradients(params)
        one.step(1)
    assert all(torch.equal(*pair) for pair in zip(first[:2], second, strict=True))


def test_one_process_needs_no_job():
    params = parameters()
    for kind in ("local", "device"):
        trainer = Trainer(params, "sgd", {"learning_rate": 0.5}, kvstore=kind)
        for param in params[:2]:
            param.grad = torch.full_like(param, 3.0)
        trainer.step(3)
    require_moved(params, 1.0)


def test_parameters_without_a_gradient_count_with_zeros_if_they_may():
    params = parameters()
    trainer = Trainer(params, "sgd", {"learning_rate": 0.5}, kvstore="local")
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(3,\) has no gradient"):
        trainer.step(1)
    trainer.step(1, ignore_stale_grad=True)
    require_moved(params, 0)


@pytest.mark.parametrize(("value", "updates_on_store"), [("0", False), ("1", True)])
def test_the_environment_says_who_updates(value, updates_on_store, monkeypatch):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", value)
    params = parameters()
    trainer = Trainer(params, "sgd", {"learning_rate": 0.5}, kvstore="local")
    for param in params[:2]:
        param.grad = torch.full_like(param, 3.0)
    if not updates_on_store:
        trainer.allreduce_grads()
        return
    with pytest.raises(ValueError, match="allreduce_grads: the store updates the weights"):
        trainer.allreduce_grads()
    with pytest.raises(ValueError, match="update: the store updates the weights"):
        trainer.update(1)


def test_impossible_arguments_are_refused():
    params = parameters()
    with pytest.raises(ValueError, match="an optimizer of torch does not update on the store"):
        Trainer(params, torch.optim.SGD(params[:2], lr=0.5), kvstore="local", update_on_kvstore=True)
    with pytest.raises(ValueError, match="no parameter has requires_grad"):
        Trainer(params[2:], "sgd", kvstore="local")
    with pytest.raises(ValueError, match="not an object"):
        Trainer(params, optim.SGD(lr=1), {"momentum": 0.5}, kvstore="local")
    with pytest.raises(ValueError, match="a schedule or the optimizer itself decides it"):
        _ = Trainer(params, "sgd", {"lr_scheduler": float}, kvstore="local").learning_rate


@pytest.mark.ranks(1)
def test_a_store_that_cannot_update_is_refused_for_it():
    with pytest.raises(ValueError, match='a "ringtrain" store does not update on the store'):
        Trainer(parameters(), "sgd", kvstore=kvstore.create("ringtrain"), update_on_kvstore=True)
