"""Gradients in fewer bits: the codes of MXNet, and what is left out comes later."""

import ml_dtypes
import numpy as np
import pytest
from harness.exact import require_equal

import ringtrain as hvd
from ringtrain import kvstore

TYPES = [
    {"type": "2bit", "threshold": 0.5},
    {"type": "2bit", "threshold": 0.1},
    {"type": "1bit", "threshold": 0.25},
    {"type": "fp16"},
    {"type": "bf16"},
    {"type": "1bit", "threshold": 0},
]
SIZE = 1003


def received(params, gradient, residual):
    """Returns what is received of a gradient; changes the residual in place. From MXNet's documentation and source."""
    if params["type"] in ("fp16", "bf16"):
        return gradient.astype(np.float16 if params["type"] == "fp16" else ml_dtypes.bfloat16).astype("float32")
    residual += gradient
    threshold = np.float32(params["threshold"])
    if params["type"] == "2bit":
        values = np.where(residual >= threshold, threshold, np.where(residual <= -threshold, -threshold, 0))
    else:
        values = np.where(residual > threshold, 1, -1)
    residual -= values.astype("float32")
    return values.astype("float32")


def gradient(rank, number, device=0):
    return np.random.default_rng([rank, number, device]).normal(0, 0.5, SIZE).astype("float32")


def require_pushes(params, rounds=6):
    kv, size = kvstore.create("dist_sync"), hvd.size()
    kv.set_gradient_compression(params)
    kv.init("a", np.zeros(SIZE, "float32"))
    residuals = np.zeros((size, SIZE), "float32")
    for number in range(rounds):
        mine = [gradient(kv.rank, number, device) for device in range(2)]
        total = np.zeros(SIZE, "float32")
        for rank in range(size):
            of_rank = gradient(rank, number, 0) + gradient(rank, number, 1)
            total += received(params, of_rank, residuals[rank])
        if "bit" not in params["type"]:
            total = received(params, total, total)  # sums travel in 16 bits, too
        out = np.zeros(SIZE, "float32")
        if number % 2:
            kv.push("a", mine)
            kv.pull("a", out=out)
        else:
            kv.pushpull("a", mine, out=out)
        require_equal(out, total)


@pytest.mark.fast
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("params", TYPES, ids=str)
def test_the_sums_that_workers_of_a_node_receive(params):
    require_pushes(params)


# Between hosts codes travel.


@pytest.mark.ranks(3, hosts=(1, 2))
@pytest.mark.parametrize("params", TYPES, ids=str)
def test_the_sums_that_workers_of_several_hosts_receive(params):
    assert kvstore.create("dist_sync").num_local_workers == (1 if hvd.rank() == 0 else 2)
    require_pushes(params)


@pytest.mark.ranks(3, hosts=(1, 2))
@pytest.mark.parametrize("params", [TYPES[0], TYPES[3]], ids=str)
def test_pushes_before_and_after_compression(params):
    kv = kvstore.create("dist_sync")
    kv.init(["a", "b"], [np.zeros(SIZE, "float32")] * 2)
    thirds = np.arange(SIZE, dtype="float32") / 3
    kv.push("a", thirds)  # in full, though nobody has waited for it
    kv.set_gradient_compression(params)
    kv.init("c", np.zeros(SIZE, "float32"))
    require_equal(kv.pull("a"), thirds + thirds + thirds)
    for key in "abc":
        kv.push(key, gradient(kv.rank, 1))
        nothing_left = np.zeros((kv.num_workers, SIZE), "float32")
        total = sum(received(params, gradient(rank, 1), nothing_left[rank]) for rank in range(kv.num_workers))
        require_equal(kv.pull(key), total if "bit" in params["type"] else received(params, total, total))


@pytest.mark.ranks(3, hosts=(1, 2))
def test_an_average_of_codes():
    kv = kvstore.create("horovod", average=True)
    kv.set_gradient_compression({"type": "2bit"})
    kv.init("a", np.zeros(4, "float32"))
    out = np.zeros(4, "float32")
    kv.pushpull("a", np.full(4, 0.75 if kv.rank else 0.5, "float32"), out=out)
    assert (out == 0.5).all()


@pytest.mark.parametrize("params", TYPES[:3], ids=str)
def test_each_device_of_a_local_store_has_a_residual_of_its_own(params):
    kv = kvstore.create("device")
    kv.set_gradient_compression(params)
    kv.init("a", np.zeros(SIZE, "float32"))
    residuals = np.zeros((3, SIZE), "float32")
    for number in range(4):
        mine = [gradient(0, number, device) for device in range(3)]
        before = [array.copy() for array in mine]
        expected = np.zeros(SIZE, "float32")
        for device in range(3):
            expected += received(params, mine[device], residuals[device])
        kv.push("a", mine)
        require_equal(kv.pull("a"), expected)
        for array, as_it_was in zip(mine, before, strict=True):
            require_equal(array, as_it_was)


@pytest.mark.ranks(3, hosts=(1, 2))
def test_keys_that_cannot_be_compressed_are_refused():
    kv = kvstore.create("dist_sync")
    kv.set_gradient_compression({"type": "2bit"})
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})  # the same
    with pytest.raises(ValueError, match=r"gradient compression is .*2bit.* already"):
        kv.set_gradient_compression({"type": "1bit"})
    with pytest.raises(ValueError, match="key 'a' is float64, but gradient compression is for float32"):
        kv.init("a", np.zeros(3))
    kv.init("a", np.zeros(3, "float32"))
    with pytest.raises(ValueError, match="join: the others' pushes wait for the codes of this worker"):
        kv.join()
    kv.barrier()
    late = kvstore.create("dist_sync")
    late.init("a", np.zeros(3))
    with pytest.raises(ValueError, match="key 'a' is float64, but gradient compression is for float32"):
        late.set_gradient_compression({"type": "2bit"})


@pytest.mark.ranks(3)
def test_a_worker_without_data_counts_with_zeros_where_codes_do_not_travel():
    kv = kvstore.create("dist_sync")
    kv.set_gradient_compression({"type": "2bit"})
    kv.init("a", np.zeros(3, "float32"))
    for _ in range(kv.rank):
        kv.push("a", np.ones(3, "float32"))
        kv.pull("a")
    kv.join()
    assert (kv.pull("a") == 0.5).all()
