"""Stores: what each call means, beside a model of forty lines."""

import importlib.util
import time

import ml_dtypes
import numpy as np
import pytest
from harness.exact import DTYPE_OF_EACH_SIZE, DTYPES, require_equal
from kvstore_model import Model, Program

import ringtrain as hvd
from ringtrain import kvstore

LOCAL = ["local", "local_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device", "nccl"]
WORLD = ["dist", "dist_sync", "dist_sync_device", "dist_device_sync", "horovod", "ringtrain"]
INT_KEYS, STR_KEYS = [3, 5, 7, 9, 11], ["weight", "bias", "3", "a/b", ""]


def same(array):
    return array


def to_torch(array):
    import torch

    return torch.from_numpy(array.copy()) if array.dtype != ml_dtypes.bfloat16 else to_torch_of_bfloat16(array)


def to_torch_of_bfloat16(array):
    import torch

    return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)


def from_torch(tensor):
    from ringtrain.arrays import torch

    return torch.on_host(tensor)


HAS_TORCH = importlib.util.find_spec("torch") is not None
with_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed in this environment")
LIBRARIES = {"numpy": (same, same), **({"torch": (to_torch, from_torch)} if HAS_TORCH else {})}


def run_program(kind, dtype, keys, library, updates, seed):
    kv = kvstore.create(kind)
    model = Model(kv.num_workers, updates, kind in WORLD)
    Program(kv, model, seed, np.dtype(dtype), keys, *LIBRARIES[library]).run(25)
    if kind in WORLD:
        kv.barrier()


# The tutorial of MXNet


def tutorial(kv):
    shape = (2, 3)
    kv.init(3, np.full(shape, 2.0))
    a = np.zeros(shape)
    kv.pull(3, out=a)
    assert (a == 2).all()
    kv.push(3, np.full(shape, 8.0))
    kv.pull(3, out=a)
    assert (a == 8 * kv.num_workers).all()
    kv.push(3, [np.ones(shape)] * 4)
    kv.pull(3, out=a)
    assert (a == 4 * kv.num_workers).all()

    def update(key, given, stored):
        assert key == 3 or key in (5, 7, 9)
        stored += given * 2

    kv.init(9, np.full(shape, 4.0))
    kv._set_updater(update)
    kv.push(9, np.ones(shape))
    kv.pull(9, out=a)
    assert (a == 4 + 2 * kv.num_workers).all()
    keys = [5, 7]
    kv.init(keys, [np.full(shape, 3.0)] * 2)
    kv.push(keys, [[np.ones(shape)] * 4] * len(keys))
    outs = [np.zeros(shape) for _ in keys]
    kv.pull(keys, out=outs)
    assert all((out == 3 + 8 * kv.num_workers).all() for out in outs)


@pytest.mark.parametrize("kind", LOCAL)
def test_the_tutorial_in_one_process(kind):
    tutorial(kvstore.create(kind))


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_the_tutorial_on_many_workers():
    tutorial(kvstore.create("dist_sync"))


# Random programs


@pytest.mark.parametrize("updates", [False, True], ids=["sums", "updates"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", LOCAL)
def test_random_programs_in_one_process(kind, library, updates):
    for seed, keys in enumerate((INT_KEYS, STR_KEYS)):
        run_program(kind, "float32", keys, library, updates, seed)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", [one for one in DTYPES if one.kind != "b"], ids=str)
def test_random_programs_of_every_dtype_in_one_process(dtype, library):
    run_program("local", dtype, INT_KEYS, library, False, 5)


def run_programs_of_sums(library):
    for seed, (kind, keys) in enumerate([("dist_sync", INT_KEYS), ("horovod", STR_KEYS)]):
        run_program(kind, "float32", keys, library, False, seed)


def run_programs_of_updates(library):
    for seed, (kind, keys) in enumerate([("dist", STR_KEYS), ("dist_device_sync", INT_KEYS)]):
        run_program(kind, "float32", keys, library, True, seed)


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, 4, fast=[2, 3])
def test_random_programs_of_sums():
    run_programs_of_sums("numpy")


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, 4, fast=[2, 3])
def test_random_programs_of_updates():
    run_programs_of_updates("numpy")


