"""Parts of key-value stores: what workers push to chunks of memory that they share, and what they read from it."""

import functools
import os
import random
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest
from harness.store_parts import (
    APPLIED,
    BUSY,
    BUSY_READING,
    DONE,
    DUPLICATE,
    EARLY,
    FULL,
    GONE,
    HELD,
    JOINED,
    NOT_YET,
    TWO_BIT,
    Actor,
    Part,
)

from ringtrain import _core

pytestmark = [pytest.mark.fast, pytest.mark.alike]


def numbers(value, count=100, dtype="float32"):
    return np.full(count, value, dtype)


def asynchronous(count=100, **options):
    part = Part([("float32", count)], **options)
    part.set_rule("test", "mxnet", "rescale_grad", 1.0)
    return part


def value_of(actor, chunk=0, pushes=0, dtype="float32"):
    reading, value, _ = actor.read(chunk, pushes, dtype)
    assert reading == DONE
    assert (value == value[0]).all()
    return value[0]


def test_a_push_is_applied_at_once_and_counted_once():
    actor = Actor(asynchronous(), 0)
    answer = numbers(0)
    assert actor.push(0, 1, numbers(3), answer=answer) == (APPLIED, True)
    assert (answer == 3).all()
    assert actor.push(0, 1, numbers(3), answer=answer) == (DUPLICATE, True)
    assert actor.push(0, 3, numbers(3)) == (EARLY, False)
    assert actor.push(0, 2, numbers(2)) == (APPLIED, False)
    assert value_of(actor, pushes=2) == 5
    assert actor.read(0)[2] == 2
    assert actor.read(0, pushes=3)[0] == NOT_YET


def test_an_asynchronous_push_without_an_optimizer_is_refused():
    with pytest.raises(RuntimeError, match="would replace weights by gradients"):
        Actor(Part([("float32", 5)]), 0).push(0, 1, numbers(1, 5))


def test_rounds_close_in_order_and_a_read_waits_for_its_own():
    part = Part([("float32", 100)], workers=3, synchronous=True)
    actors = [Actor(part, worker) for worker in range(3)]
    for seq in (1, 2):
        assert actors[0].push(0, seq, numbers(seq)) == (HELD, False)
    assert actors[2].push(0, 1, numbers(10)) == (HELD, False)
    assert actors[0].read(0, pushes=1)[0] == NOT_YET
    assert actors[0].push(0, 2, numbers(2)) == (DUPLICATE, False)
    answer = numbers(0)
    assert actors[1].push(0, 1, numbers(100), answer=answer) == (APPLIED, True)
    assert (answer == 111).all()
    assert value_of(actors[0], pushes=1) == 111
    assert actors[0].read(0, pushes=2)[0] == NOT_YET
    assert part.closed(0) == part.bell() == 1
    assert actors[1].push(0, 2, numbers(200)) == (HELD, False)
    assert actors[2].push(0, 2, numbers(20)) == (APPLIED, False)
    assert value_of(actors[0], pushes=2) == 222


def test_a_sum_is_made_in_the_order_of_the_workers():
    values = np.random.default_rng(1).standard_normal((4, 100)).astype("float32") * np.float32(1e6) ** np.arange(
        4, dtype="float32"
    ).reshape(4, 1)
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        part = Part([("float32", 100)], workers=4, synchronous=True)
        for worker in order:
            actor = Actor(part, worker)
            actor.push(0, 1, values[worker])
        assert (actor.read(0, pushes=1)[1] == expected).all()


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "uint8"])
def test_sums_of_other_dtypes(dtype):
    part = Part([(dtype, 20000)], workers=2, synchronous=True)
    actors = [Actor(part, worker) for worker in range(2)]
    for chunk in part.chunks(0):
        for worker, actor in enumerate(actors):
            actor.push(chunk, 1, numbers(worker + 1, part.elements(chunk), dtype))
        assert value_of(actors[0], chunk, 1, dtype) == 3
    assert sum(part.elements(chunk) for chunk in part.chunks(0)) == 20000


