"""Bits that do not follow from timing: stories with other delays (harness/stories.py) have the same results.

`python -m measure.bits --pairs 1000`, in test/, tells more of them.
"""

import random

import pytest
from harness.stories import differences, process_sets

import ringtrain as hvd

SOCKETS = {"RINGTRAIN_NETWORK": "sockets", "RINGTRAIN_SHARED_MEMORY": "off"}
MPI = {"RINGTRAIN_SHARED_MEMORY": "off"}


def check(pairs=3):
    """Tells pairs of stories of seeds that are drawn anew; a failure names them."""
    seeds = hvd.broadcast_object([random.randrange(1 << 30) for _ in range(pairs)])
    with process_sets() as sets:
        assert [difference for seed in seeds for difference in differences(seed, sets)] == []


@pytest.mark.fast
@pytest.mark.ranks(3, 4, env=SOCKETS)
def test_over_sockets():
    check()


@pytest.mark.ranks(5, 8, env=SOCKETS)
def test_among_many_ranks():
    check()


@pytest.mark.ranks(2, 3, 6, env=MPI)
def test_over_mpi():
    check()


@pytest.mark.ranks(3)
def test_in_shared_memory():
    check()


@pytest.mark.ranks(6, hosts=(2, 2, 2), timeout=120)
def test_between_hosts():
    check()


@pytest.mark.ranks(5, hosts=(2, 1, 2), timeout=120)
def test_between_uneven_hosts():
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
