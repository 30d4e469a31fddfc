"""Sums of float32 that travel between hosts in 16 bits, against a model in NumPy, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
from harness.exact import require_equal

import ringtrain as hvd

# Below ring_from_kb; one block; several blocks and slices, none of them full.
SMALL, COUNTS = 1000, [100_000, 1_000_003]
STEPS = 2


def arrays_of_all(seed, count):
    """Those of all ranks, the same wherever this is called. A host adds them up without rounding."""
    numbers = np.random.default_rng(seed).integers(-(1 << 12), 1 << 12, (hvd.size(), count))
    return list((numbers / 64).astype("f4"))


def model(hosts, dtype, arrays, factor=1.0):
    """The sum of each host is rounded, and the sum of those."""
    total, first = np.zeros_like(arrays[0]), 0
    for ranks in hosts:
        total += sum(arrays[first : first + ranks]).astype(dtype).astype("f4")
        first += ranks
    return (total * np.float32(factor)).astype(dtype).astype("f4")


def check(hosts, dtype):
    for step in range(STEPS):
        for count in COUNTS:
            arrays = arrays_of_all(100 * step + count, count)
            own = arrays[hvd.rank()]
            result = hvd.allreduce(own, op=hvd.Sum, name=f"sum.{count}")
            require_equal(result, model(hosts, dtype, arrays))
            assert np.array_equal(own, arrays_of_all(100 * step + count, count)[hvd.rank()])
            assert not np.array_equal(result, sum(arrays))  # 16 bits do not hold them
            expected = model(hosts, dtype, arrays, 0.5 / hvd.size())
            assert hvd.allreduce_(own, name=f"average.{count}", prescale_factor=0.5) is own
            require_equal(own, expected)


def check_what_is_sent_as_it_is():
    small = arrays_of_all(1, SMALL)
    require_equal(hvd.allreduce(small[hvd.rank()], op=hvd.Sum, name="small"), sum(small))
    arrays = arrays_of_all(2, COUNTS[0])
    require_equal(hvd.allreduce(arrays[hvd.rank()], op=hvd.Max, name="max"), np.max(arrays, axis=0))
    doubles = [one.astype("f8") for one in arrays]
    require_equal(hvd.allreduce(doubles[hvd.rank()], op=hvd.Sum, name="doubles"), sum(doubles))
    require_equal(hvd.reducescatter(arrays[0], op=hvd.Sum, name="scattered")[:1], arrays[0][_first_row()] * hvd.size())


def _first_row():
    rows, more = divmod(COUNTS[0], hvd.size())
    begin = hvd.rank() * rows + min(hvd.rank(), more)
    return slice(begin, begin + 1)


@pytest.mark.ranks(2, 3, env={"RINGTRAIN_SHARED_MEMORY": "off", "RINGTRAIN_WIRE_FORMAT": "bf16"})
def test_ranks_that_share_no_memory_send_bfloat16():
    check((1,) * hvd.size(), ml_dtypes.bfloat16)
    check_what_is_sent_as_it_is()


@pytest.mark.fast
@pytest.mark.ranks(2, env={"RINGTRAIN_SHARED_MEMORY": "off", "RINGTRAIN_WIRE_FORMAT": "fp16"})
def test_ranks_that_share_no_memory_send_float16():
    check((1, 1), np.float16)


@pytest.mark.ranks(4, hosts=(2, 2), timeout=120, env={"RINGTRAIN_WIRE_FORMAT": "bf16"})
def test_hosts_of_several_ranks_round_their_sums_once():
    check((2, 2), ml_dtypes.bfloat16)
    check_what_is_sent_as_it_is()


@pytest.mark.ranks(3, hosts=(2, 1), timeout=120, env={"RINGTRAIN_WIRE_FORMAT": "fp16"})
def test_a_lane_sends_what_two_ranks_have():
    check((2, 1), np.float16)


@pytest.mark.ranks(2, env={"RINGTRAIN_WIRE_FORMAT": "bf16"})
def test_nothing_is_rounded_on_one_host():
    arrays = arrays_of_all(1, COUNTS[0])
    require_equal(hvd.allreduce(arrays[hvd.rank()], op=hvd.Sum, name="x"), sum(arrays))


@pytest.mark.ranks(2, env={"RINGTRAIN_SHARED_MEMORY": "off", "RINGTRAIN_WIRE_FORMAT": "fp16"})
def test_values_beyond_float16_are_infinite():
    huge = np.full(100_000, 40_000, "f4")
    assert np.isinf(hvd.allreduce(huge, op=hvd.Sum, name="sum")).all()
    require_equal(hvd.allreduce(huge, name="average"), huge.astype("f2").astype("f4"))
