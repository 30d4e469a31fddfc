"""Programs of workers in jobs with servers: `python served_programs.py NAME NAME,ARGUMENT ...` calls them in turn.

Each shows one thing with a store of its own, says so when it has, and ends its process by an exception when it has not.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import urllib.request

import numpy as np

import ringtrain as hvd
import ringtrain.optim
from ringtrain import kvstore


def begins():
    """Is over at once: the library is imported."""


def full(shapes, value):
    return [np.full(shape, value, np.float32) for shape in shapes]


def is_all(arrays, value):
    return all((array == value).all() for array in arrays)


def expect(error, text, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"no {error}")


# --- exact values ---------------------------------------------------------------------------------------------------


def asynchronous_values_are_exact():
    kv = kvstore.create("dist_async")
    assert (kv.type, kv.num_workers, kv.num_local_workers) == ("dist_async", 2, 2) and kv.local_rank == kv.rank
    kv.set_optimizer("test", rescale_grad=1.0)
    keys, shapes = ["a", "b", "c"], [(3,), (100, 1000), (7, 11)]
    kv.init(keys, [np.full(shape, number, np.float32) for number, shape in enumerate(shapes)])
    rounds = 50
    outs = full(shapes, 0)
    for turn in range(rounds):
        kv.push(keys, full(shapes, kv.rank + 1))
        kv.pull(keys, out=outs)
        assert all(out.min() >= (kv.rank + 1) * (turn + 1) for out in outs)
    kv.wait()
    kv.barrier()
    for number, (key, shape) in enumerate(zip(keys, shapes, strict=True)):
        assert (kv.pull(key) == np.full(shape, number + 3 * rounds)).all(), kv.pull(key)
        out = np.empty(shape, np.float64)
        kv.pull(key, out=out)
        assert (out == number + 3 * rounds).all()
    assert kv.get_num_dead_node(7) == 0


def synchronous_values_are_exact():
    kv = kvstore.create("dist_sync")
    keys, shapes = [3, 5], [(4, 5), (300, 1000)]
    order = keys if kv.rank == 0 else keys[::-1]
    for key in order:
        kv.init(key, np.full(shapes[keys.index(key)], key, np.float32))
    outs = full(shapes, 0)
    kv.pull(keys, out=outs)
    assert all((out == key).all() for key, out in zip(keys, outs, strict=True))
    for turn in range(1, 21):
        pushed = full(shapes, (kv.rank + 1) * turn)
        kv.push(keys, pushed)
        kv.pull(keys, out=outs)
        assert is_all(outs, 3 * turn), (turn, [out.flat[0] for out in outs])
        assert is_all(pushed, (kv.rank + 1) * turn)
    kv.push(3, [np.ones((4, 5), np.float32), np.ones((4, 5), np.float32)])
    kv.push(3, np.full((4, 5), kv.rank, np.float32))  # a round of its own
    assert (kv.pull(3) == 1).all()
    value = np.full((300, 1000), kv.rank + 1.0, np.float32)
    kv.pushpull(5, value)
    assert (value == 3).all() and (kv.pull(5) == 3).all()
    hvd.synchronize(kv.push(5, value, copy=False))
    out = np.full((4, 5), kv.rank, np.float32)
    kv.broadcast(3, np.full((4, 5), 70 + kv.rank, np.float32), out=out)
    assert (out == 70).all()


def threads_share_the_servers(kind):
    """Pushes and pulls on until a server is lost."""
    kv = kvstore.create(kind)
    if kind == "dist_async":
        kv.set_optimizer("test", rescale_grad=1.0)
    keys, shapes = [0, 1, 2, 3], [(1,), (300, 1000), (7, 11), (70000,)]
    kv.init(keys, full(shapes, 0))
    outs = full(shapes, 0)
    for turn in range(1, 21):
        pushed = full(shapes, (kv.rank + 1) * turn)
        kv.push(keys, pushed)
        kv.pull(keys, out=outs)
        assert kind == "dist_async" or is_all(outs, 3 * turn), turn
    kv.wait()
    kv.barrier()
    assert is_all([kv.pull(key) for key in keys], 3 * (20 if kind == "dist_sync" else 210))
    print("exact", flush=True)
    kv.barrier()
    _trains_until_a_loss(lambda: (kv.push(keys, pushed), kv.pull(keys, out=outs)))


def an_optimizer_on_servers_makes_the_weights_that_it_makes_alone(folder):
    for number, (optimizer, numbers, rate) in enumerate(
        [
            ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, "learning_rate"),
            ("adam", {"learning_rate": 0.1}, "learning_rate"),
            (hvd.optim.SGD(0.1, momentum=0.9), {}, "lr"),
            (hvd.optim.Adam(0.1), {}, "lr"),
        ]
    ):
        expected, found = (
            _updates(kind, optimizer, numbers, rate, f"{folder}/states-{number}-{file}")
            for kind, file in (("local", f"alone-{os.getpid()}"), ("dist_sync", "served"))
        )
        assert sorted(found) == sorted(expected)
        for name in expected:
            assert name == "head" or (found[name] == expected[name]).all(), (optimizer, name)


def _updates(kind, optimizer, numbers, rate, file):
    """Returns the weights and the states of the optimizer."""
    kv = kvstore.create(kind)
    kv.set_optimizer(optimizer, **numbers)
    random = np.random.default_rng(1)
    outs = [random.standard_normal(shape).astype(np.float32) for shape in ((5, 3), (70000,))]
    kv.init([0, 1], outs)
    for turn in range(6):
        if turn == 3:
            kv.update_optimizer(**{rate: 0.05})
        grads = [random.standard_normal(out.shape).astype(np.float32) for out in outs]
        kv.push([0, 1], [grad * (kv.rank == turn % kv.num_workers) for grad in grads])
        kv.pull([0, 1], out=outs)
    kv.save_optimizer_states(file)
    kv.barrier()
    return {**np.load(file), "weights 0": outs[0], "weights 1": outs[1]}


def gradients_go_in_fewer_bits(kind, encoding, is_late):
    """`is_late`: after a push in full."""
    params = {"2bit": {"type": "2bit", "threshold": 0.5}, "fp16": {"type": "fp16"}}[encoding]
    expected = {"2bit": 3.0, "fp16": 8 * float(np.float16(0.4))}[encoding]
    kv = kvstore.create(kind)
    if is_late == "no":
        kv.set_gradient_compression(params)
    kv.set_optimizer("test")
    kv.init("w", np.zeros(70000, np.float32))
    if is_late == "late":
        kv.push("w", np.full(70000, 2, np.float32))
        kv.set_gradient_compression(params)
        expected += 4
    for _ in range(4):
        kv.push("w", np.full(70000, 0.4, np.float32))
        kv.wait()
    kv.barrier()
    (found,) = set(kv.pull("w").tolist())
    assert abs(found - expected) <= 1e-6 * expected, found


def some_rows_are_pushed_and_pulled(kind):
    kv = kvstore.create(kind)
    kv.set_optimizer("test")
    first = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    kv.init(["e", "b"], [first, np.zeros(4, np.float32)])
    out = kvstore.RowSparse()
    kv.row_sparse_pull("e", out=out, row_ids=np.array([3, 1, 1]))
    assert out.indices.tolist() == [1, 3] and (out.rows == first[[1, 3]]).all()
    kv.barrier()
    kv.push("e", kvstore.RowSparse([5, 2, 5], np.ones((3, 3), np.float32)))
    kv.push(["e", "b"], [[kvstore.RowSparse([2], np.ones((1, 3), np.float32))], np.ones(4, np.float32)])
    kv.wait()
    kv.barrier()
    first[5] += 2 * kv.num_workers
    first[2] += 2 * kv.num_workers
    assert (kv.pull("e") == first).all() and (kv.pull("b") == kv.num_workers).all()
    kv.init("h", np.zeros((4, 2), np.float16))
    kv.push("h", kvstore.RowSparse([1] * 4096, np.ones((4096, 2), np.float16)))
    kv.push("h", kvstore.RowSparse([2, 2], np.full((2, 2), 1024, np.float32)))
    kv.wait()
    kv.barrier()
    assert kv.pull("h").tolist() == [[0, 0], [8192, 8192], [4096, 4096], [0, 0]], kv.pull("h")
    rows = kv.row_sparse_pull("e", row_ids=[5, 999])
    assert (rows.rows == first[[5, 999]]).all()
    one = kvstore.RowSparse([1], np.ones((1, 4), np.float32))
    expect(ValueError, "has rows 0 to 999", kv.row_sparse_pull, "e", row_ids=[1000])
    expect(ValueError, "needs row_ids", kv.row_sparse_pull, "e")
    expect(ValueError, "has rows of shape", kv.push, "e", one)
    large = kvstore.RowSparse([1], np.full((1, 3), 1e300))
    expect(ValueError, "is float32, but the value is float64", kv.push, "e", large)
    expect(ValueError, "has rows 0 to 999", kv.push, "e", kvstore.RowSparse([1000], np.ones((1, 3), np.float32)))
    before = kv._backend._client.metrics()
    kv.row_sparse_pull("e", row_ids=np.arange(10))
    after = kv._backend._client.metrics()
    assert sum(after[name] - before[name] for name in after if name.endswith("_bytes")) < 0.03 * 12000


def a_trainer_updates_on_servers(kind):
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2))
    numbers = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = kvstore.Trainer(model.parameters(), "sgd", numbers, kvstore=kind)
    kv = trainer._store
    data = torch.randn(64, 20, generator=torch.Generator().manual_seed(2))
    labels = (data.sum(1) > 0).long()
    for _ in range(60):
        batch = slice(kv.rank, None, kv.num_workers)
        for parameter in model.parameters():
            parameter.grad = None
        torch.nn.functional.cross_entropy(model(data[batch]), labels[batch], reduction="sum").backward()
        trainer.step(64)
    kv.barrier()
    assert float(torch.nn.functional.cross_entropy(model(data), labels)) < 0.2


def a_function_updates_on_every_worker():
    kv = kvstore.create("dist_sync")
    kv.init("w", np.full(1000, 5, np.float32))
    kv.push("w", np.full(1000, 2.0, np.float32))
    assert (kv.pull("w") == 4).all()

    def update(key, total, stored):
        stored += 10 * total

    kv.set_updater(update)
    for _ in range(3):
        kv.push("w", np.full(1000, kv.rank + 1.0, np.float32))
    kv.push("w", np.ones(1000, np.float32), copy=False)
    out = np.empty(1000, np.float32)
    kv.pull("w", out=out)
    assert (out == 4 + 10 * (3 * 3 + 2)).all(), out[0]
    kv.init("v", np.full(5, kv.rank, np.float32))
    kv.pushpull("v", np.ones(5, np.float32), out=out[:5])
    assert (out[:5] == 20).all()
    kv.set_optimizer("test")
    assert (kv.pull("w") == 114).all()
    kv.push("w", np.ones(1000, np.float32))
    assert (kv.pull("w") == 116).all()


def a_worker_with_less_data_joins():
    kv = kvstore.create("dist_sync")
    kv.set_optimizer("test")
    kv.init("w", np.zeros(70000, np.float32))
    for _ in range(3 + 4 * kv.rank):
        kv.push("w", np.ones(70000, np.float32))
    kv.join()
    assert (kv.pull("w") == 3 * 2 + 4).all(), kv.pull("w")
    kv.push("w", np.ones(70000, np.float32))
    assert (kv.pull("w") == 12).all(), kv.pull("w")


def a_pull_waits_for_who_is_too_far_behind():
    kv = kvstore.create("dist_async", max_staleness=2)
    kv.set_optimizer("test")
    kv.init("w", np.zeros(10, np.float32))
    kv.barrier()
    for turn in range(1, 11):
        if kv.rank == 1:
            time.sleep(0.05)
        kv.push("w", np.ones(10, np.float32))
        seen = kv.pull("w")[0]
        # mine, and of the other one at least mine less two
        assert seen >= turn + (turn - 2 if kv.rank == 0 else 0), (turn, seen)
    kv.wait()
    kv.barrier()


def a_store_is_saved(folder):
    _trains(folder, loads=False)


def a_store_that_was_saved_is_loaded_with_other_servers(folder):
    saved, loaded = np.load(f"{folder}/weights.npz"), _trains(folder, loads=True)
    assert all((loaded[key] == saved[key]).all() for key in ("a", "b"))


def _trains(folder, loads):
    kv = kvstore.create("dist_sync")
    keys, shapes = ["a", "b"], [(5,), (400, 300)]
    kv.set_optimizer("adam", learning_rate=0.1)
    kv.init(keys, full(shapes, 3))
    random = np.random.default_rng(7)
    if loads:
        kv.load(f"{folder}/store")
    for turn in range(6):
        grads = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
        if loads and turn < 3:
            continue
        kv.push(keys, [grad / kv.num_workers for grad in grads])
        kv.wait()
        if turn == 2:
            kv.save(f"{folder}/store")
            kv.save_optimizer_states(f"{folder}/states", dump_optimizer=True)
            kv.barrier()
            kv.load_optimizer_states(f"{folder}/states")
            kv.barrier()
    weights = {key: kv.pull(key) for key in keys}
    if kv.rank == 0 and not loads:
        np.savez(f"{folder}/weights", **weights)
    expect(OSError, "/no/such/file", kv.load, "/no/such/file")
    return weights


# --- mistakes and waits that end --------------------------------------------------------------------------------------


def a_mistake_is_told_on_its_line_and_changes_nothing():
    kv = kvstore.create("dist_async")
    kv.init("a", np.zeros((2, 3), np.float32))
    ones = np.ones((2, 3), np.float32)
    expect(ValueError, "without an optimizer would replace weights by gradients", kv.push, "a", ones)
    expect(ValueError, "updates on its servers, with the optimizers that are built in", kv.set_updater, print)
    kv.set_optimizer("sgd", learning_rate=1.0)
    expect(KeyError, "push: key 'b' has no value", kv.push, "b", ones)
    expect(ValueError, "push: key 'a' has shape", kv.push, "a", ones[0])
    expect(ValueError, "has a value already", kv.init, "a", ones)
    expect(ValueError, "is one of MXNet's own", kv.send_command_to_servers, 3, "x")
    differs = "update_optimizer: rank 0 has learning_rate=0"
    expect(hvd.MismatchError, differs, kv.update_optimizer, learning_rate=kv.rank)
    kv.push("a", ones)
    kv.wait()
    kv.barrier()
    assert (kv.pull("a") == -2).all()


def a_key_of_another_shape_or_dtype_is_told_to_all_workers():
    for odd in (np.zeros(4, np.float32), np.zeros(3, np.float64)):
        kv = kvstore.create("dist_sync")
        kv.init("a", np.zeros(3, np.float32))
        value = odd if kv.rank == 1 else np.zeros(3, np.float32)

        def use(kv=kv, value=value, odd=odd):
            kv.init("b", value)
            if odd.dtype == np.float64:
                kv.pushpull("b", value, out=np.zeros_like(value))
            kv.push("b", value)
            kv.pull("b")

        text = f'key "b" is float32[3] on worker 0, but {odd.dtype}[{len(odd)}] on worker 1'
        expect(hvd.MismatchError, text, use)
        kv.push("a", np.ones(3, np.float32))
        assert (kv.pull("a") == 2).all()


def a_dtype_that_servers_cannot_hold_is_told_to_all_workers():
    for who_has_it in ({0, 1}, {0}):
        kv = kvstore.create("dist_sync")
        values = [np.zeros(3, np.float32), np.zeros(3, np.complex64 if kv.rank in who_has_it else np.float32)]
        expect(TypeError, 'key "b" is complex64, but servers hold', kv.init, ["a", "b"], values)


def a_call_that_one_worker_makes_alone_is_told_to_all(call, memory):
    odd = 0 if call == "set_optimizer" else 1
    kv = kvstore.create("dist_sync")
    kv.init("a", np.zeros(3, np.float32))
    kv.set_optimizer("test", rescale_grad=1.0)
    kv.push("a", np.zeros(3, np.float32))

    def alone():
        if kv.rank == odd:
            {
                "set_optimizer": lambda: kv.set_optimizer("sgd", learning_rate=0.5),
                "update_optimizer": lambda: kv.update_optimizer(learning_rate=0.5),
                "barrier": kv.barrier,
                "init": lambda: kv.init("b", np.zeros(3, np.float32)),
            }[call]()
        kv.push("a", np.ones(3, np.float32))
        kv.pull("a")

    awaited = f'key "a": worker {odd} has pushed it 1 times' if memory == "auto" else "a server has no push of worker"
    try:
        alone()
    except hvd.DeadlockError as error:
        assert "workers wait for each other" in str(error), error
        assert f"worker {1 - odd} in a push or pull ({awaited}" in str(error), error
    else:
        raise AssertionError("no DeadlockError")
    if kv.rank == odd:
        kv.push("a", np.ones(3, np.float32))
    assert (kv.pull("a") == 2).all()


def a_key_that_worker_0_does_not_have_is_told():
    kv = kvstore.create("dist_sync")
    if kv.rank == 1:
        expect(hvd.StalledError, 'key "b" has no value after 1', kv.init, "b", np.zeros(3, np.float32))
    else:
        time.sleep(3)


def commands_reach_the_servers():
    kv = kvstore.create("dist_async")
    if kv.rank == 0:
        kv.send_command_to_servers(20, "hello")
        expect(hvd.RemoteError, "ValueError: no such command", kv.send_command_to_servers, 99, "")


def serves_and_takes_commands():
    def control(head, body):
        if head == 99:
            raise ValueError("no such command")
        print("command", head, body, flush=True)

    kvstore.run_server(control)


def pushes_pulls_and_servers_are_counted_also_for_prometheus():
    kv = kvstore.create("dist_async")
    kv.set_optimizer("test")
    kv.init("w", np.zeros(1000, np.float32))
    before = hvd.metrics()["kvstore"]
    for _ in range(5):
        kv.push("w", np.ones(1000, np.float32))
    kv.pushpull("w", np.ones(1000, np.float32))
    kv.pull("w", out=np.zeros(1000, np.float32))
    after = hvd.metrics()["kvstore"]
    counted = {name: after[name] - before[name] for name in after}
    assert (counted["pushes"], counted["push_bytes"], counted["pulls"], counted["pull_bytes"]) == (6, 24000, 2, 8000)
    assert counted["waiting_s"] > 0 and counted["sent_bytes"] > 24000 and counted["received_bytes"] > 8000
    kv.barrier()
    port = int(os.environ["RINGTRAIN_METRICS_PORT"])
    pages = [
        urllib.request.urlopen(f"http://localhost:{port + number}/metrics", timeout=10).read().decode()
        for number in range(3)
    ]
    own = f'ringtrain_kvstore_pushes_total{{rank="{kv.rank}"}} {after["pushes"]}.0'
    assert own in pages[kv.rank].splitlines() and "ringtrain_kvstore_waiting_seconds_total" in pages[kv.rank]
    assert 'ringtrain_kvstore_server_connections{rank="0"} 2.0' in pages[2].splitlines()
    assert "ringtrain_operations" not in "".join(pages)
    kv.barrier()


def a_wait_for_a_worker_that_has_ended_fails():
    """The last thing that a job does."""
    kv = kvstore.create("dist_async")
    if kv.rank == 0:
        expect(hvd.PeerLostError, "barrier: worker 1 has ended, so it does not come", kv.barrier)


def a_worker_waits_for_the_others_at_its_end():
    """The last thing that a job does in which each worker has a server."""
    kv = kvstore.create("dist_async")
    kv.set_optimizer("test")
    kv.init("w", np.zeros(1000, np.float32))
    if kv.rank == 0:
        time.sleep(1)  # worker 1 has come to its end
        kv.push("w", np.ones(1000, np.float32))
        assert (kv.pull("w") == 1).all()


def counts_its_threads_on_one_core():
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    kv = kvstore.create("dist_async")
    print("threads", len(os.listdir("/proc/self/task")), flush=True)
    kv.barrier()


# --- processes that die, fail and come back ---------------------------------------------------------------------------


def _trains_until_a_loss(round_of_training):
    try:
        while True:
            round_of_training()
            print("round", flush=True)
            time.sleep(0.01)
    except hvd.PeerLostError as error:
        print("PeerLostError", error)


def trains_until_a_loss(kind):
    kv = kvstore.create(kind)
    if kind == "dist_async":
        kv.set_optimizer("test")
    kv.init("w", np.zeros(100000, np.float32))
    _trains_until_a_loss(lambda: kv.pushpull("w", np.ones(100000, np.float32)))


def goes_on_when_another_worker_dies():
    kv = kvstore.create("dist_async")
    kv.set_optimizer("test")
    kv.init("w", np.zeros(100000, np.float32))
    while kv.get_num_dead_node(4, 60) == 0:
        kv.push("w", np.ones(100000, np.float32))
        kv.pull("w")
        print("round", flush=True)
    expect(hvd.PeerLostError, "barrier: worker 1 (", kv.barrier)


def _atomic_store():
    kv = kvstore.create("dist_async", atomic=True)
    kv.set_optimizer("test", rescale_grad=1.0)
    limit = 'key "too large" has 256 MiB, and a store with atomic=True takes at most 256 MiB for each key'
    expect(ValueError, limit, kv.init, "too large", np.zeros((256 << 18) + 1, np.float32))
    kv.init(["w", "half"], [np.zeros(2_000_000, np.float32), np.zeros(300_000, np.float16)])
    kv.barrier()
    return kv


def writes_whole_keys_and_dies():
    kv = _atomic_store()
    ones = [np.ones(2_000_000, np.float32), np.ones(300_000, np.float16)]
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        kv.push(["w", "half"], ones)
        kv.pull("w")


def reads_whole_keys():
    kv = _atomic_store()
    assert len(kv.placement()["w"]) == 1
    seen = 0
    while kv.get_num_dead_node(4, 60) == 0 or seen < 10:
        for value in kv.pull(["w", "half"]):
            assert value.min() == value.max(), (value.min(), value.max())
        rows = kv.row_sparse_pull("w", row_ids=np.array([0, 1_000_000, 1_999_999])).rows
        assert rows.min() == rows.max(), rows
        seen += 1
    assert kv.pull("w").min() > 1


def _large_keys():
    kv = kvstore.create("dist_async")
    kv.set_optimizer("test", rescale_grad=1.0)
    kv.init(["w", "rows"], [np.zeros(16 << 20, np.float32), np.zeros((3_000, 1_000), np.float32)])
    kv.barrier()
    return kv


def pushes_large_keys(go):
    """Begins when the file `go` exists."""
    kv = _large_keys()
    while not os.path.exists(go):
        time.sleep(0.01)
    ones = np.ones(16 << 20, np.float32)
    rows = kvstore.RowSparse(np.arange(3_000), np.ones((3_000, 1_000), np.float32))
    out = np.empty_like(ones)
    print("begins", flush=True)
    while True:
        kv.push(["w", "rows"], [ones, rows.rows])
        kv.pushpull("w", ones, out=out)
        kv.push("rows", rows)


def reads_large_keys():
    """Servers may hear of a death later than this worker."""
    kv = _large_keys()
    for death in range(1, kv.num_workers):
        while kv.get_num_dead_node(4, 60) < death:
            time.sleep(0.01)
        end, said = time.monotonic() + 15, "torn"
        while said == "torn" and time.monotonic() < end:
            values = dict(zip(["w", "rows"], kv.pull(["w", "rows"]), strict=True))
            pieces = [
                values[key].reshape(-1)[begin : begin + count]
                for key, places in kv.placement().items()
                for _, begin, count in places
            ]
            found = [(piece.min(), piece.max()) for piece in pieces]
            said = "whole" if all(least == most for least, most in found) else "torn"
        print("dead", said, found, flush=True)
    kv.set_barrier_before_exit(False)


def goes_on_when_started_again():
    kv = kvstore.create("dist_async")
    kv.set_optimizer("test")
    kv.init("w", np.zeros(100000, np.float32))
    kv.barrier()
    print("recovery", kv.is_recovery, kv.rank, flush=True)
    if kv.rank == 1 and not kv.is_recovery:
        for _ in range(7):
            kv.push("w", np.ones(100000, np.float32))
        kv.wait()
        print("pushed", flush=True)
        signal.pause()
    if kv.is_recovery:
        kv.push("w", np.ones(100000, np.float32))
        kv.wait()
    while kv.pull("w")[0] < 8:
        time.sleep(0.01)
    kv.barrier()
    assert (kv.pull("w") == 8).all()


def comes_and_goes():
    kv = kvstore.create("dist_async", elastic=True)
    kv.set_optimizer("test")
    kv.init("w", np.zeros(1000, np.float32))
    kv.barrier()
    print("worker", kv.rank, kv.num_workers, kv.is_recovery, flush=True)
    if kv.rank == 1:
        kv.push("w", np.ones(1000, np.float32))
        kv.wait()
        print("pushed", flush=True)
        signal.pause()
    while kv.pull("w")[0] < 5:
        time.sleep(0.01)
        if kv.rank == 2:
            kv.push("w", np.full(1000, 4, np.float32))
            kv.wait()
    kv.barrier()
    print("end", kv.num_workers, kv.pull("w")[0])


def worker_1_fails():
    kv = kvstore.create("dist_sync")
    kv.init("w", np.zeros(10, np.float32))
    if kv.rank == 1:
        raise ArithmeticError("too small")
    expect(hvd.PeerLostError, "has died: ArithmeticError: too small", kv.pushpull, "w", np.ones(10, np.float32))


def survives_the_servers(turns):
    kv = kvstore.create("dist_async")
    kv.set_optimizer("test")
    kv.init(["a", "b"], [np.zeros(200000, np.float32), np.zeros(7, np.float32)])
    for _ in range(int(turns)):
        kv.push(["a", "b"], [np.ones(200000, np.float32), np.ones(7, np.float32)])
        kv.pull("a")
        kv.pull("b")
        print("round", flush=True)
        time.sleep(0.01)
    kv.wait()
    assert not kv.restored or 0 <= kv.restored["a"] < 60
    print("restored", *kv.restored)
    print("value", kv.pull("a").min(), kv.pull("a").max(), kv.pull("b").max())


def counts_each_push_once():
    kv = kvstore.create("dist_async")
    kv.set_optimizer("test")
    kv.init(["a", "b"], [np.zeros(200000, np.float32), np.zeros(7, np.float32)])
    for _ in range(200):
        kv.push(["a", "b"], [np.ones(200000, np.float32), np.ones(7, np.float32)])
        kv.pull("a")
        print("round", flush=True)
        time.sleep(0.005)
    kv.wait()
    kv.barrier()
    assert (kv.pull("a") == 400).all() and (kv.pull("b") == 400).all(), (kv.pull("a").min(), kv.pull("b"))
    assert not kv.restored


def worker_1_dies_in_set_optimizer():
    kv = kvstore.create("dist_async")
    if kv.rank == 1 and not kv.is_recovery:
        worker = kv._backend._worker
        say = worker.say_unless_missed
        worker.say_unless_missed = lambda label, *said: os._exit(1) if "rule" in label else say(label, *said)
    kv.set_optimizer("test")
    print("has it")


def comes_while_a_server_is_gone():
    kv = kvstore.create("dist_async", elastic=True)
    print("created", kv.is_recovery)
    kv.set_optimizer("test")
    kv.init("a", np.full(70_000, 3, np.float32))
    print("pulled", kv.pull("a").min(), kv.pull("a").max(), flush=True)
    if not kv.is_recovery:
        signal.pause()


def serves_with_a_full_disk():
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
    kvstore.run_server()


if __name__ == "__main__":
    for words in sys.argv[1:]:
        name, *arguments = words.split(",")
        globals()[name](*arguments)
        print(f"{words}: well", flush=True)
