"""Workers and servers of key-value stores: pushes, pulls, and what becomes of them when processes die or stop."""

import itertools
import os
import random
import signal
import time

import numpy as np
import pytest
from store_workers import require_success, run, running, store, view, wait_until

from ringtrain import _core

pytestmark = [pytest.mark.fast, pytest.mark.alike]

KEYS = [("float32", 40_000), ("float32", 10), ("float16", 20_000), ("float64", 9_000), ("int32", 50), ("float32", 1)]
FLOATS = [key for key in KEYS if key[0] != "int32"]
# whether each of two workers shares memory with the servers
WAYS = {"shared": (True, True), "tcp": (False, False), "mixed": (True, False)}


def arrays(keys, value):
    return [np.full(count, value, dtype) for dtype, count in keys]


def require_all(outs, value):
    assert all((out == value).all() for out in outs), [out[:3] for out in outs]


@pytest.mark.parametrize("way", WAYS)
def test_rounds_are_sums_of_all_workers(way):
    def body(worker):
        worker.make(KEYS)
        outs = arrays(KEYS, 0)
        for number in range(1, 20):
            worker.push_pull(arrays(KEYS, number + worker.number), outs)
            require_all(outs, 2 * number + 1)
        for number in range(3):
            worker.push(*arrays(KEYS, number + 5 * worker.number))
        worker.pull(*outs)
        require_all(outs, 9)

    with store(2, synchronous=True) as workers:
        run(workers, body, WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_no_asynchronous_push_is_lost_or_counted_twice(way):
    def body(worker):
        worker.make(FLOATS)
        worker.set_rule("test", rescale_grad=1.0)
        outs, generator = arrays(FLOATS, 0), random.Random(worker.number)
        for _ in range(30):
            if generator.random() < 0.5:
                worker.push_pull(arrays(FLOATS, 1), outs)
            else:
                worker.push(*arrays(FLOATS, 1))
        worker.barrier(3)
        worker.pull(*outs)
        require_all(outs, 60)
        ids = list(range(len(FLOATS)))
        assert worker.client.read_num_updates(0, ids) == [60] * len(FLOATS)

    with store(2) as workers:
        run(workers, body, WAYS[way])


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "tcp"])
def test_states_are_read_and_written(shares):
    def body(worker):
        worker.make(FLOATS)
        worker.set_rule("sgd", momentum=0.5)
        ids = list(range(len(FLOATS)))
        client, rates = worker.client, [(1.0, 0.0)] * len(FLOATS)
        grads = arrays(FLOATS, 2)
        worker.wait(client.push(0, ids, [view(grad) for grad in grads], rates, 0, True))
        for id, (dtype, count) in enumerate(FLOATS):
            state = np.zeros(count, "float64" if dtype == "float64" else "float32")
            client.read_state(0, id, "momentum", view(state))
            assert (state == -2).all()
            state[:] = 8
            client.write_state(0, id, "momentum", view(state))
        client.write_num_updates(0, ids, [7] * len(ids))
        worker.wait(client.push(0, ids, [view(grad) for grad in grads], rates, 0, True))
        outs = arrays(FLOATS, 0)
        worker.pull(*outs)
        require_all(outs, -2 + (8 * 0.5 - 2))
        assert client.read_num_updates(0, ids) == [8] * len(ids)
        with pytest.raises(ValueError, match='remembers no "nonsense"'):
            client.read_state(0, 0, "nonsense", view(outs[0]))

    with store(1) as workers:
        run(workers, body, [shares])


def test_arrays_that_do_not_fit_are_refused_on_the_callers_line():
    def body(worker):
        worker.make(KEYS)
        for array, text in ((np.zeros(3, "float32"), "has 10 elements"), (np.zeros(10, "int32"), "is float32")):
            with pytest.raises(ValueError, match=text):
                worker.push(array, first=1)
        with pytest.raises(ValueError, match="no key number 99"):
            worker.pull(np.zeros(3, "float32"), first=99)
        worker.push(np.full(10, 3, "float32"), first=1)  # which has cost no number
        out = np.zeros(10, "float32")
        worker.pull(out, first=1)
        require_all([out], 3)

    with store(1, synchronous=True) as workers:
        run(workers, body)


def test_a_worker_that_has_not_pushed_is_named():
    def body(worker):
        worker.make([("float32", 10)])
        if worker.number == 0:
            handle = worker.client.push_pull(
                0, [0], [view(np.ones(10, "float32"))], [view(np.ones(10, "float32"))], [], 0
            )
            assert not handle.wait(0.05)
            assert not handle.is_memory_free()
            assert handle.missing() == 'key "key 0": worker 1 has pushed it 0 times, worker 0 1 times'
        worker.barrier(3)
        if worker.number == 1:
            worker.push(np.ones(10, "float32"))
        else:
            worker.wait(handle)
            assert handle.is_memory_free()

    with store(2, synchronous=True) as workers:
        run(workers, body)


def test_a_worker_too_far_ahead_waits_and_the_message_names_the_slow_one():
    def body(worker):
        worker.make([("float32", 10)])
        if worker.number == 0:
            with pytest.raises(
                _core.StalledError, match=r'no room for more of key "key 0".*worker 1 has pushed it 0 times'
            ):
                for _ in range(300):
                    worker.push(np.ones(10, "float32"))
        worker.barrier(3)
        out = np.zeros(10, "float32")
        for number in range(300):  # and nothing of what was pushed is lost
            if worker.number == 1 or number > 255:
                worker.push(np.ones(10, "float32"))
        worker.pull(out)
        require_all([out], 2)

    # who is behind may be so for 20 times as long; a server that is slow to answer is another matter
    with store(2, synchronous=True, timeout_s=0.05, return_s=20.0) as workers:
        run(workers, body)


