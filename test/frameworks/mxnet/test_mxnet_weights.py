"""weight= of operations and set_weight of the trainers: the mean over the samples of all ranks."""

import math

import pytest

mx = pytest.importorskip("mxnet", reason="MXNet is not installed in this environment: see `make test-mxnet`")

from mxnet import autograd, gluon  # noqa: E402

import ringtrain.mxnet as hvd  # noqa: E402

WEIGHTS = {1: [8], 2: [6, 2], 3: [4, 2, 2]}


def own_weight():
    return WEIGHTS[hvd.size()][hvd.rank()]


def mean(values):
    return sum(w * v for w, v in zip(WEIGHTS[hvd.size()], values, strict=True)) / 8


@pytest.mark.ranks(1, 2, 3)
def test_averages_by_weight():
    expected = mean([8.0 * rank for rank in range(hvd.size())])
    for step in range(3):
        tensor = mx.nd.full((5,), 8.0 * hvd.rank())
        assert hvd.allreduce(tensor, name="new", weight=own_weight()).asnumpy().tolist() == [expected] * 5
        group = hvd.grouped_allreduce([tensor, tensor + step], name="group", weight=own_weight())
        assert group[1].asnumpy().tolist() == [expected + step] * 5
        assert hvd.allreduce_(tensor, name="same", weight=own_weight()) is tensor
        assert tensor.asnumpy().tolist() == [expected] * 5


@pytest.mark.ranks(1, 2, 3)
def test_scattered_averages_by_weight():
    size, expected = hvd.size(), mean([8.0 * rank for rank in range(hvd.size())])
    tensor = mx.nd.full((2 * size, 3), 8.0 * hvd.rank())
    assert hvd.reducescatter(tensor, weight=own_weight()).asnumpy().tolist() == [[expected] * 3] * 2
    first, second = hvd.grouped_reducescatter([tensor, tensor + 1], name="group", weight=own_weight())
    assert first.asnumpy().tolist() == [[expected] * 3] * 2
    assert second.asnumpy().tolist() == [[expected + 1] * 3] * 2
    with pytest.raises(ValueError, match="reducescatter: weight must be a finite number that is not negative"):
        hvd.reducescatter(tensor, weight=-1)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("options", [{}, {"num_groups": 1}, {"compression": hvd.Compression.fp16}], ids=str)
def test_a_trainer_averages_the_mean_losses_of_unequal_batches(options):
    net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, **options)
    for _ in range(2):
        trainer.set_weight(own_weight())
        with autograd.record():
            loss = net(mx.nd.full((own_weight(), 2), 8.0 * hvd.rank())).mean()
        loss.backward()
        trainer.step(1)
    expected = -2 * mean([8.0 * rank for rank in range(hvd.size())])
    assert net.weight.data().asnumpy().tolist() == [[expected] * 2]


@pytest.mark.ranks(2)
def test_an_optimizer_of_module_averages_by_weight():
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0))
    weight, gradient = mx.nd.zeros(3), mx.nd.full((3,), 4.0 * hvd.rank())
    optimizer.set_weight(own_weight())
    optimizer.update(0, weight, gradient, optimizer.create_state(0, weight))
    assert weight.asnumpy().tolist() == [-1.0] * 3


@pytest.mark.ranks(2)
def test_wrong_weights_are_refused():
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    for weight in (-1, math.nan):
        with pytest.raises(ValueError, match="weight must be a finite number that is not negative"):
            trainer.set_weight(weight)
    trainer.set_weight(3)
    with pytest.raises(ValueError, match=r"step\(2\) after set_weight\(\): take the gradients of the mean loss"):
        trainer.step(2)
    with pytest.raises(ValueError, match="weight is for op=Average, not for op=Sum"):
        hvd.allreduce(mx.nd.ones(2), op=hvd.Sum, weight=1)
    with pytest.raises(ValueError, match="weight is for floats, not for int32"):
        hvd.allreduce(mx.nd.ones(2, dtype="int32"), weight=1)
