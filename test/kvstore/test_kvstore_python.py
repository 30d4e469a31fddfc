"""Optimizers and updaters in Python that run on servers, and when servers write snapshots."""

from types import SimpleNamespace
from unittest import mock

import pytest
from harness.ringrun_job import wait_until
from kvstore_jobs import job

from ringtrain.kvstore.servers.server import Snapshots

ALLOWED = {"RINGTRAIN_KV_PYTHON_UPDATERS": "on"}
BEGIN = """
import os, time
import numpy as np
import ringtrain as hvd
from ringtrain import kvstore

class Counting:
    def __init__(self, rate):
        self.rate = rate

    def create_state(self, key, weight):
        return {"updates": 0}

    def update(self, key, weight, grad, state):
        assert weight.shape == grad.shape and weight.dtype == grad.dtype
        assert weight.ndim == (1 if key == "long" else 2), (key, weight.shape)
        state["updates"] += 1
        weight += self.rate * grad + (state["updates"] == 20) * 1000

"""
# A short key has its shape, one that is cut over the servers is flat, as in MXNet; 16-bit weights have a master.
OPTIMIZER = """
kv = kvstore.create("KIND")
keys, shapes, dtypes = ["short", "long", "half"], [(3, 4), (300, 1000), (5, 2)], [np.float32, np.float32, np.float16]
pushes = 20 if "async" in kv.type else 40
kv.init(keys, [np.full(shape, 7, dtype) for shape, dtype in zip(shapes, dtypes)])
kv.set_optimizer(Counting(rate=1.0))
ones = [np.ones(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
outs = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
for turn in range(pushes // 2):
    kv.push(keys, ones)
kv.pull(keys, out=outs)
assert all((out >= 7 + pushes // 2).all() for out in outs)
kv.wait()
kv.barrier()
kv.update_optimizer(rate=2.0)
for turn in range(pushes // 2):
    kv.pushpull(keys, ones, out=outs)
kv.wait()
kv.barrier()
kv.pull(keys, out=outs)
# the twentieth of 2 * pushes updates in an asynchronous store, of pushes updates with two gradients each in another
assert all((out == 7 + 3 * pushes + 1000).all() for out in outs), [out.ravel()[:2] for out in outs]
kv.set_optimizer("test")  # and without Python again
kv.barrier()
kv.push("short", ones[0])
kv.wait()
kv.barrier()
assert (kv.pull("short") == 7 + 3 * pushes + 1002).all()
print("exact")
"""


def run(one, servers, programs, **variables):
    scheduler = one.scheduler(**variables)
    serving = [one.server(**variables) for _ in range(servers)]
    workers = [
        one.worker(BEGIN + program, DMLC_TASK_ID=str(number), **variables) for number, program in enumerate(programs)
    ]
    said = [worker.end() for worker in workers]
    for process in (*serving, scheduler):
        process.end()
    return said


@pytest.mark.parametrize(("kind", "memory"), [("dist_async", "off"), ("dist_sync", "auto")])
def test_an_optimizer_of_the_script_runs_on_the_servers(tmp_path, kind, memory):
    with job(tmp_path, 2, 2, RINGTRAIN_SHARED_MEMORY=memory, **ALLOWED) as one:
        assert all("exact" in said for said in run(one, 2, [OPTIMIZER.replace("KIND", kind)] * 2))


SLOW = """
class Slow(Counting):
    def update(self, key, weight, grad, state):
        time.sleep(0.03)
        super().update(key, weight, grad, state)

kv = kvstore.create("dist_async")
kv.init("w", np.zeros((2, 2), np.float32))
kv.set_optimizer(Slow(1.0))
"""
# Each worker pushes twelve times at once, and repeats a push before the server comes to it.
MANY_PUSHES = """
for turn in range(12):
    kv.push("w", np.ones((2, 2), np.float32))
kv.wait()
kv.barrier()
value = kv.pull("w")
assert (value == 2 * 12 + 1000).all(), value
print("exact")
"""
# Worker 0 has nothing to wait for while the server works on the pushes of worker 1.
CHANGES = """
for turn in range(5 if kv.rank == 1 else 0):
    kv.push("w", np.ones((2, 2), np.float32))
kv.update_optimizer(rate=10.0)
kv.barrier()
assert (kv.pull("w") == 5).all(), kv.pull("w")
kv.barrier()
for turn in range(5 if kv.rank == 1 else 0):
    kv.push("w", np.ones((2, 2), np.float32))
kv.set_optimizer("test")
kv.barrier()
assert (kv.pull("w") == 55).all(), kv.pull("w")
print("exact")
"""


