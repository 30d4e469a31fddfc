"""Stores with servers, in jobs that are started by hand: no launcher, no MPI."""

from __future__ import annotations

import ast
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from harness.ringrun_job import wait_until
from kvstore_jobs import SOON_OVER, Job, job

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "kvstore_digits.py")

BEGIN = """
import os, signal, sys, time
import numpy as np
import ringtrain as hvd
from ringtrain import kvstore
"""


def run(of_all: Job, servers: int, programs: list[str], **variables: str) -> list[str]:
    """Returns what each worker has printed; all processes must end well."""
    scheduler = of_all.scheduler(**variables)
    serving = [of_all.server(**variables) for _ in range(servers)]
    workers = [
        of_all.worker(BEGIN + program, DMLC_TASK_ID=str(number), **variables) for number, program in enumerate(programs)
    ]
    said = [worker.end() for worker in workers]
    for one in (*serving, scheduler):
        one.end()
    return said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dist_async", "dist_sync"])
def test_five_commands_by_hand_train_digits_without_mpi(tmp_path, kind):
    command = [EXAMPLE, "--kv-store", kind, "--epochs", "6"]
    with job(tmp_path, 2, 2) as five:
        scheduler = five.start("scheduler", command)
        servers = [five.start("server", command) for _ in range(2)]
        workers = [five.start("worker", command) for _ in range(2)]
        said = "".join(worker.end() for worker in workers)
        for one in (*servers, scheduler):
            one.end()
    (accuracy,) = re.findall(r"^test accuracy (0\.\d+) with 2 workers, updated by the store", said, re.MULTILINE)
    assert float(accuracy) > 0.9


EXACT_ASYNC = """
kv = kvstore.create("dist_async")
assert (kv.type, kv.num_workers, kv.num_local_workers) == ("dist_async", 2, 2) and kv.local_rank == kv.rank
kv.set_optimizer("test", rescale_grad=1.0)
keys, shapes = ["a", "b", "c"], [(3,), (100, 1000), (7, 11)]
kv.init(keys, [np.full(shape, number, np.float32) for number, shape in enumerate(shapes)])
rounds = 50
for turn in range(rounds):
    kv.push(keys, [np.full(shape, kv.rank + 1, np.float32) for shape in shapes])
    outs = [np.empty(shape, np.float32) for shape in shapes]
    kv.pull(keys, out=outs)
    assert all(out.min() >= (kv.rank + 1) * (turn + 1) for out in outs)
kv.wait()
kv.barrier()
for number, (key, shape) in enumerate(zip(keys, shapes)):
    assert (kv.pull(key) == np.full(shape, number + 3 * rounds)).all(), kv.pull(key)
    out = np.empty(shape, np.float64)
    kv.pull(key, out=out)
    assert (out == number + 3 * rounds).all()
print("exact", kv.get_num_dead_node(7))
"""

EXACT_SYNC = """
kv = kvstore.create("dist_sync")
keys, shapes = [3, 5], [(4, 5), (300, 1000)]
order = keys if kv.rank == 0 else keys[::-1]
for key in order:
    kv.init(key, np.full(shapes[keys.index(key)], key, np.float32))
outs = [np.empty(shape, np.float32) for shape in shapes]
kv.pull(keys, out=outs)
assert all((out == key).all() for key, out in zip(keys, outs))
for turn in range(20):
    pushed = [np.full(shape, (kv.rank + 1) * (turn + 1), np.float32) for shape in shapes]
    kv.push(keys, pushed)
    kv.pull(keys, out=outs)
    assert all((out == 3 * (turn + 1)).all() for out in outs), (turn, [out.flat[0] for out in outs])
    assert all((one == (kv.rank + 1) * (turn + 1)).all() for one in pushed)
kv.push(3, [np.ones((4, 5), np.float32), np.ones((4, 5), np.float32)])
kv.push(3, np.full((4, 5), kv.rank, np.float32))  # a round of its own
assert (kv.pull(3) == 1).all()
value = np.full((300, 1000), kv.rank + 1.0, np.float32)
kv.pushpull(5, value)
assert (value == 3).all() and (kv.pull(5) == 3).all()
handle = kv.push(5, value, copy=False)
hvd.synchronize(handle)
out = np.full((4, 5), kv.rank, np.float32)
kv.broadcast(3, np.full((4, 5), 70 + kv.rank, np.float32), out=out)
assert (out == 70).all()
print("exact", {server for pieces in kv.placement().values() for server, _, _ in pieces})
"""


@pytest.mark.parametrize(
    ("program", "servers", "memory"),
    [
        *((EXACT_ASYNC, 0, "auto"), (EXACT_ASYNC, 1, "off"), (EXACT_ASYNC, 2, "auto")),
        *((EXACT_SYNC, 0, "off"), (EXACT_SYNC, 1, "auto"), (EXACT_SYNC, 2, "off")),
    ],
    ids=["async-0-shm", "async-1-tcp", "async-2-shm", "sync-0-tcp", "sync-1-shm", "sync-2-tcp"],
)
def test_values_are_exact(tmp_path, program, servers, memory):
    with job(tmp_path, 2, servers, RINGTRAIN_SHARED_MEMORY=memory) as one:
        assert all("exact" in said for said in run(one, servers, [program] * 2))


ON_ONE_CORE = """
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
kv = kvstore.create("dist_async")
print(len(os.listdir("/proc/self/task")))
"""


def test_a_worker_on_one_core_has_one_thread_for_its_servers_unless_more_are_asked_for(tmp_path):
    threads = {}
    for asked in (0, 1, 3):
        with job(tmp_path, 1, 3, RINGTRAIN_SHARED_MEMORY="off", RINGTRAIN_KV_THREADS=str(asked)) as one:
            (said,) = run(one, 3, [ON_ONE_CORE])
        threads[asked] = int(said)
    assert threads[0] == threads[1] == threads[3] - 2


