"""Rounds of the negotiation that end on a node: operations of ranks of one host need no other host."""

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest
from harness.exact import require_equal

import ringtrain as hvd

STEPS = 50


@contextlib.contextmanager
def group_of_own_host():
    """The process set of the ranks of this host. Its operations "inner" and "other" are known to all ranks."""
    host = hvd.rank() // 2
    group = hvd.new_group([2 * host, 2 * host + 1])
    for name in ("inner", "other"):
        hvd.allreduce(np.ones(3), name=name, process_set=group)
    hvd.barrier()
    yield group
    hvd.barrier()
    hvd.remove_process_set(group)


def sum_inside(group, step, name="inner"):
    values = np.full(3, float(step + hvd.rank()))
    result = hvd.allreduce(values, op=hvd.Average, name=name, process_set=group)
    require_equal(result, np.full(3, step + sum(group.ranks) / 2))


def rounds_with_other_hosts():
    metrics = hvd.metrics()
    return metrics["rounds"] - metrics["rounds_on_node"]


@pytest.mark.ranks(4, hosts=(2, 2))
def test_repeated_operations_of_a_host_take_no_round_with_other_hosts():
    with group_of_own_host() as group:
        before, on_node = rounds_with_other_hosts(), hvd.metrics()["rounds_on_node"]
        for step in range(STEPS):
            sum_inside(group, step)
        # A busy machine may make a rank look for a deadlock, which takes a round of all.
        assert rounds_with_other_hosts() - before < STEPS // 5
        assert hvd.metrics()["rounds_on_node"] - on_node >= STEPS


@pytest.mark.ranks(2, 3)
def test_on_one_host_all_rounds_are_of_all_ranks():
    hvd.allreduce(np.ones(2), name="of all")
    assert hvd.metrics()["rounds_on_node"] == 0


@contextlib.contextmanager
def stopped(pids):
    """At most for 20 s, so that a rank that needs these goes on then."""

    def send(number):
        for pid in pids:
            os.kill(pid, number)

    resume = threading.Timer(20, send, [signal.SIGCONT])
    send(signal.SIGSTOP)
    resume.start()
    try:
        yield
    finally:
        resume.cancel()
        send(signal.SIGCONT)


@pytest.mark.ranks(4, hosts=(2, 2))
def test_a_host_goes_on_while_another_one_is_stopped():
    with group_of_own_host() as group:
        pids = hvd.allgather(np.array([os.getpid()]))
        if hvd.rank() < 2:
            time.sleep(0.3)  # the other host has announced its barrier, and is not blocked for a second yet
            others = pids[2:].tolist() if hvd.rank() == 0 else []
            with stopped(others):
                began = time.monotonic()
                for step in range(STEPS):
                    sum_inside(group, step)
                assert time.monotonic() - began < 10


@pytest.mark.ranks(4, hosts=(2, 2))
def test_operations_of_hosts_and_of_all_ranks_mix_in_any_order():
    with group_of_own_host() as group:
        random = np.random.default_rng(hvd.rank() // 2)  # the hosts do different things between operations of all
        for step in range(STEPS):
            inner = [
                hvd.allreduce_async(np.full(3, float(i)), op=hvd.Sum, name=name, process_set=group)
                for i, name in enumerate(("inner", "other"))
            ]
            outer = [hvd.allreduce_async(np.full(5, i + 1.0), op=hvd.Sum, name=f"outer{i}") for i in range(3)]
            for i, handle in enumerate(inner):
                require_equal(hvd.synchronize(handle), np.full(3, 2.0 * i))
            for again in range(random.integers(0, 4)):
                sum_inside(group, step + again)
            for i, handle in enumerate(outer):
                require_equal(hvd.synchronize(handle), np.full(5, 4.0 * (i + 1)))


@pytest.mark.ranks(4, hosts=(2, 2), env={"RINGTRAIN_CACHE_CAPACITY": "8"})
def test_names_of_all_ranks_that_come_once_leave_operations_of_a_host_in_the_cache():
    with group_of_own_host() as group:
        before = hvd.metrics()["cache_misses"]
        for step in range(30):
            hvd.allreduce(np.ones(2), name=f"once{step}")
            sum_inside(group, step)
        assert hvd.metrics()["cache_misses"] - before == 30
