"""An update reads rates, attributes and random numbers when its gradient is pushed: as in one process, on all ranks."""

import numpy as np
import pytest
from harness.frameworks import on_demand
from kvstore_jobs import job

import ringtrain as hvd
from ringtrain import kvstore

torch = on_demand("torch")

KEYS = ["a", "b", "c"]
SIZES = [3, 5000, 50_000]


class Descent:
    """An optimizer of the script, which changes `lr` as it goes."""

    def __init__(self):
        self.lr = 1.0
        self.random = np.random.default_rng(3)

    def create_state(self, key, weight):
        return None

    def update(self, key, weight, grad, state):
        weight -= self.lr * self.random.integers(1, 5) * grad


def descend(kv, copies, optimizer, between=lambda: None):
    """Pushes twice between pulls; `between` is called after each push. Returns one element of each key."""
    kv.init(KEYS, [np.zeros(size, np.float32) for size in SIZES])
    kv.set_optimizer(optimizer) if not isinstance(optimizer, dict) else kv.set_optimizer("sgd", **optimizer)
    for step in range(4):
        for keys in (KEYS, KEYS[: 1 + step % 2]):
            sizes = SIZES[: len(keys)]
            kv.push(keys, [[np.ones(size, np.float32)] * copies for size in sizes])
            between()
        kv.pull(KEYS)
    return [float(kv.pull(key)[-1]) for key in KEYS]


def require_as_in_one_process(copies, make, between=lambda optimizer: None):
    optimizers = [make(), make()]
    got = descend(kvstore.create("dist_sync"), 1, optimizers[0], lambda: between(optimizers[0]))
    assert got == descend(kvstore.create("local"), copies, optimizers[1], lambda: between(optimizers[1]))
    if hvd.is_initialized():
        hvd.check_replicas({"values": np.array(got)})


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_schedule_is_read_at_the_push(momentum):
    schedule = {"lr_scheduler": lambda num_update: 2.0 ** (4 - num_update), "momentum": momentum}
    require_as_in_one_process(hvd.size(), lambda: schedule)


@pytest.mark.ranks(2)
def test_a_schedule_of_a_worker_that_is_far_ahead_is_read_at_the_push():
    kv = kvstore.create("dist_sync")
    kv.init(["a", "b"], [np.zeros(10, np.float32)] * 2)
    kv.set_optimizer("sgd", lr_scheduler=lambda num_update: 1.0 / num_update)
    if kv.rank == 1:
        hvd.barrier()  # worker 0 has pushed everything
    for _ in range(2):
        kv.push(["a", "b"], [np.ones(10, np.float32)] * 2)
    if kv.rank == 0:
        hvd.barrier()
    else:
        kv.pull("b")
    assert [kv.pull(key)[0] for key in ("a", "b")] == [-3, -3]


@pytest.mark.ranks(2)
def test_a_schedule_that_reads_a_variable_of_the_script_reads_it_at_the_push():
    lr = [1.0]
    kv = kvstore.create("dist_sync")
    kv.init("a", np.zeros(10, np.float32))
    kv.set_optimizer("sgd", lr_scheduler=lambda num_update: lr[0])
    for lr[0] in (1.0, 0.25, 0.0):
        kv.push("a", np.ones(10, np.float32))
    assert (kv.pull("a") == -2.5).all()


@pytest.mark.ranks(2)
def test_an_optimizer_of_the_script_runs_in_the_push():
    def slower(optimizer):
        optimizer.lr /= 2

    require_as_in_one_process(hvd.size(), Descent, slower)


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_function_of_the_script_runs_in_the_push(library):
    seen, step = [], [0]
    ones = np.ones(20, np.float32) if library == "numpy" else torch.ones(20)
    kv = kvstore.create("dist_sync_device")
    kv.init(["a", "b"], [ones * 0] * 2)

    def update(key, total, stored):
        seen.append((step[0], key))
        stored += total * step[0]

    kv.set_updater(update)
    for step[0] in range(3):
        kv.push(["a", "b"], [ones, ones])
    assert seen == [(step, key) for step in range(3) for key in ("a", "b")]
    assert (kv.pull("a") == 2 * (1 + 2)).all()


@pytest.mark.ranks(2)
def test_a_dtype_without_updates_is_refused_at_the_push():
    kv = kvstore.create("dist_sync")
    kv.init("a", np.zeros(3, np.int32))
    kv.set_optimizer("sgd")
    with pytest.raises(TypeError, match='key "a" is int32, but an optimizer updates floating-point values only'):
        kv.push("a", np.ones(3, np.int32))
    assert (kv.pull("a") == 0).all()


WITH_SERVERS = """
import numpy as np
from ringtrain import kvstore

class Descent:
    lr = 1.0

    def create_state(self, key, weight):
        return None

    def update(self, key, weight, grad, state):
        weight -= self.lr * grad

kv = kvstore.create("dist_sync")
kv.init("a", np.zeros(5, np.float32))
optimizer = Descent()
kv.set_optimizer(optimizer)
for _ in range(3):
    kv.push("a", np.ones(5, np.float32))
    optimizer.lr /= 2
assert (kv.pull("a") == -3.5).all(), kv.pull("a")
lr = [1.0]
kv.set_optimizer("sgd", lr_scheduler=lambda num_update: lr[0] / num_update)
for lr[0] in (1.0, 4.0):
    kv.push("a", np.ones(5, np.float32))
assert (kv.pull("a") == -9.5).all(), kv.pull("a")
print("good")
"""


def test_updates_with_servers_read_at_the_push(tmp_path):
    with job(tmp_path, 2, 1) as one:
        scheduler, server = one.scheduler(), one.server()
        workers = [one.worker(WITH_SERVERS, DMLC_TASK_ID=str(number)) for number in range(2)]
        assert all("good" in process.end() for process in workers)
        server.end()
        scheduler.end()