SEVERAL_SERVERS = """
kv = kvstore.create("KIND")
if kv.type == "dist_async":
    kv.set_optimizer("test", rescale_grad=1.0)
keys, shapes = [0, 1, 2, 3], [(1,), (300, 1000), (7, 11), (70000,)]
kv.init(keys, [np.zeros(shape, np.float32) for shape in shapes])
for turn in range(20):
    pushed = [np.full(shape, (kv.rank + 1) * (turn + 1), np.float32) for shape in shapes]
    outs = [np.empty(shape, np.float32) for shape in shapes]
    kv.push(keys, pushed)
    kv.pull(keys, out=outs)
    if kv.type == "dist_sync":
        assert all((out == 3 * (turn + 1)).all() for out in outs), turn
kv.wait()
kv.barrier()
total = 3 * (20 if kv.type == "dist_sync" else 210)
assert all((kv.pull(key) == np.full(shape, total)).all() for key, shape in zip(keys, shapes))
print("exact", flush=True)
kv.barrier()
try:
    while True:
        kv.push(keys, pushed)
        kv.pull(keys, out=outs)
        print("round", flush=True)
        time.sleep(0.01)
except hvd.PeerLostError as error:
    print("PeerLostError", error)
"""


@pytest.mark.parametrize("kind", ["dist_async", "dist_sync"])
@pytest.mark.parametrize("threads", [2, 4])
def test_threads_for_some_of_the_servers_each_are_exact_and_tell_which_one_is_lost(tmp_path, kind, threads):
    variables = {"RINGTRAIN_KV_THREADS": str(threads), "RINGTRAIN_SHARED_MEMORY": "off"}
    with job(tmp_path, 2, 4, **variables, **SOON_OVER) as one:
        one.scheduler()
        servers = [one.server(DMLC_TASK_ID=str(number)) for number in range(4)]
        program = BEGIN + SEVERAL_SERVERS.replace("KIND", kind)
        workers = [one.worker(program, DMLC_TASK_ID=str(number)) for number in range(2)]
        for worker in workers:
            worker.wait_for("round", 3)
        servers[1].kill()
        for worker in workers:
            said = worker.end(within_s=30)
            assert "exact" in said and "PeerLostError" in said and "server 1" in said


OPTIMIZER = """
kv = kvstore.create("KIND")
kv.set_optimizer(*OPTIMIZER)
random = np.random.default_rng(1)
first = [random.standard_normal(shape).astype(np.float32) for shape in ((5, 3), (70000,))]
kv.init([0, 1], first)
for turn in range(6):
    if turn == 3:
        kv.update_optimizer(**{NAME: 0.05})
    grads = [random.standard_normal(one.shape).astype(np.float32) for one in first]
    kv.push([0, 1], [grad * (kv.rank == turn % kv.num_workers) for grad in grads])
    outs = [np.empty_like(one) for one in first]
    kv.pull([0, 1], out=outs)
np.savez(f"{FOLDER}/weights-{kv.rank}", *outs)
kv.save_optimizer_states(f"{FOLDER}/states")
"""


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ('("sgd",), {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}', "learning_rate"),
        ('("adam",), {"learning_rate": 0.1}', "learning_rate"),
        ("(hvd.optim.SGD(0.1, momentum=0.9),), {}", "lr"),
        ("(hvd.optim.Adam(0.1),), {}", "lr"),
    ],
    ids=["sgd", "adam", "optim-sgd", "optim-adam"],
)
def test_an_optimizer_on_servers_makes_the_weights_that_it_makes_alone(tmp_path, optimizer, name):
    def program(kind: str, folder: Path) -> str:
        words = OPTIMIZER.replace("KIND", kind).replace("NAME", repr(name)).replace("{FOLDER}", str(folder))
        positional, numbers = optimizer.split(", {", 1)
        call = f"*{positional.strip()}, **{{{numbers}" if numbers != "}" else f"*{positional.strip()}"
        return "import ringtrain.optim\n" + words.replace("*OPTIMIZER", call)

    (alone := tmp_path / "alone").mkdir()
    (here := tmp_path / "here").mkdir()
    with job(alone, 1, 0) as one:
        one.start("", ["-c", BEGIN + program("local", alone)], DMLC_PS_ROOT_URI="").end()
    with job(here, 2, 2) as two:
        run(two, 2, [program("dist_sync", here)] * 2)
    expected = np.load(alone / "weights-0.npz")
    for rank in range(2):
        found = np.load(here / f"weights-{rank}.npz")
        for array in expected.files:
            assert (found[array] == expected[array]).all()
    states, expected_states = np.load(here / "states"), np.load(alone / "states")
    assert sorted(states.files) == sorted(expected_states.files)
    for array in states.files:
        if array != "head":
            assert (states[array] == expected_states[array]).all(), array


MISTAKES = """
kv = kvstore.create("dist_async")
kv.init("a", np.zeros((2, 3), np.float32))

def expect(error, text, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"no {error}")

expect(ValueError, "without an optimizer would replace weights by gradients", kv.push, "a", np.ones((2, 3), np.float32))
expect(ValueError, "updates on its servers, with the optimizers that are built in", kv.set_updater, print)
kv.set_optimizer("sgd", learning_rate=1.0)
expect(KeyError, "push: key 'b' has no value", kv.push, "b", np.ones(3, np.float32))
expect(ValueError, "push: key 'a' has shape", kv.push, "a", np.ones(3, np.float32))
expect(ValueError, "has a value already", kv.init, "a", np.zeros((2, 3), np.float32))
expect(ValueError, "is one of MXNet's own", kv.send_command_to_servers, 3, "x")
expect(hvd.MismatchError, "update_optimizer: rank 0 has learning_rate=0", kv.update_optimizer, learning_rate=kv.rank)
kv.push("a", np.ones((2, 3), np.float32))
kv.wait()
kv.barrier()
assert (kv.pull("a") == -2).all()
print("good")
"""


