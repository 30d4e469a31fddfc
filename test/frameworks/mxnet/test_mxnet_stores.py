"""ringtrain's stores under `mx.kv`, Trainer and Module, also of scripts that know nothing of them."""

import numpy as np
import pytest
from harness.exact import require_equal

mx = pytest.importorskip("mxnet", reason="MXNet is not installed in this environment: see `make test-mxnet`")

from mxnet import autograd, gluon  # noqa: E402

import ringtrain.mxnet as hvd  # noqa: E402

SGD = {"learning_rate": 0.1, "momentum": 0.9}
ADDING = ["ringtrain", "horovod", "dist_ringtrain", "dist_horovod"]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ADDING)
def test_a_store_adds_up_and_says_who_is_there(name):
    kv = mx.kv.create(name)
    assert (kv.rank, kv.num_workers) == (hvd.rank(), hvd.size())
    assert (kv.local_rank, kv.num_local_workers) == (hvd.local_rank(), hvd.local_size())
    assert kv.type == name.replace("dist_", "dist_sync_") and not kv.is_capable("optimizer")
    value = mx.nd.ones((3, 2)) * (hvd.rank() + 1)
    out = mx.nd.zeros((3, 2))
    kv.broadcast("w", value, out=out)
    require_equal(out.asnumpy(), np.ones((3, 2), np.float32))
    kv.pushpull("w", value, out=out)
    total = np.full((3, 2), hvd.size() * (hvd.size() + 1) / 2, np.float32)
    require_equal(out.asnumpy(), total)
    kv.pushpull("w", value)
    require_equal(value.asnumpy(), total)
    parts = [mx.nd.ones((2,), ctx=mx.cpu(place)) for place in range(2)]
    kv.pushpull(5, parts)
    assert [one.asnumpy().tolist() for one in parts] == [[2 * hvd.size()] * 2] * 2


@pytest.mark.ranks(2)
def test_a_trainer_with_one_device_is_distributed():
    """MXNet drops any store whose name lacks "dist" where there is one device."""
    net = gluon.nn.Dense(3, in_units=4)
    net.initialize(mx.init.Constant(hvd.rank() + 1.0))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore="horovod")
    with autograd.record():
        loss = net(mx.nd.ones((1, 4)) * (hvd.rank() + 1)).sum()
    loss.backward()
    trainer.step(2)
    assert trainer._kvstore.num_workers == 2 and not trainer._update_on_kvstore
    require_equal(net.weight.data().asnumpy(), np.full((3, 4), 1 - 1.5, np.float32))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["dist_sync", "dist_sync_device", "dist_device_sync"])
def test_names_of_mxnet_make_stores_that_update(name):
    hvd.replace_kvstore()
    kv = mx.kv.create(name)
    assert kv.type == name and kv.is_capable("optimizer")
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5, wd=0.0))
    kv.init([3, 5], [mx.nd.ones((2, 3)), mx.nd.zeros((4,))])
    out = [mx.nd.zeros((2, 3)), mx.nd.zeros((4,))]
    kv.pull([3, 5], out=out)
    require_equal(out[0].asnumpy(), np.ones((2, 3), np.float32))
    kv.push([3, 5], [mx.nd.ones((2, 3)) * (hvd.rank() + 1), mx.nd.ones((4,))])
    kv.pull([3, 5], out=out)
    assert out[0].asnumpy().tolist() == [[-0.5] * 3] * 2 and out[1].asnumpy().tolist() == [-1.0] * 4
    kv.pushpull(5, mx.nd.ones((4,)), out=out[1])
    assert out[1].asnumpy().tolist() == [-2.0] * 4
    kv._barrier()


@pytest.mark.ranks(2)
def test_an_updater_of_the_script_gets_ndarrays_and_its_own_keys():
    hvd.replace_kvstore()
    kv = mx.kv.create("dist_sync")
    seen = []

    def update(key, total, stored):
        seen.append(key)
        stored += total * 2

    kv.init(7, mx.nd.ones((2,)))
    kv._set_updater(update)
    kv.push(7, mx.nd.ones((2,)) * (hvd.rank() + 1))
    out = mx.nd.zeros((2,))
    kv.pull(7, out=out)
    assert out.asnumpy().tolist() == [7, 7] and seen == [7]