def test_16_bit_values_have_a_master_of_32():
    part = Part([("float16", 100)])
    part.set_rule("test", "mxnet", "rescale_grad", 1.0)
    actor = Actor(part, 0)
    assert actor.assign(0, numbers(2048, dtype="float16"))
    for seq in range(1, 5):  # in float16 itself, 2048 + 0.5 is 2048
        actor.push(0, seq, numbers(0.5))
    assert value_of(actor, pushes=4, dtype="float16") == 2050
    assert value_of(actor, pushes=4) == 2050


def test_codes_mean_what_they_say():
    values, codes = np.array([5, -5, 0.1, 0] * 25, "float32"), np.zeros(28, "uint8")
    views = [(one.ctypes.data, _core.DTYPES[str(one.dtype)], one.shape) for one in (values, numbers(0), codes)]
    _core.quantize("2bit", 0.5, *views)
    for synchronous in (False, True):
        part = Part([("float32", 100)], workers=2, synchronous=synchronous)
        part.set_rule("test", "mxnet", "rescale_grad", 1.0)
        for worker in range(2):
            actor = Actor(part, worker)
            actor.push(0, 1, codes, dtype="float32", codes=TWO_BIT, threshold=0.5)
        assert (actor.read(0, pushes=1)[1] == np.array([1, -1, 0, 0] * 25)).all()


def test_momentum_is_that_of_the_kernel():
    part = Part([("float32", 20000)], workers=2, synchronous=True)
    part.set_rule("sgd", "torch", "momentum", 0.9)
    actors = [Actor(part, worker) for worker in range(2)]
    generator = np.random.default_rng(2)
    weight, direction = (np.zeros(20000, "float32") for _ in range(2))
    for seq in range(1, 4):
        grads = generator.standard_normal((2, 20000)).astype("float32")
        for chunk, begin in zip(part.chunks(0), (0, 16384), strict=True):
            for actor, grad in zip(actors, grads, strict=True):
                actor.push(chunk, seq, grad[begin : begin + part.elements(chunk)].copy(), lr=0.1)
        direction = direction * np.float32(0.9) + (grads[0] + grads[1])
        weight = weight - np.float32(0.1) * direction
    got = np.concatenate([actors[0].read(chunk, 3)[1] for chunk in part.chunks(0)])
    assert (got == weight).all()


def test_a_bound_on_staleness_holds_up_reads_and_no_push():
    part = asynchronous(workers=2, capacity=3, max_staleness=1)
    fast, slow = (Actor(part, worker) for worker in range(2))
    fast.push(0, 1, numbers(1))
    assert fast.read(0, 1)[0] == DONE
    assert fast.push(0, 2, numbers(1), answer=numbers(0)) == (APPLIED, False)
    assert fast.read(0, 2)[0] == NOT_YET
    bell = part.bell()
    slow.push(0, 1, numbers(1))
    assert part.bell() > bell
    assert fast.read(0, 2)[0] == DONE
    fast.push(0, 3, numbers(1))
    part.set_presence(1, GONE)
    assert fast.read(0, 3)[0] == DONE
    part.let_in(1)  # what it has missed holds up nobody
    assert fast.read(0, 3)[0] == DONE
    fast.push(0, 4, numbers(1))
    assert fast.read(0, 4)[0] == DONE
    fast.push(0, 5, numbers(1))
    assert fast.read(0, 5)[0] == NOT_YET


def test_rounds_close_without_those_who_have_joined_and_again_with_them():
    part = Part([("float32", 100)], workers=2, synchronous=True)
    actors = [Actor(part, worker) for worker in range(2)]
    for seq in (1, 2, 3):
        actors[0].push(0, seq, numbers(seq))
    actors[1].push(0, 1, numbers(10))
    part.set_presence(1, JOINED)
    part.settle()
    assert part.closed(0) == 3
    assert value_of(actors[0], pushes=3) == 3
    part.let_in(1)
    assert actors[0].push(0, 4, numbers(4)) == (HELD, False)
    assert actors[1].push(0, 2, numbers(20)) == (APPLIED, False)
    assert value_of(actors[1], pushes=2) == 24