def test_a_mistake_is_told_on_its_line_and_changes_nothing(tmp_path):
    with job(tmp_path, 2, 1) as one:
        assert all("good" in said for said in run(one, 1, [MISTAKES] * 2))


@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_a_key_of_another_shape_or_dtype_is_told_to_all_workers(tmp_path, what):
    program = f"""
kv = kvstore.create("dist_sync")
kv.init("a", np.zeros(3, np.float32))
is_odd = kv.rank == 1
value = np.zeros(4 if is_odd and {what == "shape"} else 3, np.float64 if is_odd and {what == "dtype"} else np.float32)
try:
    kv.init("b", value)
    kv.push("b", value)
    kv.pull("b")
except hvd.MismatchError as error:
    print(error)
kv.push("a", np.ones(3, np.float32))
assert (kv.pull("a") == 2).all()
"""
    odd = {"shape": "float32[4]", "dtype": "float64[3]"}[what]
    with job(tmp_path, 2, 1) as one:
        for said in run(one, 1, [program] * 2):
            assert f'key "b" is float32[3] on worker 0, but {odd} on worker 1' in said


def test_a_dtype_that_servers_cannot_hold_is_told_to_all_workers(tmp_path):
    program = """
kv = kvstore.create("dist_sync")
try:
    kv.init(["a", "b"], [np.zeros(3, np.float32), np.zeros(3, np.complex64 if ODD is None or kv.rank == ODD else "f4")])
except TypeError as error:
    print(error)
"""
    for number, odd in enumerate((None, 0)):
        (folder := tmp_path / str(number)).mkdir()
        with job(folder, 2, 1) as one:
            for said in run(one, 1, [f"ODD = {odd}\n{program}"] * 2):
                assert 'key "b" is complex64, but servers hold' in said


@pytest.mark.parametrize("memory", ["auto", "off"])
@pytest.mark.parametrize(
    ("odd", "call"),
    [
        (0, 'kv.set_optimizer("sgd", learning_rate=0.5)'),
        (1, "kv.update_optimizer(learning_rate=0.5)"),
        (1, "kv.barrier()"),
        (1, 'kv.init("b", np.zeros(3, np.float32))'),
    ],
)
def test_a_call_that_one_worker_makes_alone_is_told_to_all(tmp_path, odd, call, memory):
    program = f"""
kv = kvstore.create("dist_sync")
kv.init("a", np.zeros(3, np.float32))
kv.set_optimizer("test", rescale_grad=1.0)
kv.push("a", np.zeros(3, np.float32))
try:
    if kv.rank == {odd}:
        {call}
    kv.push("a", np.ones(3, np.float32))
    kv.pull("a")
except hvd.DeadlockError as error:
    print(error)
if kv.rank == {odd}:
    kv.push("a", np.ones(3, np.float32))
assert (kv.pull("a") == 2).all()
"""
    awaited = f'key "a": worker {odd} has pushed it 1 times' if memory == "auto" else "a server has no push of worker"
    with job(tmp_path, 2, 1, RINGTRAIN_SHARED_MEMORY=memory) as one:
        for said in run(one, 1, [program] * 2):
            assert "workers wait for each other" in said
            assert f"worker {1 - odd} in a push or pull ({awaited}" in said


def test_a_key_that_worker_0_does_not_have_is_told(tmp_path):
    program = """
kv = kvstore.create("dist_sync")
try:
    if kv.rank == 1: kv.init("b", np.zeros(3, np.float32))
    else: time.sleep(3)
except hvd.StalledError as error:
    print(error)
"""
    with job(tmp_path, 2, 1, RINGTRAIN_STALL_SHUTDOWN_TIME_S="1") as one:
        assert 'key "b" has no value after 1' in run(one, 1, [program] * 2)[1]


SYNC_WITH_A_DEATH = """
kv = kvstore.create("dist_sync")
kv.init("w", np.zeros(100000, np.float32))
print("here", flush=True)
try:
    while True:
        kv.pushpull("w", np.ones(100000, np.float32))
        print("round", flush=True)
        time.sleep(0.01)
except hvd.PeerLostError as error:
    print("PeerLostError", error)
"""


def test_when_a_worker_dies_the_rounds_of_the_others_fail(tmp_path):
    with job(tmp_path, 2, 1, **SOON_OVER) as one:
        scheduler, server = one.scheduler(), one.server()
        first, second = (one.worker(BEGIN + SYNC_WITH_A_DEATH, DMLC_TASK_ID=str(number)) for number in range(2))
        first.wait_for("round", 3)
        second.kill()
        assert f"PeerLostError worker 1 ({os.uname().nodename}, pid {second.pid}) has died" in first.end(within_s=10)
        server.end()
        scheduler.end()


ASYNC_WITH_A_DEATH = """
kv = kvstore.create("dist_async")
kv.set_optimizer("test")
kv.init("w", np.zeros(100000, np.float32))
for turn in range(1000):
    kv.push("w", np.ones(100000, np.float32))
    kv.pull("w")
    print("round", flush=True)
    if kv.get_num_dead_node(4, 60) == 1:
        break
try:
    kv.barrier()
except hvd.PeerLostError as error:
    print("PeerLostError", error)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_asynchronous_workers_go_on_when_one_dies(tmp_path, how):
    with job(tmp_path, 2, 2, **SOON_OVER) as one:
        scheduler, servers = one.scheduler(), [one.server() for _ in range(2)]
        first, second = (one.worker(BEGIN + ASYNC_WITH_A_DEATH, DMLC_TASK_ID=str(number)) for number in range(2))
        second.wait_for("round", 5)
        os.kill(second.pid, how)
        assert "PeerLostError barrier: worker 1 (" in first.end(within_s=30)
        for process in (*servers, scheduler):
            process.end()


WRITES_WHOLE_KEYS = """
import threading
kv = kvstore.create("dist_async", atomic=True)
kv.set_optimizer("test", rescale_grad=1.0)
try:
    kv.init("too large", np.zeros((256 << 18) + 1, np.float32))
except ValueError as error:
    print("ValueError", error)