@pytest.mark.ranks(2)
def test_an_optimizer_that_only_mxnet_has_updates():
    hvd.replace_kvstore()
    kv = mx.kv.create("dist_sync")
    kv.set_optimizer(mx.optimizer.create("dcasgd", learning_rate=0.5, wd=0.0, lamda=0.0))
    kv.init("w", mx.nd.ones((2,)))
    kv.push("w", mx.nd.ones((2,)))
    out = mx.nd.zeros((2,))
    kv.pull("w", out=out)
    assert out.asnumpy().tolist() == [0.0, 0.0]


class Heavy(mx.optimizer.Optimizer):
    """An optimizer of the script, which MXNet does not have."""

    def create_state(self, index, weight):
        return mx.nd.zeros(weight.shape, weight.context, dtype=weight.dtype)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        state += grad
        weight -= self._get_lr(index) * state


class Half(mx.optimizer.SGD):
    """One that changes an optimizer of MXNet."""

    def update(self, index, weight, grad, state):
        weight -= grad / 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "expected"), [(Heavy, -3.0), (Half, -2.0)])
def test_an_optimizer_of_a_class_of_the_script_updates(kind, expected):
    hvd.replace_kvstore()
    kv = mx.kv.create("dist_sync")
    kv.set_optimizer(kind(learning_rate=0.5))
    kv.init(0, mx.nd.zeros((2,)))
    out = mx.nd.zeros((2,))
    for _ in range(2):
        kv.push(0, mx.nd.ones((2,)))
    kv.pull(0, out=out)
    assert out.asnumpy().tolist() == [expected] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", [mx.optimizer.SGD, Heavy])
def test_a_learning_rate_that_a_trainer_changes_reaches_the_store(optimizer):
    hvd.replace_kvstore()
    net = gluon.nn.Dense(1, use_bias=False, in_units=2)
    net.initialize(mx.init.Zero())
    kv = mx.kv.create("dist_sync")
    trainer = gluon.Trainer(net.collect_params(), optimizer(learning_rate=1.0), kvstore=kv)
    step(net, trainer)
    trainer.set_learning_rate(0.0)
    step(net, trainer)
    require_equal(net.weight.data().asnumpy(), np.full((1, 2), -2, np.float32))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["dist_sync", "ringtrain"])
def test_an_unmodified_trainer_does_what_one_process_does(name):
    hvd.replace_kvstore()

    def train(kvstore, share, workers):
        mx.random.seed(1)
        net = gluon.nn.Dense(3, in_units=4)
        net.initialize(mx.init.Xavier())
        trainer = gluon.Trainer(net.collect_params(), "sgd", SGD, kvstore=kvstore)
        for step in range(5):
            inputs = np.random.default_rng(step).standard_normal((8, 4)).astype(np.float32)[share]
            with autograd.record():
                loss = net(mx.nd.array(inputs)).square().sum()
            loss.backward()
            trainer.step(len(inputs) * workers)
        return net.weight.data().asnumpy()

    own = train(name, slice(4 * hvd.rank(), 4 * hvd.rank() + 4), 2)
    np.testing.assert_allclose(own, train(None, slice(None), 1), rtol=0, atol=1e-6)
    assert np.array_equal(*hvd.allgather_object(own))


@pytest.mark.ranks(2)
def test_states_of_an_optimizer_are_saved_and_loaded(tmp_path):
    hvd.replace_kvstore()
    kv = mx.kv.create("dist_sync")
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5, momentum=0.5, wd=0.0))
    kv.init("w", mx.nd.zeros((2,)))
    out = mx.nd.zeros((2,))
    kv.pushpull("w", mx.nd.ones((2,)), out=out)
    kv.save_optimizer_states(str(tmp_path / "states"))
    hvd.barrier()
    kv.pushpull("w", mx.nd.ones((2,)), out=out)
    first = out.asnumpy()
    kv.broadcast("w", mx.nd.ones((2,)) * -1, out=out)
    kv.load_optimizer_states(str(tmp_path / "states"))
    kv.pushpull("w", mx.nd.ones((2,)), out=out)
    assert np.array_equal(out.asnumpy(), first)


