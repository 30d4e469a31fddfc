"""Lanes: the operations of a process set need its own ranks only, whatever those of other sets do."""

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
    before = hvd.metrics()["rounds_on_node"]
    hvd.allreduce(np.ones(2), name="of all")
    assert hvd.metrics()["rounds_on_node"] == before


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


def remove(*sets):
    hvd.barrier()
    for one in sets:
        hvd.remove_process_set(one)


def drawn_sets(random, ranks):
    """Process sets that overlap, as many as ranks (three ranks have no more pairs)."""
    sets = []
    while len(sets) < ranks:
        members = sorted(random.choice(ranks, random.integers(2, ranks), replace=False).tolist())
        if all(members != one.ranks for one in sets):
            sets.append(hvd.add_process_set(members))
    return sets


@pytest.mark.ranks(3, 4)
@pytest.mark.ranks(4, hosts=(2, 2))
@pytest.mark.ranks(
    4, hosts=(1, 3), env={"RINGTRAIN_SHARED_MEMORY": "off", "RINGTRAIN_NETWORK": "sockets"}, way="sockets"
)
@pytest.mark.parametrize("seed", range(3))
def test_operations_of_overlapping_sets_are_right_in_any_order(seed):
    common, own = np.random.default_rng(seed), np.random.default_rng([seed, hvd.rank()])
    sets = [hvd.global_process_set, *drawn_sets(common, hvd.size())]
    for step in range(8):
        calls = []
        for number in range(12):
            which, count = sets[common.integers(len(sets))], int(common.choice([1, 8, 3000, 40000]))
            if which.included():
                calls.append((which, count, f"{number % 5} of {count}.{number}"))
        handles = []
        for call in own.permutation(len(calls)):
            which, count, name = calls[call]
            values = np.full(count, float(hvd.rank() + step))
            handles.append((hvd.allreduce_async(values, op=hvd.Sum, name=name, process_set=which), which, count))
        for place in own.permutation(len(handles)):
            handle, which, count = handles[place]
            ranks = which.ranks or range(hvd.size())
            require_equal(hvd.synchronize(handle), np.full(count, float(sum(ranks) + len(ranks) * step)))
    remove(*sets[1:])


@pytest.mark.ranks(3)
@pytest.mark.ranks(3, hosts=(1, 2))
def test_a_deadlock_that_leads_over_three_sets_is_told_and_all_go_on():
    sets = [hvd.add_process_set(members) for members in ([0, 1], [1, 2], [0, 2])]
    one, other = [(sets[2], sets[0]), (sets[0], sets[1]), (sets[1], sets[2])][hvd.rank()]
    for again in range(2):
        with pytest.raises(hvd.DeadlockError) as error:
            for which in (one, other):
                hvd.allreduce(np.ones(3), name=f"of {which.process_set_id}", process_set=which)
        for which in sets:
            assert f'"of {which.process_set_id}"' in str(error.value), again
        for which in sets:
            if which.included():
                total = hvd.allreduce(np.full(3, hvd.rank()), op=hvd.Sum, name="after", process_set=which)
                require_equal(total, np.full(3, sum(which.ranks)))
    remove(*sets)


@pytest.mark.ranks(3, hosts=(1, 2))
def test_a_mismatch_in_a_set_names_ranks_of_the_job():
    pair = hvd.add_process_set([1, 2])
    if pair.included():
        with pytest.raises(hvd.MismatchError, match=r"rank 1 sent float64\[3\], rank 2 sent float64\[4\]"):
            hvd.allreduce(np.ones(2 + hvd.rank()), name="uneven", process_set=pair)
        require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum, name="even", process_set=pair), np.full(2, 2.0))
    require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum, name="of all"), np.full(2, float(hvd.size())))
    remove(pair)


@pytest.mark.ranks(3)
def test_a_pair_goes_on_while_a_rank_outside_is_stopped():
    pair = hvd.add_process_set([0, 1])
    pids = hvd.allgather(np.array([os.getpid()])).tolist()
    if pair.included():
        hvd.barrier(process_set=pair)
        with stopped(pids[2:] if hvd.rank() == 0 else []):
            hvd.barrier(process_set=pair)
            for step in range(STEPS):
                values = np.full(40, float(step + hvd.rank()))
                require_equal(
                    hvd.allreduce(values, op=hvd.Sum, name="inner", process_set=pair), np.full(40, 2.0 * step + 1)
                )
            hvd.barrier(process_set=pair)
    remove(pair)


@pytest.mark.ranks(4)
def test_threads_work_in_sets_of_their_own_at_the_same_time():
    sets = [hvd.add_process_set(members) for members in ([0, 1, 2], [1, 2, 3], [0, 3])]
    wrong = []

    def work(which):
        for step in range(STEPS):
            values = np.full(7, float(step * hvd.rank()))
            total = hvd.allreduce(values, op=hvd.Sum, name="own", process_set=which)
            if total.tolist() != 7 * [float(step * sum(which.ranks))]:
                wrong.append((which.ranks, step))

    threads = [threading.Thread(target=work, args=[one]) for one in sets if one.included()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    remove(*sets)


@pytest.mark.ranks(2, 3)
def test_two_hundred_idle_sets_cost_one_thread():
    before = len(os.listdir("/proc/self/task"))
    sets = [hvd.new_group([0, 1]) if hvd.rank() < 2 else None for _ in range(200)]
    hvd.barrier()
    assert len(os.listdir("/proc/self/task")) <= before + 1
    for one in sets:
        if one is not None:
            hvd.remove_process_set(one)


@pytest.mark.ranks(4, hosts=(2, 2), env={"RINGTRAIN_CACHE_CAPACITY": "8"})
def test_names_of_all_ranks_that_come_once_leave_operations_of_a_host_in_the_cache():
    with group_of_own_host() as group:
        before = hvd.metrics()["cache_misses"]
        for step in range(30):
            hvd.allreduce(np.ones(2), name=f"once{step}")
            sum_inside(group, step)
        assert hvd.metrics()["cache_misses"] - before == 30