kv.init(["w", "half"], [np.zeros(2_000_000, np.float32), np.zeros(300_000, np.float16)])
kv.barrier()
ones = [np.ones(2_000_000, np.float32), np.ones(300_000, np.float16)]
if DIES:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
while True:
    kv.push(["w", "half"], ones)
    kv.pull("w")
"""

READS_WHOLE_KEYS = """
kv = kvstore.create("dist_async", atomic=True)
kv.set_optimizer("test", rescale_grad=1.0)
try:
    kv.init("too large", np.zeros((256 << 18) + 1, np.float32))
except ValueError as error:
    print("ValueError", error)
kv.init(["w", "half"], [np.zeros(2_000_000, np.float32), np.zeros(300_000, np.float16)])
kv.barrier()
assert len(kv.placement()["w"]) == 1
seen = 0
while kv.get_num_dead_node(4, 60) == 0 or seen < 10:
    for value in kv.pull(["w", "half"]):
        assert value.min() == value.max(), (value.min(), value.max())
    rows = kv.row_sparse_pull("w", row_ids=np.array([0, 1_000_000, 1_999_999])).rows
    assert rows.min() == rows.max(), rows
    seen += 1
assert kv.pull("w").min() > 1
print("all whole")
"""


BEGIN_LARGE_KEYS = """
kv = kvstore.create("dist_async")
kv.set_optimizer("test", rescale_grad=1.0)
kv.init(["w", "rows"], [np.zeros(16 << 20, np.float32), np.zeros((3_000, 1_000), np.float32)])
kv.barrier()
"""

PUSHES_LARGE_KEYS = (
    BEGIN_LARGE_KEYS
    + """
while not os.path.exists(GO):
    time.sleep(0.01)
ones, rows = np.ones(16 << 20, np.float32), kvstore.RowSparse(np.arange(3_000), np.ones((3_000, 1_000), np.float32))
out = np.empty_like(ones)
print("begins", flush=True)
while True:
    kv.push(["w", "rows"], [ones, rows.rows])
    kv.pushpull("w", ones, out=out)
    kv.push("rows", rows)
"""
)

# Servers may hear of a death later than this worker.
READS_LARGE_KEYS = (
    BEGIN_LARGE_KEYS
    + """
for death in range(1, kv.num_workers):
    while kv.get_num_dead_node(4, 60) < death:
        time.sleep(0.01)
    end, said = time.monotonic() + 15, "torn"
    while said == "torn" and time.monotonic() < end:
        values = dict(zip(["w", "rows"], kv.pull(["w", "rows"])))
        pieces = [values[key].reshape(-1)[begin:begin + count]
                  for key, places in kv.placement().items() for _, begin, count in places]
        found = [(piece.min(), piece.max()) for piece in pieces]
        said = "whole" if all(least == most for least, most in found) else "torn"
    print("dead", said, found, flush=True)
kv.set_barrier_before_exit(False)
"""
)


@pytest.mark.parametrize(("servers", "memory"), [(1, "auto"), (2, "auto"), (1, "off"), (2, "off")])
def test_the_last_push_of_a_killed_worker_is_applied_as_a_whole_or_not_at_all_by_each_server(tmp_path, servers, memory):
    chance, kills = np.random.default_rng(), 3
    gos = [tmp_path / f"go-{number}" for number in range(kills)]
    with job(tmp_path, 1 + kills, servers, RINGTRAIN_SHARED_MEMORY=memory, **SOON_OVER) as one:
        one.scheduler()
        for _ in range(servers):
            one.server()
        reader = one.worker(BEGIN + READS_LARGE_KEYS, DMLC_TASK_ID="0")
        writers = [
            one.worker(f"GO = {str(go)!r}\n" + BEGIN + PUSHES_LARGE_KEYS, DMLC_TASK_ID=str(1 + number))
            for number, go in enumerate(gos)
        ]
        for number, writer in enumerate(writers):
            gos[number].touch()
            writer.wait_for("begins")
            time.sleep(0.1 + chance.random() * 0.3)
            writer.kill()
            reader.wait_for("]\n", count=1 + number, within_s=40)
        assert reader.end().count("dead whole") == kills, reader.output()


@pytest.mark.parametrize("memory", ["auto", "off"])
def test_pushes_to_an_atomic_store_are_seen_as_a_whole_also_those_of_a_killed_worker(tmp_path, memory):
    with job(tmp_path, 4, 2, RINGTRAIN_SHARED_MEMORY=memory, **SOON_OVER) as one:
        scheduler, servers = one.scheduler(), [one.server() for _ in range(2)]
        programs = [READS_WHOLE_KEYS, *[WRITES_WHOLE_KEYS.replace("DIES", "True")] * 3]
        reader, *writers = (
            one.worker(BEGIN + program, DMLC_TASK_ID=str(number)) for number, program in enumerate(programs)
        )
        said = reader.end(within_s=60)
        assert "all whole" in said
        limit = (
            'ValueError key "too large" has 256 MiB, and a store with atomic=True takes at most 256 MiB for each key'
        )
        assert limit in said
        for writer in writers:
            writer.end(-signal.SIGKILL)
        for process in (*servers, scheduler):
            process.end()


@pytest.mark.parametrize("memory", ["auto", "off"])
def test_when_a_server_dies_its_keys_are_lost(tmp_path, memory):
    program = SYNC_WITH_A_DEATH.replace("dist_sync", "dist_async").replace(
        'kv.init("w"', 'kv.set_optimizer("test")\nkv.init("w"'
    )
    with job(tmp_path, 1, 1, RINGTRAIN_SHARED_MEMORY=memory) as one:
        one.scheduler()
        server = one.server()
        worker = one.worker(BEGIN + program)
        worker.wait_for("round", 3)
        server.kill()
        said = worker.end(within_s=15)
        assert "PeerLostError" in said
        assert "server 0" in said


@pytest.mark.parametrize("memory", ["auto", "off"])
def test_a_server_whose_place_nobody_takes_is_lost_at_the_deadline(tmp_path, memory):
    program = SYNC_WITH_A_DEATH.replace("dist_sync", "dist_async").replace(
        'kv.init("w"', 'kv.set_optimizer("test")\nkv.init("w"'
    )
    with job(tmp_path, 1, 1, RINGTRAIN_KV_REJOIN_S="2", RINGTRAIN_SHARED_MEMORY=memory) as one:
        one.scheduler()
        server = one.server()
        worker = one.worker(BEGIN + program)
        worker.wait_for("round", 3)
        server.kill()
        said = worker.end(within_s=20)
        assert "PeerLostError" in said and "no other server has taken its place within kv_rejoin_s" in said


AGAIN = """
kv = kvstore.create("dist_async")
kv.set_optimizer("test")
kv.init("w", np.zeros(100000, np.float32))
kv.barrier()
print("recovery", kv.is_recovery, kv.rank, flush=True)
if kv.rank == 1 and not kv.is_recovery:
    for turn in range(7):
        kv.push("w", np.ones(100000, np.float32))
    kv.wait()
    print("pushed", flush=True)
    time.sleep(60)
