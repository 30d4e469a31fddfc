"""Compression.powersgd for the trainer of MXNet."""

import numpy as np
import pytest

mx = pytest.importorskip("mxnet", reason="MXNet is not installed in this environment: see `make test-mxnet`")

from mxnet import autograd, gluon  # noqa: E402
from power_sgd_reference import Reference  # noqa: E402

import ringtrain.mxnet as hvd  # noqa: E402

WEIGHTS = [3, 1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("weighs", (False, True))
def test_a_trainer_averages_as_the_algorithm_of_the_paper(weighs):
    net = gluon.nn.Dense(30, in_units=40)
    net.initialize(mx.init.Zero())
    compression = hvd.Compression.powersgd(2)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, compression=compression)
    reference = None
    for step in range(4):
        inputs = np.random.default_rng(step).standard_normal((hvd.size(), 30, 40)).astype("f4")
        before = net.weight.data().asnumpy()
        with autograd.record():
            loss = (net.weight.data() * mx.nd.array(inputs[hvd.rank()])).sum() + (net.bias.data() * hvd.rank()).sum()
        loss.backward()
        if weighs:
            trainer.set_weight(WEIGHTS[hvd.rank()])
        trainer.step(1)
        change = before - net.weight.data().asnumpy()
        if reference is None:
            (name,) = trainer._averaging._factored.power_sgd.state_dict()["gradients"]
            reference = Reference(compression, name, (30, 40), hvd.size())
        np.testing.assert_allclose(change, reference.step(inputs, WEIGHTS if weighs else None), atol=2e-5)
        assert net.bias.data().asnumpy().tolist() == [-(step + 1) * (0.25 if weighs else 0.5)] * 30
        hvd.check_replicas({"weight": net.weight.data(), "bias": net.bias.data()})


@pytest.mark.ranks(2)
def test_a_sparse_gradient_that_is_reduced_as_a_dense_one_travels_as_factors():
    net = gluon.nn.Embedding(50, 20, sparse_grad=True)
    net.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 1.0},
        compression=hvd.Compression.powersgd(3),
        sparse_as_dense=True,
    )
    with autograd.record():
        loss = net(mx.nd.array([1, 5 + hvd.rank()])).sum()
    loss.backward()
    trainer.step(1)
    expected = np.zeros((50, 20))
    expected[1], expected[5], expected[6] = -1, -0.5, -0.5
    np.testing.assert_allclose(net.weight.data().asnumpy(), expected, atol=1e-5)


@pytest.mark.ranks(1)
def test_groups_are_not_for_powersgd():
    net = gluon.nn.Dense(3, in_units=4)
    net.initialize()
    with pytest.raises(ValueError, match=r"groups are not for Compression\.powersgd"):
        hvd.DistributedTrainer(net.collect_params(), "sgd", compression=hvd.Compression.powersgd(2), num_groups=2)