@with_torch
@pytest.mark.ranks(2)
def test_parameters_of_torch_are_pulled_without_autograd():
    import torch

    kv = kvstore.create("dist_sync")
    layer = torch.nn.Linear(3, 2)
    kv.init("weight", layer.weight)
    layer(torch.ones(1, 3)).sum().backward()
    kv.push("weight", layer.weight.grad)
    before = layer.weight._version
    kv.pull("weight", out=layer.weight)
    assert (layer.weight == 2).all() and layer.weight.is_leaf and layer.weight._version > before
    kv.pushpull("weight", layer.weight.grad)
    assert (layer.weight.grad == 2).all()
    kv.init("half", torch.zeros(4, dtype=torch.bfloat16))
    kv.push("half", torch.full((4,), 1.5))
    pulled = kv.pull("half")
    assert pulled.dtype == torch.bfloat16 and (pulled == 3).all()
    out = np.zeros(4, "float64")
    kv.pull("half", out=out)
    assert (out == 3).all()
    kv.push("half", np.full(4, 0.5, ml_dtypes.bfloat16))
    assert (kv.pull("half") == 1).all()


@pytest.mark.parametrize("kind", ["local", "device"])
def test_float32_may_come_beside_sixteen_bits(kind):
    kv = kvstore.create(kind)
    kv.init("half", np.zeros(4, np.float16))
    for dtypes in (("float16", "float32"), ("float32", "float16")):
        kv.push("half", [np.full(4, number + 0.5, dtype) for number, dtype in enumerate(dtypes)])
        assert kv.pull("half").tolist() == [2.0] * 4 and kv.pull("half").dtype == np.float16


@with_torch
@pytest.mark.ranks(2)
def test_random_programs_of_torch():
    run_programs_of_sums("torch")
    run_programs_of_updates("torch")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPE_OF_EACH_SIZE, ids=str)
def test_random_programs_of_every_size_of_element(dtype):
    run_program("dist_sync", dtype, INT_KEYS, "numpy", False, 7)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", WORLD)
def test_random_programs_of_every_type(kind):
    run_program(kind, "float64", INT_KEYS, "numpy", False, 8)


@pytest.mark.ranks(3, env={"RINGTRAIN_SHARED_MEMORY": "off"})
def test_random_programs_without_shared_memory():
    run_program("dist_sync", "float32", INT_KEYS, "numpy", True, 9)


# Beyond the model


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
def test_each_push_is_a_round_of_its_own():
    """In MXNet two pushes of one worker complete a round, and a pull overwrites what was pushed."""
    kv, size = kvstore.create("dist_sync"), hvd.size()
    sums = []
    kv.set_updater(lambda key, total, stored: sums.append(float(total[0])))
    kv.init("a", np.zeros(4, "float32"))
    mine = np.ones(4, "float32")
    for number in range(5):
        kv.push("a", mine * 10**number * (kv.rank + 1))
    kv.pull("a", out=mine)
    workers = size * (size + 1) // 2
    assert sums == [workers * 10.0**number for number in range(5)]
    assert (mine == 0).all()


@pytest.mark.ranks(2, 3)
def test_pushes_of_one_worker_do_not_wait_for_another_that_waits_for_them():
    kv = kvstore.create("dist_sync")
    kv.init(["a", "b"], [np.zeros(3)] * 2)
    out = np.zeros(3)
    ones = np.ones(3)
    if kv.rank == 0:
        for _ in range(3):
            kv.push("a", ones)
        kv.push("b", ones)
        kv.pull("b", out=out)
    else:
        kv.push("b", ones)
        kv.pull("b", out=out)
        for _ in range(3):
            kv.push("a", ones)
    assert (out == kv.num_workers).all()
    kv.pull("a", out=out)
    assert (out == kv.num_workers).all()