def test_a_worker_that_is_too_far_ahead_is_told_and_can_go_on_later():
    part = Part([("float32", 10)], workers=2, synchronous=True)
    fast, slow = (Actor(part, worker) for worker in range(2))
    seq = 1
    while fast.push(0, seq, numbers(seq, 10))[0] == HELD:
        seq += 1
    assert fast.push(0, seq, numbers(seq, 10))[0] == FULL
    assert slow.push(0, 1, numbers(0, 10))[0] == APPLIED
    assert fast.push(0, seq, numbers(seq, 10))[0] == HELD
    assert value_of(slow, pushes=1) == 1


def test_a_worker_that_comes_back_goes_on_where_it_was():
    part = Part([("float32", 20000)], workers=2, synchronous=True)
    first, other = (Actor(part, worker) for worker in range(2))
    first.push(0, 1, numbers(1, 16384))  # and not to the other chunk
    first.close()
    part.set_presence(0, GONE)
    part.let_in(0)
    back = Actor(part, 0)
    assert back.fewest_pushes(0, 0) == 0
    for seq in (1, 2):
        outcomes = [back.push(chunk, seq, numbers(5, part.elements(chunk)))[0] for chunk in part.chunks(0)]
        assert outcomes == ([DUPLICATE, HELD] if seq == 1 else [HELD, HELD])
    for seq in (1, 2):
        for chunk in part.chunks(0):
            other.push(chunk, seq, numbers(10, part.elements(chunk)))
            assert value_of(other, chunk, seq) == (11 if (chunk, seq) == (0, 1) else 15)


ROWS = [3, 4, 500, 1999]
CODES = np.random.default_rng(1).integers(0, 256, 200_000 // 4, np.uint8)
STAGED = {
    "all": ("float32", {"values": np.arange(200_000, dtype=np.float32)}),
    "half": ("float16", {"values": np.arange(200_000, dtype=np.float32) / 1024}),
    "rows": ("float32", {"values": np.arange(400, dtype=np.float32), "rows": ROWS, "elements": 100}),
    "codes": ("float32", {"values": CODES, "dtype": "float32", "codes": TWO_BIT, "threshold": 0.5}),
}


def staged(of, every, **push):
    """A Part after a push to every so many of its chunks, and its server."""
    part = Part([("float32", 100), (of, 200_000)], workers=2, shared=True)
    part.set_rule("sgd", "mxnet", "momentum", 0.5)
    Actor(part, 0).stage(1, 1, every=every, **push)
    return part, Actor(part, 2)


@pytest.mark.parametrize("what", STAGED)
def test_a_server_applies_the_rest_of_a_push_of_a_dead_worker_to_the_bit(what):
    dtype, push = STAGED[what]
    part, server = staged(dtype, 3, **push)
    whole, _ = staged(dtype, 1, **push)
    for _ in range(2):
        assert server.finish_push_of(0)
        for chunk in part.chunks(1):
            assert server.pushes(chunk, 0) == 1
            after, expected = (Actor(one, 1).read(chunk, dtype=dtype) for one in (part, whole))
            assert (after[1] == expected[1]).all() and after[2] == expected[2] == 1


def test_a_push_that_was_not_kept_as_a_whole_is_not_applied_at_all():
    dtype, push = STAGED["all"]
    part, server = staged(dtype, 1, **push, publishes=False)
    assert server.finish_push_of(0)
    assert {server.pushes(chunk, 0) for chunk in part.chunks(1)} == {0}


def test_the_rest_of_a_push_waits_for_a_chunk_that_another_process_holds():
    dtype, push = STAGED["all"]
    part, server = staged(dtype, 3, **push)
    worker = Actor(part, 1)

    def hold(of):
        Actor(Part([("float32", 100), (dtype, 200_000)], workers=2, shared=True, of=of), 1).push_for_ever(1, 0.0)

    with child(part.name, hold) as pid:
        wait_until(lambda: worker.pushes(part.chunks(1)[0], 1) > 3)
        while True:
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            if any(worker.read(chunk)[0] == BUSY_READING for chunk in part.chunks(1)):
                break
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.001)
        assert not server.finish_push_of(0)
    assert server.finish_push_of(0)
    assert {server.pushes(chunk, 0) for chunk in part.chunks(1)} == {1}


