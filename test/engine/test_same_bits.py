"""Bits that do not follow from timing: stories with other delays (harness/stories.py) have the same results.

`python -m measure.bits --pairs 1000`, in test/, tells more of them.
"""

import random
import time

import numpy as np
import pytest
from harness.stories import differences, process_sets

import ringtrain as hvd
from ringtrain import kvstore, optim

SOCKETS = {"RINGTRAIN_NETWORK": "sockets", "RINGTRAIN_SHARED_MEMORY": "off"}
MPI = {"RINGTRAIN_SHARED_MEMORY": "off"}


def check(pairs=3):
    """Tells pairs of stories of seeds that are drawn anew; a failure names them."""
    seeds = hvd.broadcast_object([random.randrange(1 << 30) for _ in range(pairs)])
    with process_sets() as sets:
        assert [difference for seed in seeds for difference in differences(seed, sets)] == []


@pytest.mark.ranks(3, 4, env=SOCKETS, fast=True, way="sockets")
@pytest.mark.ranks(5, 8, env=SOCKETS, slow=True, way="sockets")
@pytest.mark.ranks(2, 3, 6, env=MPI, slow=True, way="mpi")
@pytest.mark.ranks(3, way="shared memory")
@pytest.mark.ranks(6, hosts=(2, 2, 2), timeout=120, slow=True)
@pytest.mark.ranks(5, hosts=(2, 1, 2), timeout=120, slow=True)
def test_a_story_has_the_same_bits_with_other_delays():
    check()


@pytest.mark.parametrize("wire_format", ["fp16", "bf16"])
@pytest.mark.ranks(3, env=SOCKETS, initialised=False)
def test_with_a_wire_format(wire_format):
    hvd.init(wire_format=wire_format)
    check()


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
@pytest.mark.ranks(3, 4, env=SOCKETS, initialised=False)
def test_with_a_chosen_algorithm(algorithm):
    hvd.init(allreduce_algorithm=algorithm)
    check()


@pytest.mark.ranks(3, env=SOCKETS, initialised=False)
def test_while_autotune_tries_sizes():
    hvd.init(autotune=True)
    check(6)


SHAPES = [(300, 20), (64,), (2000, 150), (5,), (700, 90), (400_001,)]


def gradients_of(step):
    draw = np.random.default_rng([step, hvd.rank()])
    return [draw.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def optimizer_of(way, weights):
    inner = optim.SGD(lr=0.1)
    if way == "DiLoCo":
        return hvd.DiLoCo(inner, weights, 2, islands="rank")
    compression = hvd.Compression.powersgd(2) if way == "PowerSGD" else hvd.Compression.none
    return hvd.DistributedOptimizer(inner, compression=compression)


@pytest.mark.parametrize("way", ["plain", "PowerSGD", "DiLoCo"])
@pytest.mark.ranks(3, env=SOCKETS)
def test_trainings_repeat(way):
    ends = []
    for story in range(2):
        weights = [np.zeros(shape, np.float32) for shape in SHAPES]
        optimizer, delays = optimizer_of(way, weights), np.random.default_rng([story, hvd.rank()])
        for step in range(6):
            time.sleep(delays.random() * 0.01)
            optimizer.step(weights, gradients_of(step))
        if way == "DiLoCo":
            hvd.remove_process_set(optimizer._local_steps.islands.of_rank)
        else:
            hvd.check_replicas(weights)
        ends.append(weights)
    assert all(np.array_equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.ranks(3, env=SOCKETS)
def test_stores_repeat():
    ends = []
    for story in range(2):
        store, delays = kvstore.create("dist_sync"), np.random.default_rng([story, hvd.rank()])
        keys, weights = list(range(len(SHAPES))), [np.zeros(shape, np.float32) for shape in SHAPES]
        store.init(keys, weights)
        for step in range(4):
            gradients = gradients_of(step)
            for key in delays.permutation(keys).tolist():
                time.sleep(delays.random() * 0.004)
                store.push(key, gradients[key])
            store.pull(keys, out=weights)
        ends.append(weights)
    assert all(np.array_equal(one, other) for one, other in zip(*ends, strict=True))