@pytest.mark.ranks(2)
def test_repeated_keys_are_summed():
    kv = kvstore.create("dist_sync")
    kv.init("a", np.zeros(2))
    kv.push(["a", "a", "a"], [np.full(2, 1.0), [np.full(2, 2.0)], np.full(2, 3.0)])
    outs = [np.zeros(2), np.zeros(2)]
    kv.pull(["a", "a"], out=outs)
    assert [float(out[0]) for out in outs] == [12.0, 12.0]


@pytest.mark.parametrize("kind", ["local", "device"])
def test_sums_of_16_bits_are_rounded_once(kind):
    kv = kvstore.create(kind)
    kv.init(0, np.zeros(1, "float16"))
    kv.push(0, [np.full(1, value, "float16") for value in (2048, 1, 1, 1, 1)])
    assert kv.pull(0)[0] == 2052


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_float32_may_be_pushed_to_16_bits_and_pull_casts(kind):
    kv = kvstore.create(kind)
    kv.init(0, np.zeros(3, "float16"))
    kv.push(0, np.full(3, 1.5, "float32"))
    for dtype in ("float16", "float32", "float64", "int32"):
        out = np.zeros(3, dtype)
        kv.pull(0, out=out)
        assert (out == np.full(3, 1.5 * kv.num_workers).astype(dtype)).all()


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
def test_the_value_of_rank_0_counts_and_broadcast_gives_it_again():
    kv = kvstore.create("dist_sync")
    out = np.zeros(3)
    kv.broadcast("a", np.full(3, kv.rank + 1.0), out)
    assert (out == 1).all()
    kv.push("a", np.ones(3))
    kv.broadcast("a", np.full(3, kv.rank + 5.0), out)
    assert (out == 5).all() and (kv.pull("a") == 5).all()


@pytest.mark.ranks(1, 2)
def test_a_value_without_out_is_a_view_that_cannot_be_written_to():
    for kind in ("local", "dist_sync"):
        kv = kvstore.create(kind)
        kv.init(["a", "b"], [np.ones(3), np.zeros(2)])
        a, b = kv.pull(["a", "b"])
        assert (a == 1).all() and (b == 0).all()
        with pytest.raises(ValueError, match="read-only"):
            a[0] = 5
    assert (kv.pull("a") == 1).all()


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
def test_a_store_named_horovod_can_average():
    kv = kvstore.create("Horovod", average=True)
    assert kv.type == "horovod" and not kv.is_capable("optimizer")
    value, out = np.full(5, 6.0 * kv.rank), np.zeros(5)
    kv.broadcast("a", value, value)
    assert (value == 0).all()
    kv.pushpull("a", np.full(5, 6.0 * kv.rank), out=out)
    assert (out == 3.0 * (kv.num_workers - 1)).all()


@pytest.mark.ranks(2, 3)
def test_workers_know_each_other():
    kv = kvstore.create("dist_sync")
    assert (kv.rank, kv.num_workers) == (hvd.rank(), hvd.size())
    assert (kv.local_rank, kv.num_local_workers) == (hvd.local_rank(), hvd.local_size())
    assert (kv.type, kv.is_recovery, kv.get_num_dead_node()) == ("dist_sync", False, 0)
    kv._barrier()
    local = kvstore.create("LOCAL")
    assert (local.rank, local.num_workers, local.local_rank, local.num_local_workers) == (0, 1, 0, 1)