def test_a_stopped_process_that_copies_a_push_keeps_out_the_process_in_its_place():
    dtype, push = STAGED["all"]
    part = Part([("float32", 100), (dtype, 200_000)], workers=2, shared=True)
    part.set_rule("sgd", "mxnet", "momentum", 0.5)
    server = Actor(part, 2)

    def copy_for_ever(of):
        worker = Actor(Part([("float32", 100), (dtype, 200_000)], workers=2, shared=True, of=of), 0)
        while True:
            worker.stage(1, 1, publishes=False, **push)

    with child(part.name, copy_for_ever) as pid:
        deadline = time.monotonic() + 60
        while True:
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            if not server.finish_push_of(0):
                break
            assert time.monotonic() < deadline
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.001)
        with pytest.raises(
            RuntimeError, match="a process before this one has been in the middle of a push of worker 0"
        ):
            Actor(part, 0, timeout_s=0.2).stage(1, 1, **push)
    assert server.finish_push_of(0)
    assert {server.pushes(chunk, 0) for chunk in part.chunks(1)} == {0}
    Actor(part, 0).stage(1, 1, every=3, **push)
    assert server.finish_push_of(0)
    assert {server.pushes(chunk, 0) for chunk in part.chunks(1)} == {1}


@contextmanager
def child(part, work):
    """A process with its own mapping of the Part; killed at the end."""
    pid = os.fork()
    if pid == 0:
        try:
            work(part)
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def wait_until(happens, limit_s=10.0):
    end = time.monotonic() + limit_s
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("momentum", [False, True], ids=["plain", "momentum"])
def test_a_process_that_is_killed_leaves_whole_updates_only(momentum):
    """Every chunk has as many pushes as it has counted, and all its elements have seen the same."""
    keys, shared = [("float32", 200_000)], {"workers": 2, "shared": True}
    part = Part(keys, **shared)
    part.set_rule(*(("sgd", "mxnet", "momentum", 1.0) if momentum else ("test", "mxnet", "rescale_grad", 1.0)))
    survivor, generator = Actor(part, 1), random.Random(3)
    own = [0] * len(part.chunks(0))

    def push_for_ever(of):
        Actor(Part(keys, **shared, of=of), 0).push_for_ever(0, 1.0)

    for _ in range(20):
        before = survivor.pushes(0, 0)
        with child(part.name, push_for_ever):
            wait_until(lambda before=before: survivor.pushes(0, 0) > before + 1)
            time.sleep(generator.random() * 0.003)
        for index, chunk in enumerate(part.chunks(0)):
            own[index] += 1
            assert survivor.push(chunk, own[index], numbers(0, part.elements(chunk)))[0] == APPLIED
            pushes = survivor.pushes(chunk, 0)
            assert survivor.read(chunk)[2] == pushes + own[index]
            if not momentum:
                assert value_of(survivor, chunk) == pushes
            else:
                value_of(survivor, chunk)
    counted = {survivor.pushes(chunk, 0) for chunk in part.chunks(0)}
    assert max(counted) - min(counted) <= 1
    assert min(counted) > 20