def test_no_push_is_lost_while_a_slow_optimizer_runs(tmp_path):
    with job(tmp_path, 2, 1, RINGTRAIN_SHARED_MEMORY="off", RINGTRAIN_KV_RESEND_MS="5", **ALLOWED) as one:
        assert all("exact" in said for said in run(one, 1, [SLOW + MANY_PUSHES] * 2))


def test_an_optimizer_changes_after_the_pushes_of_all_workers(tmp_path):
    with job(tmp_path, 2, 1, **ALLOWED) as one:
        assert all("exact" in said for said in run(one, 1, [SLOW + CHANGES] * 2))


# That of MXNet's pages: the key is what it was in init.
UPDATER = """
kv = kvstore.create("dist_async")
kv.init(3, np.full((2, 3), 2, np.float32))
def update(key, input, stored):
    assert key == 3
    stored += input * 2
kv._set_updater(update)
kv.push(3, np.full((2, 3), 8, np.float32))
kv.wait()
kv.barrier()
a = np.zeros((2, 3), np.float32)
kv.pull(3, out=a)
assert (a == 34).all(), a
kv.barrier()  # the other worker has seen this value too, before the next push changes it
kv.row_sparse_pull(3, row_ids=[1])
kv.push(3, kvstore.RowSparse([1], np.ones((1, 3), np.float32)))
kv.wait()
kv.barrier()
assert kv.pull(3).tolist() == [[34] * 3, [38] * 3]
for call in (lambda: kv.save_optimizer_states("states"), lambda: kv.update_optimizer(rate=2.0)):
    try:
        call()
    except ValueError as error:
        print("ValueError", error)
print("updated")
"""


def test_an_updater_of_the_script_runs_on_the_servers(tmp_path):
    with job(tmp_path, 2, 1, **ALLOWED) as one:
        said = run(one, 1, [UPDATER] * 2)
        assert all("updated" in of_one for of_one in said)
        assert "ValueError what an optimizer in Python remembers is on the servers" in said[0]


# Worker 0 sets the second one at once, while the other worker still pushes for the first one.
REPLACES = """
kv = kvstore.create("dist_async")
kv.init("w", np.zeros(2, np.float32))
def add(key, input, stored):
    stored += input
def add_more(key, input, stored):
    stored += 100 * input
kv.set_updater(add)
if kv.rank == 1:
    time.sleep(0.5)
    for turn in range(3):
        kv.push("w", np.ones(2, np.float32))
kv.set_updater(add_more)
kv.push("w", np.ones(2, np.float32))
kv.wait()
kv.barrier()
assert kv.pull("w").tolist() == [203, 203], kv.pull("w")
kv.barrier()
print("exact")
"""


def test_an_updater_changes_after_the_pushes_of_all_workers(tmp_path):
    with job(tmp_path, 2, 1, **ALLOWED) as one:
        assert all("exact" in said for said in run(one, 1, [REPLACES] * 2))


FAILS = """
class Failing(Counting):
    def update(self, key, weight, grad, state):
        raise ZeroDivisionError("of the optimizer")

kv = kvstore.create("dist_async")
kv.init("w", np.ones((2, 2), np.float32))
kv.set_optimizer(Failing(1.0))
try:
    kv.push("w", np.ones((2, 2), np.float32))
    kv.pull("w")
except hvd.PeerLostError as error:
    print("told", "ZeroDivisionError: of the optimizer" in str(error))
"""


def test_an_exception_of_an_optimizer_on_a_server_reaches_the_workers(tmp_path):
    with job(tmp_path, 1, 1, **ALLOWED) as one:
        one.scheduler()
        server = one.server()
        assert "told True" in one.worker(BEGIN + FAILS).end()
        assert "ZeroDivisionError: of the optimizer" in server.end(1)


COMES_BACK = """
kv = kvstore.create("dist_async")
kv.init("long", np.zeros(100000, np.float32))
kv.set_optimizer(Counting(1.0))
for turn in range(300):
    try:
        kv.push("long", np.ones(100000, np.float32))
        kv.pull("long")
    except hvd.PeerLostError:
        print("lost", flush=True)
    print("round", flush=True)
    time.sleep(0.01)
value = kv.pull("long")
# of what both servers have, and what they remember: the twentieth update was one of them
print("value", value.min() - 1000 > 20, value.max() <= 1300, *kv.restored)
"""