@pytest.mark.ranks(4)
def test_the_workers_may_be_those_of_a_process_set():
    some = hvd.add_process_set([1, 3])
    if hvd.rank() in (1, 3):
        kv = kvstore.create("dist_sync", process_set=some)
        assert (kv.rank, kv.num_workers, kv.num_local_workers) == (hvd.rank() // 2, 2, 2)
        kv.init(1, np.full(3, float(hvd.rank())))
        assert (kv.pull(1) == 1).all()
        kv.push(1, np.full(3, float(hvd.rank())))
        assert (kv.pull(1) == 4).all()
    of_all = kvstore.create("dist_sync")  # of whose number not all ranks have made as many stores
    of_all.init(1, np.zeros(3))
    of_all.push(1, np.ones(3))
    if some.included():
        kv.push(1, np.ones(3))
        assert (kv.pull(1) == 2).all()
    assert (of_all.pull(1) == 4).all()
    hvd.remove_process_set(some)


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
def test_a_worker_without_data_counts_with_zeros_and_has_all_values_in_the_end():
    kv = kvstore.create("dist_sync")
    kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    kv.init(["a", "b"], [np.zeros(3), np.zeros(2)])
    for _ in range(2 + 2 * kv.rank):
        kv.push("a", np.ones(3))
        kv.pull("a")
    kv.join()
    values = hvd.allgather_object(kv.pull("a").tolist())
    assert values == [values[0]] * hvd.size() and values[0][0] < 0
    kv.push("a", np.ones(3))
    values = hvd.allgather_object(kv.pull("a").tolist())
    assert values == [values[0]] * hvd.size()


@pytest.mark.ranks(2, 3)
def test_a_value_given_away_before_a_join_is_gone_for_all():
    kv = kvstore.create("dist_sync")
    kv.init(["a", "b"], [np.zeros(3), np.zeros(2)])
    kv.pushpull("a", np.ones(3))
    if kv.rank == 0:
        kv.push(["a", "b"], [np.ones(3), np.ones(2)])
        assert (kv.pull("a") == 1).all()
    kv.join()
    with pytest.raises(ValueError, match="key 'a': pushpull"):
        kv.pull("a")
    assert (kv.pull("b") == 1).all()
    kv.push("a", np.ones(3))
    assert (kv.pull("a") == kv.num_workers).all()


@pytest.mark.fast
@pytest.mark.ranks(2, 3, 4, fast=[3])
def test_all_workers_have_the_same_bits_whoever_is_late():
    kv = kvstore.create("dist_sync")
    kv.set_optimizer("adam", learning_rate=0.01)
    keys, random = list(range(6)), np.random.default_rng(kv.rank)
    weights = [np.ones(500 * 10**key % 60_001, "float32") for key in keys]
    kv.init(keys, weights)
    for _ in range(4):
        for key in random.permutation(keys).tolist():
            time.sleep(random.random() * 0.004)
            kv.push(key, random.normal(size=weights[key].shape).astype("float32"))
        kv.pull(keys, out=weights)
    hvd.check_replicas({str(key): weight for key, weight in zip(keys, weights, strict=True)})


@pytest.mark.ranks(2)
def test_several_stores_have_keys_of_their_own():
    one, other = kvstore.create("dist_sync"), kvstore.create("dist_sync")
    one.init("a", np.zeros(2))
    other.init("a", np.ones(3))
    one.push("a", np.ones(2))
    other.push("a", np.full(3, 5.0))
    assert (one.pull("a") == 2).all() and (other.pull("a") == 10).all()


@pytest.mark.ranks(2)
def test_a_value_that_is_never_pulled_is_not_kept():
    kv = kvstore.create("dist_sync")
    kv.init(0, np.zeros(1000))
    for number in range(50):
        kv.push(0, np.full(1000, float(number)))
        kv.barrier()
    assert len(kv._backend.entries[0].rounds) <= 2
    assert (kv.pull(0) == 2 * 49).all()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_complex_strided_and_single_numbers(kind):
    kv = kvstore.create(kind)
    size = kv.num_workers
    value = np.arange(6, dtype="complex128").reshape(2, 3) * (1 + 2j)
    kv.init(["complex", "number", "truth"], [value, 3.0, np.array([True, False])])
    kv.push("complex", [value, value])
    out = np.zeros((3, 4), "complex64").T[:2]
    kv.pull("complex", out=out)
    assert not out.flags.c_contiguous and (out == 2 * size * value).all()
    strided = np.zeros((3, 2), "complex128").T
    strided[...] = value
    kv.pushpull("complex", strided)
    assert (strided == size * value).all()
    assert kv.pull("number") == 3
    kv.push(["number", "truth"], [np.float64(1.5), np.array([False, True])])
    assert kv.pull("number") == 1.5 * size and kv.pull("truth").tolist() == [False, True]


# Optimizers and files


@pytest.mark.fast
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_sync_device"])
def test_an_optimizer_updates_the_values_and_its_numbers_may_change(kind):
    kv = kvstore.create(kind)
    kv.set_optimizer("sgd", learning_rate=0.5)
    kv.init("a", np.full(3, 10.0))
    kv.push("a", np.ones(3))
    assert (kv.pull("a") == 10 - 0.5 * kv.num_workers).all()
    kv.update_optimizer(learning_rate=2.0)
    kv.push("a", np.ones(3))
    assert (kv.pull("a") == 10 - 2.5 * kv.num_workers).all()
    out = np.ones(3)
    kv.pushpull("a", out)
    assert (out == 10 - 4.5 * kv.num_workers).all()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_the_states_of_an_optimizer_are_saved_and_loaded(kind, tmp_path):
    file = str(tmp_path / "states.npz")

    def started():
        kv = kvstore.create(kind)
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        kv.init("a", np.zeros(3))
        kv.push("a", np.ones(3))
        kv.wait()
        return kv

    kv = started()
    kv.save_optimizer_states(file)
    kv.push("a", np.ones(3))
    expected = kv.pull("a").copy()
    again = started()
    if kind != "local":
        again.barrier()
    again.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    again.load_optimizer_states(file)
    again.push("a", np.ones(3))
    require_equal(again.pull("a"), expected)


@pytest.mark.fast
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_whole_store_is_saved_and_loaded(kind, tmp_path):
    file = str(tmp_path / "store.npz")

    def started(value):
        kv = kvstore.create(kind)
        kv.set_optimizer("adam", learning_rate=0.1)
        kv.init([1, 2], [np.full(3, value), np.full((2, 2), value, ml_dtypes.bfloat16)])
        return kv

    kv = started(1.0)
    kv.push([1, 2], [np.ones(3), np.ones((2, 2), "float32")])
    kv.save(file)
    hvd.barrier()
    again = started(5.0)
    again.load(file)
    for one in (kv, again):
        one.push([1, 2], [np.ones(3), np.ones((2, 2), "float32")])
    require_equal(again.pull(1), kv.pull(1))
    require_equal(again.pull(2), kv.pull(2))


# Stores of users, and shares of the data


def test_a_class_that_is_registered_is_found_by_its_name():
    @kvstore.KVStoreBase.register
    class OfTheTest(kvstore.KVStoreBase):
        pass

    assert type(kvstore.create("OfTheTest")) is OfTheTest
    with pytest.warns(UserWarning, match="ofthetest"):
        kvstore.KVStoreBase.register(type("OfTheTest", (kvstore.KVStoreBase,), {}))
    del kvstore.KVStoreBase.kv_registry["ofthetest"]


@with_torch
def test_data_of_torch_are_split_onto_devices():
    loaded = kvstore.split_and_load(to_torch(np.arange(14).reshape(7, 2)), ["cpu", "cpu"], even_split=False)
    assert [tuple(one.shape) for one in loaded] == [(4, 2), (3, 2)]
    with pytest.raises(ValueError, match="PyTorch has no device"):
        kvstore.split_and_load(loaded[0], ["no such device"])


def test_parts_are_everything_once():
    for count in (0, 1, 7, 100):
        for parts in (1, 2, 3, 8):
            slices = [kvstore.part(count, parts, index) for index in range(parts)]
            assert [i for one in slices for i in range(count)[one]] == list(range(count))
            lengths = [one.stop - one.start for one in slices]
            assert max(lengths) - min(lengths) <= 1
    with pytest.raises(ValueError, match="no part 2 of 2"):
        kvstore.part(5, 2, 2)


def test_data_are_split_as_in_mxnet():
    data = np.arange(14).reshape(7, 2)
    assert [len(one) for one in kvstore.split_data(data, 3, even_split=False)] == [3, 2, 2]
    assert [one.shape for one in kvstore.split_data(data, 2, batch_axis=1)] == [(7, 1), (7, 1)]
    with pytest.raises(ValueError, match="7 examples cannot be split evenly into 3"):
        kvstore.split_data(data, 3)
    with pytest.raises(ValueError, match="too few"):
        kvstore.split_data(data, 8, even_split=False)
    loaded = kvstore.split_and_load(data[:6], ["cpu", "cpu"])
    assert [one.shape for one in loaded] == [(3, 2), (3, 2)]
    with pytest.raises(ValueError, match="host's memory"):
        kvstore.split_and_load(data[:6], ["cpu", "cuda:0"])


def check_rows(kv):
    first = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    kv.init(["e", "b"], [first.copy(), np.zeros(4, np.float32)])
    kv.set_optimizer("test")
    pushed = kvstore.RowSparse([5, 2, 5], np.ones((3, 3), np.float32))
    kv.push(["e", "b"], [[pushed], np.ones(4, np.float32)])
    first[[2, 5]] += np.array([[1], [2]], np.float32) * kv.num_workers
    out = kvstore.RowSparse()
    kv.row_sparse_pull("e", out=out, row_ids=np.array([5, 2, 7, 5]))
    assert out.indices.tolist() == [2, 5, 7] and (out.rows == first[[2, 5, 7]]).all()
    assert (kv.pull("e") == first).all() and (kv.pull("b") == kv.num_workers).all()
    handle = kv.push("e", pushed, copy=False)
    if handle is not None:
        hvd.synchronize(handle)
    assert (kv.row_sparse_pull("e", row_ids=[5]).rows == first[5] + 2 * kv.num_workers).all()
    assert kv.restored == {}


@pytest.mark.parametrize("kind", ["local", "device"])
def test_rows_of_one_process_are_pushed_and_pulled(kind):
    check_rows(kvstore.create(kind))


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_sync_device"])
def test_rows_are_pushed_and_pulled_without_servers(kind):
    check_rows(kvstore.create(kind))


@with_torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sparse_tensors_of_torch_are_rows(dtype):
    import torch

    weight = torch.arange(12.0).reshape(4, 3).to(getattr(torch, dtype)).requires_grad_()
    kv = kvstore.create("local")
    kv.init("e", weight.detach())
    kv.set_optimizer("sgd", learning_rate=1.0)
    torch.nn.functional.embedding(torch.tensor([1, 3, 1]), weight, sparse=True).sum().backward()
    kv.push("e", weight.grad)
    out = torch.zeros(4, 3, dtype=weight.dtype).to_sparse(1)
    kv.row_sparse_pull("e", out=out, row_ids=torch.tensor([3, 1, 3]))
    assert out.coalesce().indices().tolist() == [[1, 3]]
    expected = weight.detach() - weight.grad.to_dense()
    assert torch.equal(out.coalesce().values(), expected[[1, 3]])
    kv.push("e", out, copy=True)
    with pytest.raises(ValueError, match="a tensor with 1 sparse dimension, not 2"):
        kv.push("e", weight.detach().to_sparse())
    with pytest.raises(ValueError, match=r"key 'e' has shape \(4, 3\), but out has \(4, 4\)"):
        kv.row_sparse_pull("e", out=torch.zeros(4, 4).to_sparse(1), row_ids=[1])
    with pytest.raises(TypeError, match="out is a RowSparse or a sparse_coo tensor"):
        kv.row_sparse_pull("e", out=torch.zeros(4, 3), row_ids=[1])