if kv.is_recovery:
    kv.push("w", np.ones(100000, np.float32))
    kv.wait()
while kv.pull("w")[0] < 8:
    time.sleep(0.01)
kv.barrier()
print("value", kv.pull("w").min(), kv.pull("w").max())
"""


def test_a_worker_that_is_started_again_goes_on(tmp_path):
    with job(tmp_path, 2, 1) as one:
        scheduler, server = one.scheduler(), one.server()
        first, second = (one.worker(BEGIN + AGAIN, DMLC_TASK_ID=str(number)) for number in range(2))
        second.wait_for("pushed")
        second.kill()
        again = one.worker(BEGIN + AGAIN, DMLC_TASK_ID="1")
        said = again.end()
        assert "recovery True 1" in said
        assert "value 8.0 8.0" in said
        assert "value 8.0 8.0" in first.end()
        server.end()
        scheduler.end()


def test_a_pull_waits_for_who_is_too_far_behind(tmp_path):
    program = """
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
print("bound")
"""
    with job(tmp_path, 2, 1) as one:
        assert all("bound" in said for said in run(one, 1, [program] * 2))


def test_commands_reach_the_servers(tmp_path):
    server = """
import ast
import os
os.environ["RINGTRAIN_NO_AUTOSERVE"] = "1"
from ringtrain import kvstore

def control(head, body):
    if head == 99:
        raise ValueError("no such command")
    print("command", head, body, flush=True)

kvstore.run_server(control)
"""
    program = """
kv = kvstore.create("dist_async")
if kv.rank == 0:
    kv.send_command_to_servers(20, "hello")
    try:
        kv.send_command_to_servers(99, "")
    except hvd.RemoteError as error:
        print(error)
"""
    with job(tmp_path, 2, 2) as one:
        one.scheduler()
        servers = [one.start("server", ["-c", server]) for _ in range(2)]
        workers = [one.worker(BEGIN + program, DMLC_TASK_ID=str(number)) for number in range(2)]
        assert "ValueError: no such command" in workers[0].end()
        assert all("command 20 hello" in process.end() for process in servers)


def test_a_wait_for_a_worker_that_has_ended_fails(tmp_path):
    program = """
kv = kvstore.create("dist_async")
try:
    if kv.rank == 0: kv.barrier()
except hvd.PeerLostError as error:
    print("PeerLostError", error)
"""
    with job(tmp_path, 2, 1) as one:
        assert "PeerLostError barrier: worker 1 has ended, so it does not come" in run(one, 1, [program] * 2)[0]


def test_a_worker_waits_for_the_others_at_its_end(tmp_path):
    program = """
kv = kvstore.create("dist_async")
kv.set_optimizer("test")
kv.init("w", np.zeros(10, np.float32))
if kv.rank == 0:
    time.sleep(2)
    kv.push("w", np.ones(10, np.float32))
    assert (kv.pull("w") == 1).all()
    print("served")
"""
    with job(tmp_path, 2, 0) as one:
        began_s = time.monotonic()
        assert "served" in run(one, 0, [program] * 2)[0]
        assert time.monotonic() - began_s > 2


UPDATER = """
kv = kvstore.create("dist_sync")
kv.init("w", np.full(1000, 5, np.float32))
kv.push("w", np.full(1000, 2.0, np.float32))
assert (kv.pull("w") == 4).all()

def update(key, total, stored):
    stored += 10 * total

kv.set_updater(update)
for turn in range(3):
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
print("good")
"""


def test_a_function_updates_on_every_worker(tmp_path):
    with job(tmp_path, 2, 2) as one:
        assert all("good" in said for said in run(one, 2, [UPDATER] * 2))


SAVES = """
kv = kvstore.create("dist_sync")
keys, shapes = ["a", "b"], [(5,), (400, 300)]
kv.set_optimizer("adam", learning_rate=0.1)
kv.init(keys, [np.full(shape, 3, np.float32) for shape in shapes])
random = np.random.default_rng(7)
if LOADS:
    kv.load(f"{FOLDER}/store")
for turn in range(6):
    grads = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    if LOADS and turn < 3:
        continue
    kv.push(keys, [grad / kv.num_workers for grad in grads])
    kv.wait()
    if turn == 2 and not LOADS:
        kv.save(f"{FOLDER}/store")
        kv.save_optimizer_states(f"{FOLDER}/states", dump_optimizer=True)
        kv.barrier()
        kv.load_optimizer_states(f"{FOLDER}/states")
        kv.barrier()
if kv.rank == 0:
    np.savez(f"{FOLDER}/weights-{LOADS}", **{key: kv.pull(key) for key in keys})
try:
    kv.load("/no/such/file")
except OSError as error:
    print("OSError", error)