@pytest.mark.ranks(2)
def test_a_trainer_pulls_rows_of_a_row_sparse_weight_and_updates_it_on_the_store():
    hvd.replace_kvstore()
    weight = gluon.Parameter("rows", shape=(4, 3), stype="row_sparse", grad_stype="row_sparse")
    weight.initialize(init="ones")
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=mx.kv.create("dist_sync"))
    numbers = mx.nd.array([hvd.rank(), 3])
    with autograd.record():
        rows = mx.nd.sparse.retain(weight.row_sparse_data(numbers), numbers)
        loss = (rows * (hvd.rank() + 1)).sum()
    loss.backward()
    trainer.step(1)
    require_equal(
        weight.row_sparse_data(mx.nd.arange(4)).asnumpy(), np.repeat(np.float32([[0], [-1], [1], [-2]]), 3, 1)
    )


@pytest.mark.ranks(2)
def test_a_trainer_sends_rows_of_a_gradient_and_gets_whole_weights():
    hvd.replace_kvstore()
    net = gluon.nn.Embedding(4, 3, sparse_grad=True)
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore="dist_sync")
    with autograd.record():
        loss = (net(mx.nd.array([hvd.rank(), 3])) * (hvd.rank() + 1)).sum()
    loss.backward()
    trainer.step(1)
    require_equal(net.weight.data().asnumpy(), np.repeat(np.float32([[0], [-1], [1], [-2]]), 3, 1))
    adding = gluon.Trainer(net.collect_params(), "sgd", kvstore="dist_ringtrain")
    with pytest.raises(ValueError, match="with sparse gradients"):
        adding.step(1)


def step(net, trainer):
    with autograd.record():
        loss = net(mx.nd.ones((1, 2))).sum()
    loss.backward()
    trainer.step(1)


@pytest.mark.ranks(2)
def test_a_store_that_updates_has_one_trainer():
    hvd.replace_kvstore()
    kv = mx.kv.create("dist_sync")
    nets = [gluon.nn.Dense(1, use_bias=False, in_units=2) for _ in range(2)]
    for net in nets:
        net.initialize(mx.init.One())
    one, other = (gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=kv) for net in nets)
    step(nets[0], one)
    with pytest.raises(ValueError, match="Trainer: this store has key 0 and an updater already, of another trainer"):
        step(nets[1], other)
    step(nets[0], one)
    require_equal(nets[0].weight.data().asnumpy(), np.full((1, 2), -1, np.float32))


@pytest.mark.ranks(2)
def test_two_trainers_share_a_store_that_only_adds_up():
    kv = mx.kv.create("ringtrain")
    nets = [gluon.nn.Dense(units, use_bias=False, in_units=2) for units in (1, 3)]
    for net in nets:
        net.initialize(mx.init.One())
    trainers = [gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=kv) for net in nets]
    for _ in range(2):
        for net, trainer in zip(nets, trainers, strict=True):
            step(net, trainer)
    for net in nets:
        require_equal(net.weight.data().asnumpy(), np.full(net.weight.shape, -1, np.float32))