@pytest.mark.parametrize("memory", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_a_server_comes_back_with_what_an_optimizer_remembers(tmp_path, memory):
    variables = {
        "RINGTRAIN_KV_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
        "RINGTRAIN_KV_SNAPSHOT_S": "0.2",
        "RINGTRAIN_KV_REJOIN_S": "30",
        "RINGTRAIN_SHARED_MEMORY": memory,
    }
    with job(tmp_path, 1, 2, **ALLOWED, **variables) as one:
        scheduler = one.scheduler()
        servers = [one.server(DMLC_TASK_ID=str(number)) for number in range(2)]
        worker = one.worker(BEGIN + COMES_BACK)
        worker.wait_for("round", 100)
        servers[1].kill()
        servers[1] = one.server(DMLC_TASK_ID="1")
        assert "value True True long\n" in worker.end()
        for process in (*servers, scheduler):
            process.end()


REFUSED = """
kv = kvstore.create("dist_async")
kv.init("w", np.ones((2, 2), np.float32))
try:
    kv.set_optimizer(Counting(1.0))
except (ValueError, hvd.RemoteError) as error:
    print(type(error).__name__, error)
"""


def test_servers_run_no_python_unless_they_are_told(tmp_path):
    with job(tmp_path, 1, 1) as one:
        (said,) = run(one, 1, [REFUSED])
        assert "ValueError" in said and "RINGTRAIN_KV_PYTHON_UPDATERS=on for all processes" in said
    with job(tmp_path, 1, 1) as one:  # and it is the server who decides
        scheduler, server = one.scheduler(), one.server()
        said = one.worker(BEGIN + REFUSED, **ALLOWED).end()
        assert "RemoteError" in said and "this server does not run Python that workers send it" in said
        server.end()
        scheduler.end()
    with job(tmp_path, 1, 0, **ALLOWED) as one:  # beside a training, it would wait for that
        (said,) = run(one, 0, [REFUSED])
        assert "ValueError" in said and "servers of their own (DMLC_NUM_SERVER)" in said


def test_a_server_writes_a_snapshot_at_each_interval_and_not_before(tmp_path):
    now = SimpleNamespace(s=1000.0)
    clock = SimpleNamespace(monotonic=lambda: now.s)
    with (
        mock.patch("ringtrain.kvstore.servers.server.time", clock),
        mock.patch.object(Snapshots, "write") as write,
    ):

        def written(snapshots, at_s):
            """Whether it is written at that second."""
            now.s, before = 1000.0 + at_s, write.call_count
            snapshots.write_if_due(server=None, updates=None)
            return write.call_count > before

        snapshots = Snapshots(str(tmp_path), 0, 30.0)
        assert [at for at in range(0, 101, 5) if written(snapshots, at)] == [30, 60, 90]
        now.s = 1000.0
        snapshots = Snapshots(str(tmp_path), 0, 10.0)
        assert [at for at in range(0, 31, 5) if written(snapshots, at)] == [10, 20, 30]
        now.s, write.side_effect = 1000.0, OSError("the disk is full")
        snapshots = Snapshots(str(tmp_path), 0, 10.0)
        assert [at for at in range(0, 31, 5) if written(snapshots, at)] == [10, 20, 30]
        for folder, interval_s in ((str(tmp_path), 0.0), ("", 10.0)):
            snapshots = Snapshots(folder, 0, interval_s)
            assert not any(written(snapshots, at) for at in range(0, 3600, 60))


PUSHES = """
kv = kvstore.create("dist_async")
kv.set_optimizer("test")
kv.init("w", np.zeros(4, np.float32))
for turn in range(2000):
    kv.push("w", np.ones(4, np.float32))
    kv.pull("w")
    print("round", flush=True)
    time.sleep(0.001)
"""


def test_servers_have_the_interval_of_their_snapshots_from_its_option(tmp_path):
    often, seldom = tmp_path / "often", tmp_path / "seldom"
    with job(tmp_path, 1, 2) as one:
        scheduler = one.scheduler()
        servers = [
            one.server(
                DMLC_TASK_ID=str(number),
                RINGTRAIN_KV_SNAPSHOT_DIR=str(folder),
                RINGTRAIN_KV_SNAPSHOT_S=interval_s,
            )
            for number, (folder, interval_s) in enumerate([(often, "0.1"), (seldom, "3600")])
        ]
        worker = one.worker(BEGIN + PUSHES)
        for _ in range(3):
            wait_until(lambda: list(often.glob("*.snapshot")))
            for snapshot in often.glob("*.snapshot"):
                snapshot.unlink()
        worker.wait_for("round", 100)
        assert not seldom.exists()
        for process in (worker, *servers, scheduler):
            process.end()
