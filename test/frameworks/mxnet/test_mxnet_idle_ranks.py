"""Trainings with MXNet in which some ranks make no backward pass in a step: all ranks update as one process does."""

import warnings

import numpy as np
import pytest

mx = pytest.importorskip("mxnet", reason="MXNet is not installed in this environment: see `make test-mxnet`")

from mxnet import autograd, gluon  # noqa: E402
from mxnet.contrib.amp.loss_scaler import LossScaler  # noqa: E402

import ringtrain.mxnet as hvd  # noqa: E402

SGD = {"learning_rate": 0.5, "momentum": 0.5}
# The parameters that each of two ranks uses in each step.
STEPS = [("ab", "ab"), ("ab", ""), ("", "ab"), ("a", "b"), ("b", "b"), ("", ""), ("", "a"), ("ab", "ab")]


def parameters(names="abc"):
    made = {name: gluon.Parameter(name, shape=(3,)) for name in names}
    for one in made.values():
        one.initialize(mx.init.One())
    return made


def backward(of, factors):
    """Makes the gradient of each parameter that is in `factors` its factor."""
    with autograd.record():
        loss = sum((of[name].data() * factor).sum() for name, factor in factors.items())
    loss.backward()


def values(of):
    return {name: one.data().asnumpy().tolist() for name, one in of.items()}


def factors_of(step, uses, rank):
    return {name: float(4 * step + 2 + 4 * rank) for name in uses[rank]}


def of_one_process():
    alone = parameters()
    trainer = gluon.Trainer(alone, "sgd", SGD, kvstore=None)
    for step, uses in enumerate(STEPS):
        totals = dict.fromkeys(sorted(set("".join(uses))), 0.0)
        for rank in range(2):
            for name, factor in factors_of(step, uses, rank).items():
                totals[name] += factor / 2
        if totals:
            backward(alone, totals)
        trainer.step(1, ignore_stale_grad=True)
    return values(alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("takes_apart", [False, True], ids=["step", "allreduce_grads"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"num_groups": 2}, {"compression": hvd.Compression.fp16}, {"nan_check": True}],
    ids=["plain", "groups", "fp16", "nan_check"],
)
def test_ranks_without_a_backward_pass_update_as_one_process(arguments, takes_apart):
    own = parameters()
    trainer = hvd.DistributedTrainer(own, "sgd", SGD, **arguments)
    for step, uses in enumerate(STEPS):
        if uses[hvd.rank()]:
            backward(own, factors_of(step, uses, hvd.rank()))
        if takes_apart:
            trainer.allreduce_grads()
            trainer.update(1, ignore_stale_grad=True)
        else:
            trainer.step(1, ignore_stale_grad=True)
    assert values(own) == of_one_process()


@pytest.mark.ranks(2)
def test_gradients_that_add_up_on_a_rank_count_once():
    own = parameters("a")
    own["a"].grad_req = "add"
    trainer = hvd.DistributedTrainer(own, "sgd", {"learning_rate": 1.0})
    for has_batch in (True, hvd.rank() == 0):
        if has_batch:
            own["a"].zero_grad()
            backward(own, {"a": 2.0})
            backward(own, {"a": 2.0})
        trainer.step(1)
    assert own["a"].data().asnumpy().tolist() == [1 - 4 - 2] * 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("as_dense", [True, False], ids=["dense", "rows"])
def test_rows_of_the_last_step_are_not_sent_again(as_dense):
    embedding = gluon.nn.Embedding(4, 2, sparse_grad=True)
    embedding.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(
        embedding.collect_params(), "sgd", {"learning_rate": 1.0}, sparse_as_dense=as_dense
    )
    for words in ([0, 1], [3] if hvd.rank() == 0 else []):
        if words:
            with autograd.record():
                loss = embedding(mx.nd.array(words)).sum()
            loss.backward()
        trainer.step(1, ignore_stale_grad=True)
    assert embedding.weight.data().asnumpy().tolist() == [[-1, -1], [-1, -1], [0, 0], [-0.5, -0.5]]


@pytest.mark.ranks(2)
def test_a_parameter_without_a_gradient_on_any_rank_is_an_error_on_all_ranks():
    own = parameters("ab")
    trainer = hvd.DistributedTrainer(own, "sgd", SGD)
    if hvd.rank() == 0:
        backward(own, {"a": 2.0})
    with pytest.raises(UserWarning, match=r"Gradient of Parameter `b` .* has not been updated by backward"):
        trainer.step(1)
    assert values(own) == {"a": [1.0] * 3, "b": [1.0] * 3}
    if hvd.rank() == 0:
        backward(own, {"b": 2.0})
    trainer.step(1, ignore_stale_grad=True)
    assert values(own) == {"a": [1.0] * 3, "b": [0.5] * 3}


@pytest.mark.ranks(2)
def test_a_rank_that_contributes_zeros_says_so_once():
    own = parameters("ab")
    trainer = hvd.DistributedTrainer(own, "sgd", SGD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            backward(own, {"a": 2.0, "b": 2.0} if hvd.rank() == 0 else {"b": 2.0})
            trainer.step(1)
    said = [str(one.message) for one in caught if "contributes zeros" in str(one.message)]
    assert len(said) == hvd.rank()
    assert all('no gradient of "a" in this step' in one for one in said)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("skips", ["nan_check", "loss scaler"])
def test_gradients_of_a_step_that_was_skipped_are_not_sent_again(skips):
    own = parameters("ab")
    trainer = hvd.DistributedTrainer(own, "sgd", {"learning_rate": 1.0}, nan_check=skips == "nan_check")
    if skips == "loss scaler":
        trainer._amp_loss_scaler = LossScaler()
    backward(own, {"a": np.inf if hvd.rank() == 0 else 2.0, "b": 2.0})
    if skips == "nan_check":
        with pytest.raises(hvd.NonFiniteError, match="no parameter was updated"):
            trainer.step(1)
    else:
        trainer.step(1)
    if hvd.rank() == 0:
        backward(own, {"a": 2.0, "b": 2.0})
    trainer.step(1)
    assert values(own) == {"a": [0.0] * 3, "b": [0.0] * 3}


@pytest.mark.ranks(2)
def test_ranks_that_have_joined_are_not_waited_for():
    own = parameters("ab")
    trainer = hvd.DistributedTrainer(own, "sgd", {"learning_rate": 1.0})
    for step in range(3 if hvd.rank() == 0 else 1):
        backward(own, {"a": 2.0, "b": 2.0} if step < 2 else {"a": 2.0})
        trainer.step(1, ignore_stale_grad=True)
    mx.nd.waitall()
    assert hvd.join() == 0
    hvd.broadcast_parameters(own)
    assert values(own) == {"a": [-3.0] * 3, "b": [-2.0] * 3}