"""


def test_a_store_that_was_saved_is_loaded_with_other_servers(tmp_path):
    for servers, loads in ((2, False), (3, True)):
        (folder := tmp_path / str(servers)).mkdir()
        program = SAVES.replace("LOADS", str(loads)).replace("{FOLDER}", str(tmp_path))
        with job(folder, 2, servers) as one:
            assert all("OSError" in said for said in run(one, servers, [program] * 2))
    first, second = (np.load(tmp_path / f"weights-{loads}.npz") for loads in (False, True))
    assert all((first[key] == second[key]).all() for key in ("a", "b"))


JOIN = """
kv = kvstore.create("dist_sync")
kv.set_optimizer("test")
kv.init("w", np.zeros(70000, np.float32))
for turn in range(3 + 4 * kv.rank):
    kv.push("w", np.ones(70000, np.float32))
kv.join()
assert (kv.pull("w") == 3 * 2 + 4).all(), kv.pull("w")
kv.push("w", np.ones(70000, np.float32))
assert (kv.pull("w") == 12).all(), kv.pull("w")
print("good")
"""


def test_a_worker_with_less_data_joins(tmp_path):
    with job(tmp_path, 2, 1) as one:
        assert all("good" in said for said in run(one, 1, [JOIN] * 2))


COMPRESSED = """
kv = kvstore.create("KIND")
if not LATE:
    kv.set_gradient_compression(PARAMS)
kv.set_optimizer("test")
kv.init("w", np.zeros(70000, np.float32))
if LATE:
    kv.push("w", np.full(70000, 2, np.float32))
    kv.set_gradient_compression(PARAMS)
for turn in range(4):
    kv.push("w", np.full(70000, 0.4, np.float32))
    kv.wait()
kv.barrier()
print(sorted(set(kv.pull("w").tolist())))
"""


TWO_BITS, HALVES = ({"type": "2bit", "threshold": 0.5}, 3.0), ({"type": "fp16"}, 8 * float(np.float16(0.4)))


@pytest.mark.parametrize(
    ("kind", "memory", "params", "expected"),
    [
        *(("dist_async", "auto", *TWO_BITS), ("dist_async", "off", *HALVES)),
        *(("dist_sync", "auto", *HALVES), ("dist_sync", "off", *TWO_BITS)),
    ],
    ids=["async-shm-2bit", "async-tcp-fp16", "sync-shm-fp16", "sync-tcp-2bit"],
)
def test_gradients_go_in_fewer_bits(tmp_path, kind, memory, params, expected):
    is_late = memory == "off"  # after a push in full
    program = COMPRESSED.replace("KIND", kind).replace("PARAMS", repr(params)).replace("LATE", str(is_late))
    with job(tmp_path, 2, 2, RINGTRAIN_SHARED_MEMORY=memory) as one:
        for said in run(one, 2, [program] * 2):
            (found,) = ast.literal_eval(said)
            assert found == pytest.approx(expected + 4 * is_late, rel=1e-6)


ELASTIC = """
kv = kvstore.create("dist_async", elastic=True)
kv.set_optimizer("test")
kv.init("w", np.zeros(1000, np.float32))
kv.barrier()
print("worker", kv.rank, kv.num_workers, kv.is_recovery, flush=True)
if kv.rank == 1:
    kv.push("w", np.ones(1000, np.float32))
    kv.wait()
    print("pushed", flush=True)
    time.sleep(60)
while kv.pull("w")[0] < 5:
    time.sleep(0.01)
    if kv.rank == 2:
        kv.push("w", np.full(1000, 4, np.float32))
        kv.wait()
kv.barrier()
print("end", kv.num_workers, kv.pull("w")[0])
"""


def test_workers_of_an_elastic_store_come_and_go(tmp_path):
    with job(tmp_path, 2, 1, **SOON_OVER) as one:
        scheduler, server = one.scheduler(), one.server()
        first, second = (one.worker(BEGIN + ELASTIC, DMLC_TASK_ID=str(number)) for number in range(2))
        second.wait_for("pushed")
        third = one.worker(BEGIN + ELASTIC, DMLC_TASK_ID="2")
        third.wait_for("worker 2 3 True")
        second.kill()
        for worker in (first, third):
            assert "end 2 5.0" in worker.end()
        server.end()
        scheduler.end()


FAILS = """
kv = kvstore.create("dist_sync")
kv.init("w", np.zeros(10, np.float32))
if kv.rank == 1:
    raise ArithmeticError("too small")
try:
    kv.pushpull("w", np.ones(10, np.float32))
except hvd.PeerLostError as error:
    print("PeerLostError", error)
"""


def test_the_exception_of_a_worker_is_told_to_the_others(tmp_path):
    with job(tmp_path, 2, 1, **SOON_OVER) as one:
        scheduler, server = one.scheduler(), one.server()
        first, second = (one.worker(BEGIN + FAILS, DMLC_TASK_ID=str(number)) for number in range(2))
        assert "ArithmeticError: too small" in second.end(1)
        assert "has died: ArithmeticError: too small" in first.end()
        server.end()
        scheduler.end()


TRAINER = """
import torch
torch.manual_seed(1)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2))
trainer = kvstore.Trainer(model.parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore="KIND")
kv = trainer._store
data = torch.randn(64, 20, generator=torch.Generator().manual_seed(2))
labels = (data.sum(1) > 0).long()
for step in range(60):
    batch = slice(kv.rank, None, kv.num_workers)
    for parameter in model.parameters():
        parameter.grad = None
    loss = torch.nn.functional.cross_entropy(model(data[batch]), labels[batch], reduction="sum")
    loss.backward()
    trainer.step(64)
