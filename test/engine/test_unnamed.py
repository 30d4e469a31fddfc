"""Operations without a name that repeat are matched by their order."""

import numpy as np
import pytest

import ringtrain as hvd

NAMES = 240  # which operations without a name take in turn


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
def test_operations_without_a_name_that_repeat_in_turn_are_known_from_the_cache(count):
    def step():
        for length in range(1, count + 1):
            hvd.allreduce(np.zeros(length))

    for _ in range(NAMES // count + 1):
        step()
    hvd.allreduce(0.0, name="unnamed: all are known")
    before = hvd.metrics()["cache_misses"]
    hvd.allreduce(0.0, name="unnamed: all are known")
    for _ in range(NAMES // count + 1):
        step()
    assert hvd.metrics()["cache_misses"] == before