@pytest.mark.ranks(2)
def test_a_module_trains_a_row_sparse_weight_on_the_store():
    hvd.replace_kvstore()
    weight = mx.sym.Variable("weight", shape=(6, 2), init=mx.init.One(), stype="row_sparse")
    total = mx.sym.sparse.dot(mx.sym.Variable("data", stype="csr"), weight)
    module = mx.mod.Module(mx.sym.MakeLoss(total), data_names=["data"], label_names=None)
    rows = np.zeros((2, 6), np.float32)
    rows[0, hvd.rank()] = rows[1, 4] = hvd.rank() + 1
    batch = mx.io.DataBatch(data=[mx.nd.array(rows).tostype("csr")], label=None)
    module.bind(data_shapes=[mx.io.DataDesc("data", (2, 6))], for_training=True)
    module.init_params()
    sgd = mx.optimizer.create("sgd", learning_rate=1.0, rescale_grad=1.0)
    module.init_optimizer(kvstore=mx.kv.create("dist_sync"), optimizer=sgd)
    for _ in range(2):
        module.prepare(batch, sparse_row_id_fn=lambda one: {"weight": one.data[0].indices})
        module.forward_backward(batch)
        module.update()
    module.prepare(batch, sparse_row_id_fn=lambda one: {"weight": mx.nd.arange(6)})
    trained = module.get_params()[0]["weight"].asnumpy()
    require_equal(trained, np.repeat(np.float32([[-1], [-3], [1], [1], [-5], [1]]), 2, 1))


@pytest.mark.ranks(2)
def test_pull_leaves_out_row_sparse_arrays_unless_it_is_told_not_to():
    hvd.replace_kvstore()
    kv = mx.kv.create("dist_sync")
    kv.init(["a", "b"], [mx.nd.ones((4, 2)), mx.nd.ones((3,))])
    rows, whole = mx.nd.sparse.zeros("row_sparse", (4, 2)), mx.nd.zeros((3,))
    kv.pull(["a", "b"], out=[rows, whole])
    assert rows.indices.size == 0 and whole.asnumpy().tolist() == [1, 1, 1]
    kv.pull("a", out=[rows], ignore_sparse=False)
    require_equal(rows.asnumpy(), np.ones((4, 2), np.float32))


@pytest.mark.ranks(2)
def test_a_store_raises_errors_of_mxnet_where_mxnet_does():
    hvd.replace_kvstore()
    kv = mx.kv.create("dist_sync")
    kv.init("w", mx.nd.ones((2,)))
    for call, kind, message in (
        (lambda: kv.init("w", mx.nd.ones((2,))), ValueError, "has a value already"),
        (lambda: kv.push("x", mx.nd.ones((2,))), KeyError, "has no value"),
        (lambda: kv.pull("x", out=mx.nd.ones((2,))), KeyError, "has no value"),
        (lambda: kv.push("w", mx.nd.ones((3,))), ValueError, "has shape"),
        (lambda: kv.set_gradient_compression({"type": "3bit"}), ValueError, "3bit"),
        (lambda: mx.kv.create("horovod").pushpull([1, 2], [mx.nd.ones((2,))]), ValueError, "as many values"),
    ):
        with pytest.raises(kind, match=message) as seen:
            call()
        assert isinstance(seen.value, mx.MXNetError)
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(hvd.NotInitializedError) as seen:
        kv.push("w", mx.nd.ones((2,)))
    assert isinstance(seen.value, mx.MXNetError)
    hvd.init()


@pytest.mark.ranks(2)
def test_the_store_of_byteps_is_refused():
    """MXNet makes a local store of any name that it does not know."""
    with pytest.raises(ValueError, match='no type "byteps" of store in ringtrain; use "ringtrain"'):
        mx.kv.create("byteps")
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore="byteps")
    with pytest.raises(mx.MXNetError, match='no type "byteps" of store in ringtrain'):
        trainer.step(1)


@pytest.mark.ranks(1)
def test_a_profile_of_servers_is_refused_with_what_there_is_instead():
    for call in (
        lambda: mx.profiler.set_config(profile_process="server", filename="profile.json"),
        lambda: mx.profiler.set_state("run", profile_process="server"),
        lambda: mx.profiler.dump(True, "server"),
        lambda: mx.profiler.pause("server"),
        lambda: mx.profiler.resume(profile_process="server"),
    ):
        with pytest.raises(mx.MXNetError, match=r"servers of ringtrain run without MXNet\. Read hvd\.metrics"):
            call()
    mx.profiler.set_state("stop")