kv.barrier()
print("loss", float(torch.nn.functional.cross_entropy(model(data), labels)))
"""


@pytest.mark.parametrize("kind", [pytest.param("dist_async", marks=pytest.mark.slow), "dist_sync"])
def test_a_trainer_updates_on_servers(tmp_path, kind):
    with job(tmp_path, 2, 2) as one:
        for said in run(one, 2, [TRAINER.replace("KIND", kind)] * 2):
            assert float(said.split()[-1]) < 0.2


SURVIVES = """
kv = kvstore.create("dist_async")
kv.set_optimizer("test")
kv.init(["a", "b"], [np.zeros(200000, np.float32), np.zeros(7, np.float32)])
for turn in range(400):
    kv.push(["a", "b"], [np.ones(200000, np.float32), np.ones(7, np.float32)])
    kv.pull("a")
    kv.pull("b")
    print("round", flush=True)
    time.sleep(0.01)
kv.wait()
assert not kv.restored or 0 <= kv.restored["a"] < 60
print("restored", *kv.restored)
print("value", kv.pull("a").min(), kv.pull("a").max(), kv.pull("b").max())
"""


COUNTS_ALL = """
kv = kvstore.create("dist_async")
kv.set_optimizer("test")
kv.init(["a", "b"], [np.zeros(200000, np.float32), np.zeros(7, np.float32)])
for turn in range(300):
    kv.push(["a", "b"], [np.ones(200000, np.float32), np.ones(7, np.float32)])
    kv.pull("a")
    print("round", flush=True)
    time.sleep(0.005)
kv.wait()
kv.barrier()
assert (kv.pull("a") == 600).all() and (kv.pull("b") == 600).all(), (kv.pull("a").min(), kv.pull("b"))
print("exact", *kv.restored)
"""


def test_a_server_that_is_started_again_goes_on_with_the_memory_that_workers_of_its_host_share(tmp_path):
    with job(tmp_path, 2, 2, RINGTRAIN_KV_REJOIN_S="30") as one:
        scheduler = one.scheduler()
        servers = [one.server(DMLC_TASK_ID=str(number)) for number in range(2)]
        workers = [
            one.worker(BEGIN + COUNTS_ALL, RINGTRAIN_SHARED_MEMORY=memory, DMLC_TASK_ID=str(number))
            for number, memory in enumerate(["auto", "off"])  # the other one reaches the servers by TCP
        ]
        for rounds, number in ((50, 1), (100, 0), (150, 1)):
            workers[0].wait_for("round", rounds)
            servers[number].kill()
            servers[number] = one.server(DMLC_TASK_ID=str(number), PS_VERBOSE="1")
            servers[number].wait_for("goes on from the memory that it shared with workers")
        for worker in workers:
            assert worker.end().splitlines()[-1] == "exact"
        for process in (*servers, scheduler):
            process.end()


def rounds_when_it_waits(worker):
    """How many rounds a worker has made when it makes no more of them."""
    before, now = -1, worker.output().count("round")
    while now > before:
        time.sleep(0.7)
        before, now = now, worker.output().count("round")
    return now


@pytest.mark.parametrize("memory", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_a_server_that_is_started_again_goes_on_from_its_snapshot(tmp_path, memory):
    variables = {
        "RINGTRAIN_KV_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
        "RINGTRAIN_KV_SNAPSHOT_S": "0.3",
        "RINGTRAIN_KV_REJOIN_S": "30",
        "RINGTRAIN_SHARED_MEMORY": memory,
    }
    with job(tmp_path, 1, 2, **variables) as one:
        scheduler = one.scheduler()
        servers = [one.server(DMLC_TASK_ID=str(number)) for number in range(2)]
        worker = one.worker(BEGIN + SURVIVES)
        worker.wait_for("round", 100)
        servers[1].kill()
        assert rounds_when_it_waits(worker) < 400  # the memory of a dead server takes no push that may be lost
        servers[1] = one.server(DMLC_TASK_ID="1", PS_VERBOSE="1", RINGTRAIN_SHARED_MEMORY="off")
        servers[1].wait_for("goes on from a snapshot of")
        whole = worker.end()
        said = whole.splitlines()[-1].split()
        least, most = float(said[1]), float(said[2])
        # The pieces of server 0 have all pushes, those of server 1 lack what came after the snapshot.
        assert most == 400
        assert "restored a\n" in whole
        assert 200 < least <= 400
        for process in (*servers, scheduler):
            process.end()


DIES_BEFORE_A_ROUND = """
kv = kvstore.create("dist_async")
if kv.rank == 1 and not kv.is_recovery:
    say = kv._backend._worker.say_unless_missed
    kv._backend._worker.say_unless_missed = lambda label, *said: os._exit(1) if "rule" in label else say(label, *said)
kv.set_optimizer("test")
print("has it")
"""


def test_a_worker_that_dies_in_set_optimizer_and_comes_back_ends_the_wait_of_the_others(tmp_path):
    with job(tmp_path, 2, 1, RINGTRAIN_KV_REJOIN_S="60") as one:
        one.scheduler()
        one.server(DMLC_TASK_ID="0")
        first, second = (one.worker(BEGIN + DIES_BEFORE_A_ROUND, DMLC_TASK_ID=str(task)) for task in range(2))
        second.end(1)
        comes = one.worker(BEGIN + DIES_BEFORE_A_ROUND, DMLC_TASK_ID="1", DMLC_NUM_ATTEMPT="1")
        for worker in (first, comes):
            assert worker.end().splitlines()[-1] == "has it"


COMES_BACK = """
kv = kvstore.create("dist_async", elastic=True)
print("created", kv.is_recovery)
kv.set_optimizer("test")
kv.init("a", np.full(70_000, 3, np.float32))
print("pulled", kv.pull("a").min(), kv.pull("a").max())
time.sleep(0 if kv.is_recovery else 60)
"""


@pytest.mark.slow
def test_a_worker_that_comes_while_a_server_is_gone_finds_the_one_that_takes_its_place(tmp_path):
    variables = {
        "RINGTRAIN_KV_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
        "RINGTRAIN_KV_SNAPSHOT_S": "0.1",
        "RINGTRAIN_KV_REJOIN_S": "30",
    }
    with job(tmp_path, 2, 1, **variables) as one:
        one.scheduler()
        server = one.server(DMLC_TASK_ID="0")
        workers = [one.worker(BEGIN + COMES_BACK, DMLC_TASK_ID=str(task)) for task in range(2)]
        for worker in workers:
            worker.wait_for("pulled 3.0 3.0")
        wait_until((tmp_path / "snapshots" / "store.0.snapshot").exists)
        server.kill()
        workers[1].kill()
        comes = one.worker("print('comes')\n" + BEGIN + COMES_BACK, DMLC_TASK_ID="1", DMLC_NUM_ATTEMPT="1")
        comes.wait_for("comes")
        time.sleep(2)  # it looks for the server that is gone
        one.server(DMLC_TASK_ID="0")
        assert "created True\npulled 3.0 3.0" in comes.end()


def test_without_a_snapshot_no_server_takes_the_place_of_a_lost_one(tmp_path):
    with job(tmp_path, 1, 1) as one:
        one.scheduler()
        server = one.server(DMLC_TASK_ID="0")
        one.worker(BEGIN + SURVIVES).wait_for("round", 3)
        server.kill()
        assert "cannot come in the place of a lost one without a snapshot" in one.server(DMLC_TASK_ID="0").end(1)


COUNTED = """
import urllib.request
kv = kvstore.create("dist_async")
kv.set_optimizer("test")
kv.init("w", np.zeros(1000, np.float32))
before = hvd.metrics()["kvstore"]
for turn in range(5):
    kv.push("w", np.ones(1000, np.float32))
