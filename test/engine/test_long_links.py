"""Links of a millisecond and more: while operations wait, the next round begins at the end of one under way."""

import random
import time

import numpy as np
import pytest
from harness.exact import require_equal

import ringtrain as hvd

# Plans of 1 MB, so that many wait.
LONG = {"RINGTRAIN_LINK_HOP_US": "5000", "RINGTRAIN_FUSION_THRESHOLD_MB": "1"}
APART = {"RINGTRAIN_SHARED_MEMORY": "off"}
STEPS = 8
LONG_ELEMENTS = 200_000


def draw_operation(draw, number):
    """One of the world that all ranks submit, and what comes out. Small ones travel with the words of a round."""
    elements = draw.choice((1, 100, 10_000, LONG_ELEMENTS))
    own = np.arange(elements, dtype=np.int64) + hvd.rank()
    name, priority = f"drawn {number % 9} of {elements}", draw.randrange(3)
    kind = draw.choice(("allreduce", "allreduce", "allgather", "broadcast"))
    if kind == "allreduce":
        expected = np.arange(elements, dtype=np.int64) * hvd.size() + sum(range(hvd.size()))
        return lambda: hvd.allreduce_async(own, op=hvd.Sum, name=name, priority=priority), expected
    if kind == "allgather":
        expected = np.concatenate([np.arange(elements, dtype=np.int64) + rank for rank in range(hvd.size())])
        return lambda: hvd.allgather_async(own, name=name), expected
    root = draw.randrange(hvd.size())
    expected = np.arange(elements, dtype=np.int64) + root
    return lambda: hvd.broadcast_async(own, root, name=name, priority=priority), expected


def require_drawn_steps(seed):
    """Every rank draws the same operations, and when it submits them by itself."""
    alike, own = random.Random(seed), random.Random(1000 * seed + hvd.rank())
    for _ in range(STEPS):
        operations = [draw_operation(alike, number) for number in range(alike.randrange(4, 10))]
        own.shuffle(operations)
        handles = []
        for submit, expected in operations:
            time.sleep(own.choice((0, 0, 0.001, 0.01)))
            handles.append((submit(), expected))
        for handle, expected in handles:
            require_equal(hvd.synchronize(handle), expected)


@pytest.mark.ranks(2, 4, env={**APART, **LONG})
@pytest.mark.parametrize("seed", range(2))
def test_operations_that_are_submitted_at_any_time_are_exact(seed):
    require_drawn_steps(seed)


@pytest.mark.ranks(4, hosts=(1, 3), env=LONG)
@pytest.mark.ranks(4, hosts=(2, 2), env=LONG)
@pytest.mark.parametrize("seed", range(2))
def test_operations_between_hosts_of_several_ranks_are_exact(seed):
    require_drawn_steps(seed)


@pytest.mark.ranks(4, hosts=(2, 2), env=LONG)
def test_a_group_across_hosts_and_the_world_go_on_at_the_same_time():
    pair = hvd.new_group([hvd.rank() % 2, hvd.rank() % 2 + 2])
    long = np.full(LONG_ELEMENTS, hvd.rank(), np.int64)
    for _ in range(STEPS):
        of_pair = [hvd.allreduce_async(long, op=hvd.Sum, name=f"of pair {i}", process_set=pair) for i in range(2)]
        of_all = hvd.allreduce_async(long, op=hvd.Sum, name="of all")
        for handle in of_pair:
            require_equal(hvd.synchronize(handle), np.full(LONG_ELEMENTS, sum(pair.ranks), np.int64))
        require_equal(hvd.synchronize(of_all), np.full(LONG_ELEMENTS, 6, np.int64))
    hvd.barrier()
    hvd.remove_process_set(pair)


@pytest.mark.ranks(4, hosts=(1, 3), env=LONG)
@pytest.mark.ranks(4, hosts=(2, 2), env={"RINGTRAIN_LINK_HOP_US": "30000"})
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int32], ids=lambda dtype: dtype.__name__)
def test_long_arrays_are_exact_in_few_blocks(dtype):
    for elements in (LONG_ELEMENTS, 5 * LONG_ELEMENTS + 7):
        values = (np.arange(elements) % 100 + hvd.rank()).astype(dtype)
        expected = 4 * (np.arange(elements) % 100) + sum(range(4))
        require_equal(hvd.allreduce(values, op=hvd.Sum), expected.astype(dtype))
