"""Trainings with MXNet: n ranks do what one does with the whole batch, and all have the same bits."""

import pickle
import re

import numpy as np
import pytest
from harness.logged import messages

mx = pytest.importorskip("mxnet", reason="MXNet is not installed in this environment: see `make test-mxnet`")

from mxnet import autograd, gluon  # noqa: E402

import ringtrain.mxnet as hvd  # noqa: E402

BATCH = 12
SGD = {"learning_rate": 0.1, "momentum": 0.9}


def batch(step, dtype="float32"):
    random = np.random.default_rng(step)
    return random.standard_normal((BATCH, 3, 8, 8)).astype(dtype), random.integers(0, 10, BATCH).astype(dtype)


def new_net(hybridized=True, deferred=False, seed=1, static=False):
    mx.random.seed(seed)
    known = {} if deferred else {"in_channels": 3}
    units = {} if deferred else {"in_units": 8}
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(8, 3, activation="relu", **known), gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(10, **units))
    net.initialize(mx.init.Xavier())
    if hybridized:
        net.hybridize(static_alloc=static, static_shape=static)
    return net


def losses(net, inputs, labels):
    return gluon.loss.SoftmaxCrossEntropyLoss()(net(mx.nd.array(inputs)), mx.nd.array(labels))


def weights_of(net):
    """In the order of the layers, whose names are counted on from net to net."""
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def copy_weights(target, source):
    for to, of in zip(target.collect_params().values(), source.collect_params().values(), strict=True):
        to.set_data(of.data())


def train(net, trainer, steps, share=slice(None), size=BATCH):
    for step in range(steps):
        inputs, labels = batch(step)
        with autograd.record():
            loss = losses(net, inputs[share], labels[share])
        loss.backward()
        trainer.step(size)


def own_share():
    part = BATCH // hvd.size()
    return slice(hvd.rank() * part, (hvd.rank() + 1) * part)


def require_same_everywhere(net):
    of_all = hvd.allgather_object(weights_of(net))
    for other in of_all:
        for mine, theirs in zip(of_all[0], other, strict=True):
            assert np.array_equal(mine, theirs)