kv.pushpull("w", np.ones(1000, np.float32))
kv.pull("w", out=np.zeros(1000, np.float32))
after = hvd.metrics()["kvstore"]
counted = {name: after[name] - before[name] for name in after}
assert (counted["pushes"], counted["push_bytes"], counted["pulls"], counted["pull_bytes"]) == (6, 24000, 2, 8000)
assert counted["waiting_s"] > 0 and counted["sent_bytes"] > 24000 and counted["received_bytes"] > 8000
kv.barrier()
port = int(os.environ["RINGTRAIN_METRICS_PORT"])
pages = [urllib.request.urlopen(f"http://localhost:{port + i}/metrics", timeout=10).read().decode() for i in range(3)]
if kv.rank == 0:
    assert f'ringtrain_kvstore_pushes_total{{rank="1"}} {after["pushes"]}.0' in pages[1].splitlines()
    assert "ringtrain_kvstore_waiting_seconds_total" in pages[0]
    assert 'ringtrain_kvstore_server_connections{rank="0"} 2.0' in pages[2].splitlines()
    assert "ringtrain_operations" not in "".join(pages)
    print("counted")
kv.barrier()
"""


def test_pushes_pulls_and_servers_are_counted_also_for_prometheus(tmp_path):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with job(tmp_path, 2, 1, RINGTRAIN_METRICS_PORT="29541", RINGTRAIN_SHARED_MEMORY="off") as one:
        assert "counted" in run(one, 1, [COUNTED] * 2)[0]


FULL_DISK = """
import os, resource
os.environ["RINGTRAIN_NO_AUTOSERVE"] = "1"
from ringtrain import kvstore
resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))
kvstore.run_server()
"""


def test_a_server_whose_snapshots_cannot_be_written_says_so_once_and_goes_on(tmp_path):
    variables = {
        "RINGTRAIN_KV_SNAPSHOT_DIR": str(tmp_path / "snapshots"),
        "RINGTRAIN_KV_SNAPSHOT_S": "0.1",
        "RINGTRAIN_SHARED_MEMORY": "off",
    }
    with job(tmp_path, 1, 1, **variables) as one:
        one.scheduler()
        server = one.start("server", ["-c", FULL_DISK])
        assert "value 400.0 400.0" in one.worker(BEGIN + SURVIVES).end()
        said = server.end()
    assert said.count("store.0.snapshot cannot be written: File too large; this server goes on") == 1
    assert not list((tmp_path / "snapshots").iterdir())


def test_a_server_that_makes_a_store_is_told_what_to_call(tmp_path):
    with job(tmp_path, 1, 1) as one:
        script = "from ringtrain import kvstore; kvstore.create('dist_async')"
        said = one.start("server", ["-c", script], RINGTRAIN_NO_AUTOSERVE="1").end(1)
    assert "ValueError: this process is the server of its job (DMLC_ROLE)" in said and "kvstore.run_server()" in said


ROWS = """
kv = kvstore.create("KIND")
kv.set_optimizer("test")
kv.init(["e", "b"], [np.arange(3000, dtype=np.float32).reshape(1000, 3), np.zeros(4, np.float32)])
first = np.arange(3000, dtype=np.float32).reshape(1000, 3)
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
for call, text in [
    (lambda: kv.row_sparse_pull("e", row_ids=[1000]), "has rows 0 to 999"),
    (lambda: kv.row_sparse_pull("e"), "needs row_ids"),
    (lambda: kv.push("e", kvstore.RowSparse([1], np.ones((1, 4), np.float32))), "has rows of shape"),
    (lambda: kv.push("e", kvstore.RowSparse([1], np.full((1, 3), 1e300))), "is float32, but the value is float64"),
    (lambda: kv.push("e", kvstore.RowSparse([1000], np.ones((1, 3), np.float32))), "has rows 0 to 999"),
]:
    try:
        call()
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
before = kv._backend._client.metrics()
kv.row_sparse_pull("e", row_ids=np.arange(10))
after = kv._backend._client.metrics()
print("moved", sum(after[name] - before[name] for name in after if name.endswith("_bytes")))
"""


@pytest.mark.parametrize(("kind", "memory"), [("dist_async", "off"), ("dist_sync", "auto")])
def test_some_rows_are_pushed_and_pulled(tmp_path, kind, memory):
    with job(tmp_path, 2, 2, RINGTRAIN_SHARED_MEMORY=memory) as one:
        for said in run(one, 2, [ROWS.replace("KIND", kind)] * 2):
            assert float(said.split()[-1]) < 0.03 * 12000