@pytest.mark.parametrize("way", ["shared", "tcp"])
def test_rounds_fail_when_a_worker_is_lost_and_nothing_else_does(way):
    def body(worker):
        worker.make([("float32", 20_000)])
        ones, out = np.ones(20_000, "float32"), np.zeros(20_000, "float32")
        handle = worker.client.push_pull(0, [0], [view(ones)], [view(out)], [], 0)
        worker.client.lost(1, "worker 1 (host a, pid 1) is gone")
        for _ in range(2):
            with pytest.raises(_core.PeerLostError, match=r"worker 1 \(host a, pid 1\) is gone"):
                worker.wait(handle)
        with pytest.raises(_core.PeerLostError, match="worker 1"):
            worker.push(ones)
        # another store does not wait for anybody
        worker.client.open(1, False, None)
        key = _core.StoreKey(0, "other", _core.DTYPES["float32"], 5, [(0, 0, 5)])
        worker.client.create_keys(1, [key], [view(np.zeros(5, "float32"))])
        worker.client.set_rule(1, "test", "mxnet", {"rescale_grad": 1.0}, 0, False, True)
        small = np.ones(5, "float32")
        worker.wait(worker.client.push_pull(1, [0], [view(small)], [view(small)], [], 0))
        require_all([small], 1)

    with store(2, synchronous=True) as workers:
        workers.board[1] = 9  # the other one comes to no barrier
        pid = workers.start(0, body, WAYS[way][0])
        with running([pid]):
            require_success(pid)


@pytest.mark.parametrize("shared", [(0, 1), (), (0,), (1,)], ids=["shared", "tcp", "shared with one", "and the other"])
def test_a_worker_that_is_killed_comes_back_and_every_push_counts_once(shared):
    keys = [("float64", 102_400), ("float64", 90)]  # of both servers, and of the second one
    most = 1_000_000  # pushes of the mortal worker, which are told apart from those of the steady one
    stopped, back_at = 0, (1, 3, 4)  # of each server's part of a key

    def parts(of_keys):
        """Returns the part that each server has of each key, which is whole there."""
        large, small = of_keys
        return [*np.split(large, 2), small]

    def steady(worker):
        worker.make(keys)
        worker.set_rule("test", rescale_grad=1.0)
        own = 0
        while not worker._workers.board[4 + stopped]:
            worker.push(*arrays(keys, most))
            own += 1
        out = arrays(keys, 0)
        worker.pull(*out)
        for value, place in zip(parts(out), back_at, strict=True):
            require_all([value], worker._workers.board[4 + place] + most * own)

    def mortal(worker, is_back):
        worker.make(keys, is_back)
        if not is_back:
            worker.barrier(2)
        for number in range(1, most):
            worker.push(*arrays(keys, 1))
            worker.tell(2, number)

    def last(worker):
        worker.make(keys, is_back=True)
        out = arrays(keys, 0)
        worker.push(*arrays(keys, 1))
        worker.pull(*out)
        for value, place in zip(parts(out), back_at, strict=True):
            counted = value % most
            assert (counted == counted[0]).all()
            worker.tell(place, int(counted[0]))
        worker.tell(stopped, 1)

    with store(2, shares_memory=shared) as workers:
        generator = random.Random(5)
        survivor = workers.start(0, steady)
        pids = [survivor]
        with running(pids):
            completed = 0
            for life in range(8):
                workers.board[6] = 0
                pids.append(workers.start(1, lambda worker, life=life: mortal(worker, life > 0), term=life))
                wait_until(lambda: workers.board[6] > 2)
                time.sleep(generator.random() * 0.02)
                os.kill(pids[-1], signal.SIGKILL)
                os.waitpid(pids.pop(), 0)
                completed += workers.board[6]
                workers.lose(1, life + 1)
            pids.append(workers.start(1, last, term=8))
            require_success(*pids)
            # of each life, one more than it knows of may have been counted
            for place in back_at:
                assert completed + 1 <= workers.board[4 + place] <= completed + 8 + 1


def test_a_worker_stopped_in_an_update_is_named():
    def body(worker):
        worker.make([("float32", 16_000)])
        worker.set_rule("test", rescale_grad=1.0)
        ones = np.ones(16_000, "float32")
        if worker.number == 1:
            while True:
                worker.push(ones)
        end = time.monotonic() + 20
        with pytest.raises(_core.StalledError, match="worker 1 has been in the middle of an update"):
            for count in itertools.count(1):
                worker.tell(1, count)
                worker.push(ones)
                assert time.monotonic() < end
        worker.tell(0, 1)

    with store(2, servers=1, timeout_s=0.3, return_s=20.0) as workers:
        pids = [workers.start(number, body) for number in range(2)]
        with running(pids):
            wait_until(lambda: workers.board[5] > 0)
            end = time.monotonic() + 20
            while not workers.board[4] and time.monotonic() < end:
                os.kill(pids[1], signal.SIGSTOP)
                time.sleep(0.1)
                seen = workers.board[5]
                time.sleep(0.2)
                # the other one waits for it: that it comes to its end may take long on a busy machine
                while workers.board[5] == seen and not workers.board[4] and time.monotonic() < end:
                    time.sleep(0.01)
                os.kill(pids[1], signal.SIGCONT)
                time.sleep(0.01)
            require_success(pids[0])