def require_as_one_process(net, alone):
    for mine, whole in zip(weights_of(net), weights_of(alone), strict=True):
        np.testing.assert_allclose(mine, whole, rtol=0, atol=1e-6)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("hybridized", "arguments"),
    [
        (True, {}),
        (False, {}),
        (True, {"num_groups": 2}),
        (True, {"gradient_predivide_factor": 2.0}),
        (True, {"prefix": "mine."}),
    ],
    ids=["plain", "imperative", "groups", "predivide", "prefix"],
)
def test_ranks_train_as_one_process_on_the_whole_batch(hybridized, arguments):
    net, alone = new_net(hybridized, seed=hvd.rank(), static=True), new_net(hybridized)
    hvd.broadcast_parameters(net.collect_params())
    copy_weights(alone, net)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD, **arguments)
    train(net, trainer, 20, own_share(), BATCH // hvd.size())
    train(alone, gluon.Trainer(alone.collect_params(), "sgd", SGD, kvstore=None), 20)
    require_same_everywhere(net)
    require_as_one_process(net, alone)


@pytest.mark.ranks(2)
def test_parameters_of_unknown_shape_are_broadcast_when_it_is_known():
    net = new_net(deferred=True, seed=hvd.rank())
    hvd.broadcast_parameters(net.collect_params(), root_rank=1)
    if hvd.rank() == 0:
        net(mx.nd.ones((1, 3, 8, 8)))
    hvd.barrier()
    train(net, hvd.DistributedTrainer(net.collect_params(), "sgd", SGD), 2, own_share())
    require_same_everywhere(net)


@pytest.mark.ranks(2)
def test_broadcast_parameters_takes_dicts_of_arrays():
    arrays = {"b": mx.nd.ones((3,)) * hvd.rank(), "a": mx.nd.ones((2, 2)) * 5 * hvd.rank()}
    hvd.broadcast_parameters(arrays, root_rank=1, prefix="of this test.")
    assert arrays["b"].asnumpy().tolist() == [1, 1, 1] and arrays["a"].asnumpy().tolist() == [[5, 5], [5, 5]]
    with pytest.raises(ValueError, match="takes a dict or a ParameterDict, not a list"):
        hvd.broadcast_parameters([1])


@pytest.mark.ranks(2)
def test_two_trainers_do_not_meet():
    nets = [new_net(seed=1), new_net(seed=2)]
    alone = [new_net(seed=1), new_net(seed=2)]
    trainers = [hvd.DistributedTrainer(net.collect_params(), "sgd", SGD) for net in nets]
    for net, trainer in zip(nets, trainers, strict=True):
        hvd.broadcast_parameters(net.collect_params())
        train(net, trainer, 3, own_share(), BATCH // 2)
    for net, whole in zip(nets, alone, strict=True):
        train(whole, gluon.Trainer(whole.collect_params(), "sgd", SGD, kvstore=None), 3)
        require_as_one_process(net, whole)


@pytest.mark.ranks(2)
def test_gradients_of_several_passes_are_added_and_then_averaged():
    net, alone = new_net(), new_net()
    for one in (net, alone):
        for parameter in one.collect_params().values():
            parameter.grad_req = "add"
    trainers = [
        hvd.DistributedTrainer(net.collect_params(), "sgd", SGD),
        gluon.Trainer(alone.collect_params(), "sgd", SGD, kvstore=None),
    ]
    for one, trainer, share, size in ((net, trainers[0], own_share(), BATCH), (alone, trainers[1], slice(None), 24)):
        for step in range(4):
            inputs, labels = batch(step)
            with autograd.record():
                loss = losses(one, inputs[share], labels[share])
            loss.backward()
            if step % 2:
                trainer.step(size)
                for parameter in one.collect_params().values():
                    parameter.zero_grad()
    require_same_everywhere(net)
    require_as_one_process(net, alone)


@pytest.mark.ranks(2)
def test_gradients_travel_in_16_bits_and_large_ones_survive():
    parameter = gluon.Parameter("large", shape=(4,))
    parameter.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(
        {"large": parameter}, "sgd", {"learning_rate": 1.0}, compression=hvd.Compression.fp16
    )
    with autograd.record():
        loss = (parameter.data() * 60000).sum()
    loss.backward()
    trainer.step(1)
    assert parameter.data().asnumpy().tolist() == [-60000.0] * 4
    with pytest.raises(ValueError, match="on one"):
        quantized = hvd.DistributedTrainer(
            {"large": parameter}, "sgd", {"learning_rate": 1.0}, compression=hvd.Compression.two_bit()
        )
        quantized.step(1, ignore_stale_grad=True)


@pytest.mark.ranks(2)
def test_an_optimizer_averages_in_gluon_and_keeps_its_attributes():
    net, alone = new_net(), new_net()
    hvd.broadcast_parameters(net.collect_params())
    copy_weights(alone, net)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", **SGD))
    trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
    train(net, trainer, 5, own_share(), BATCH // 2)
    train(alone, gluon.Trainer(alone.collect_params(), "sgd", SGD, kvstore=None), 5)
    require_same_everywhere(net)
    require_as_one_process(net, alone)
    trainer.set_learning_rate(0.5)
    assert optimizer.learning_rate == optimizer._optimizer.lr == 0.5
    optimizer.rescale_grad = 0.25
    assert optimizer._optimizer.rescale_grad == 0.25
    copy = pickle.loads(pickle.dumps(optimizer))
    assert type(copy) is hvd.DistributedOptimizer and copy.momentum == 0.9
    with pytest.raises(TypeError, match="is not an mxnet"):
        hvd.DistributedOptimizer("sgd")
    with pytest.warns(UserWarning, match="takes the optimizer out"):
        assert hvd.DistributedTrainer(net.collect_params(), optimizer).optimizer is optimizer._optimizer


@pytest.mark.ranks(2)
def test_a_module_trains_as_one_process():
    def fit(optimizer, share, size):
        data = mx.sym.Variable("data")
        out = mx.sym.FullyConnected(mx.sym.Flatten(data), num_hidden=10, name="out")
        symbol = mx.sym.SoftmaxOutput(out, name="softmax")
        images, labels = batch(0)
        mx.random.seed(3)
        module = mx.mod.Module(symbol)
        iterator = mx.io.NDArrayIter(images[share], labels[share], size, label_name="softmax_label")
        module.bind(iterator.provide_data, iterator.provide_label)
        module.init_params(mx.init.Xavier())
        values = [dict(sorted(one.items())) for one in module.get_params()]
        hvd.broadcast_parameters(values[0])
        module.set_params(*values)
        module.fit(iterator, num_epoch=6, optimizer=optimizer, kvstore=None)
        return {name: value.asnumpy() for name, value in module.get_params()[0].items()}

    part = BATCH // 2
    # A Module divides by its batch where the optimizer has no factor of its own.
    own = fit(
        hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.1, rescale_grad=1 / part)),
        own_share(),
        part,
    )
    whole = fit(mx.optimizer.create("sgd", learning_rate=0.1, rescale_grad=1 / BATCH), slice(None), BATCH)
    for name, value in own.items():
        np.testing.assert_allclose(value, whole[name], rtol=0, atol=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("as_dense", [True, False], ids=["dense", "rows"])
def test_rows_of_an_embedding_are_averaged(as_dense):
    embedding = gluon.nn.Embedding(6, 2, sparse_grad=True)
    embedding.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(
        embedding.collect_params(), "sgd", {"learning_rate": 1.0}, sparse_as_dense=as_dense
    )
    words = mx.nd.array([[0, 1, 1], [1, 4, 4]][hvd.rank()])
    with autograd.record():
        loss = embedding(words).sum()
    loss.backward()
    trainer.step(1)
    expected = -np.array([0.5, 1.5, 0, 0, 1.0, 0], np.float32)
    assert embedding.weight.data().asnumpy().tolist() == np.stack([expected] * 2, 1).tolist()


@pytest.mark.ranks(2)
def test_the_state_of_an_optimizer_comes_from_one_rank():
    net = new_net()
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=None)
    if hvd.rank() == 0:
        train(net, trainer, 2)
    else:
        trainer._init_kvstore()
    hvd.broadcast_parameters(net.collect_params())
    hvd.broadcast_optimizer_state(trainer, root_rank=0)
    states = {index: [one.asnumpy() for one in state] for index, state in trainer._updaters[0].states.items()}
    described = hvd.allgather_object((states, trainer.optimizer.num_update))
    assert described[0][1] == described[1][1] == 2 and len(described[1][0]) == 4
    for index, arrays in described[0][0].items():
        assert all(np.array_equal(one, other) for one, other in zip(arrays, described[1][0][index], strict=True))
    train(net, trainer, 1)
    require_same_everywhere(net)
    assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1


@pytest.mark.ranks(2)
def test_checks_of_a_trainer_tell_what_is_wrong():
    net = new_net()
    hvd.broadcast_parameters(net.collect_params())
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD, nan_check=True, check_every=2)
    train(net, trainer, 2, own_share())
    before = weights_of(net)
    inputs, labels = batch(5)
    inputs = inputs * (np.nan if hvd.rank() == 1 else 1)
    with autograd.record():
        loss = losses(net, inputs, labels)
    loss.backward()
    with pytest.raises(hvd.NonFiniteError, match="is NaN or infinite"):
        trainer.step(BATCH)
    assert all(np.array_equal(one, other) for one, other in zip(before, weights_of(net), strict=True))
    net[2].bias.set_data(net[2].bias.data() + hvd.rank())
    hvd.barrier()
    with pytest.raises(hvd.ReplicaError, match="is not the same on all ranks"):
        train(net, hvd.DistributedTrainer(net.collect_params(), "sgd", SGD, check_every=1), 1)


WRONG = {
    "parameters": r"begin with different parameters.*call hvd.broadcast_parameters\(net.collect_params\(\),",
    "data": r"have the same gradients in the first step.*for example with DataLoader\(dataset.shard\(",
    "learning rate": r"0.01, is the default of SGD.*0.01 \* hvd.size\(\) is usual",
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("wrong", [*WRONG, None])
def test_the_first_step_says_once_what_is_wrong_and_how_to_mend_it(wrong):
    net = new_net(seed=hvd.rank() if wrong == "parameters" else 1)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", None if wrong == "learning rate" else SGD)
    with messages() as said:
        train(net, trainer, 3, slice(None) if wrong == "data" else own_share())
    assert len(said) == (wrong in WRONG and hvd.rank() == 0), said
    assert all(re.search(WRONG[wrong], one) for one in said)


@pytest.mark.ranks(2)
def test_a_trainer_on_two_contexts_is_refused():
    parameter = gluon.Parameter("w", shape=(2,))
    parameter.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    with pytest.raises(ValueError, match="start a rank for each"):
        hvd.DistributedTrainer({"w": parameter}, "sgd")