def test_a_round_that_a_killed_process_was_closing_is_closed_once():
    keys, shared = [("float32", 200_000)], {"workers": 2, "synchronous": True, "shared": True}
    part, generator = Part(keys, **shared), random.Random(4)
    part.set_rule("test", "mxnet", "rescale_grad", 1.0)
    survivor = Actor(part, 1)

    def push_for_ever(of):
        Actor(Part(keys, **shared, of=of), 0).push_for_ever(0, 1.0)

    seq = 0
    for _ in range(20):
        with child(part.name, push_for_ever):
            end = time.monotonic() + 0.01 + generator.random() * 0.01
            while time.monotonic() < end:
                seq += 1
                for chunk in part.chunks(0):
                    values = numbers(10, part.elements(chunk))
                    push = functools.partial(survivor.push, chunk, seq, values)
                    wait_until(lambda push=push: push()[0] not in (BUSY, FULL))
        part.settle()
    back = Actor(part, 0)
    for _ in range(seq - back.fewest_pushes(0, 0)):
        lagging = back.fewest_pushes(0, 0) + 1
        for chunk in part.chunks(0):
            back.push(chunk, lagging, numbers(1, part.elements(chunk)))
    for chunk in part.chunks(0):
        assert part.closed(chunk) == seq
        assert value_of(survivor, chunk, seq) == 11 * seq


def test_a_wait_for_a_stopped_process_names_it():
    keys, shared = [("float32", 16384)], {"workers": 2, "shared": True}
    part = Part(keys, **shared)
    part.set_rule("test", "mxnet", "rescale_grad", 1.0)

    def push_for_ever(of):
        Actor(Part(keys, **shared, of=of), 1).push_for_ever(0, 1.0)

    actor = Actor(part, 0)
    with child(part.name, push_for_ever) as pid:
        wait_until(lambda: actor.pushes(0, 1) > 1)
        seq = 0
        while True:  # until it is stopped in the middle
            os.kill(pid, signal.SIGSTOP)
            if actor.push(0, seq + 1, numbers(0, 16384))[0] == BUSY:
                break
            seq += 1
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(RuntimeError, match=r"StalledError: worker 1 has been in the middle of an update"):
            part.settle(timeout_s=0.2)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: actor.push(0, seq + 1, numbers(0, 16384))[0] == APPLIED)


def test_a_process_that_was_stopped_in_an_update_and_the_one_in_its_place_keep_apart():
    """Each writes into memory that is not the other's, although both are worker 1."""
    keys, shared = [("float32", 16384), ("float32", 16384)], {"workers": 2, "shared": True}
    part = Part(keys, **shared)
    part.set_rule("test", "mxnet", "rescale_grad", 1.0)
    other = Actor(part, 0)

    def push_for_ever(of):
        Actor(Part(keys, **shared, of=of), 1).push_for_ever(0, 1.0)

    seq = 0
    for _ in range(5):
        with child(part.name, push_for_ever) as pid:
            before = other.pushes(0, 1)
            wait_until(lambda before=before: other.pushes(0, 1) > before + 1)
            while True:  # until it is stopped in the middle
                os.kill(pid, signal.SIGSTOP)
                if other.push(0, other.pushes(0, 0) + 1, numbers(0, 16384))[0] == BUSY:
                    break
                os.kill(pid, signal.SIGCONT)
            next_one = Actor(part, 1)
            for _ in range(3):
                seq += 1
                assert next_one.push(1, seq, numbers(5, 16384))[0] == APPLIED
            next_one.close()
            stopped_at = other.pushes(0, 1)
            os.kill(pid, signal.SIGCONT)
            wait_until(lambda stopped_at=stopped_at: other.pushes(0, 1) > stopped_at + 1)
        assert other.push(0, other.pushes(0, 0) + 1, numbers(0, 16384))[0] == APPLIED
        assert value_of(other, 0) == other.pushes(0, 1)
        assert value_of(other, 1) == 5 * seq
