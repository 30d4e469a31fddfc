"""Halving and doubling in blocks, for any number of ranks: exact results, what arrays of 16 bits keep, and a death."""

import math
import os

import ml_dtypes
import numpy as np
import pytest
from harness.exact import DTYPE_OF_EACH_SIZE, DTYPES, data, data_of_ranks, reference, require_equal
from harness.faults import require_clean_end, require_error, run, victim
from measure.faults.injection import kill, stop

import ringtrain as hvd
from ringtrain import _core

# Messages of 1 KB: a short array has many chunks, and some of them hold the end of a block and its beginning. Hops that
# take no time leave halving for all sizes from three ranks on.
HALVING = {
    "RINGTRAIN_NETWORK": "sockets",
    "RINGTRAIN_SHARED_MEMORY": "off",
    "RINGTRAIN_ALLREDUCE_ALGORITHM": "doubling",
    "RINGTRAIN_RING_CHUNK_KB": "1",
    "RINGTRAIN_LINK_HOP_US": "0.1",
    "RINGTRAIN_LINK_GBIT": "0.001",
}
AUTO = {"RINGTRAIN_NETWORK": "sockets", "RINGTRAIN_SHARED_MEMORY": "off"}
# Shorter than there are ranks, slices of a cache line and a bit, one block, several.
COUNTS = [1, 3, 65, 1000, 5003, 40_001]
OPS = {"sum": hvd.Sum, "average": hvd.Average, "max": hvd.Max, "product": hvd.Product}


@pytest.mark.ranks(2, 3, 5, 8, env=HALVING, fast=True, dtypes=DTYPE_OF_EACH_SIZE)
@pytest.mark.ranks(7, env=HALVING, dtypes=DTYPES)
def test_sums_and_moves_by_halving_are_exact(dtype):
    dtype = np.dtype(dtype)
    for op, of_hvd in OPS.items():
        if op == "average" and (dtype.kind == "b" or hvd.size() not in (2, 3)):  # not exact
            continue
        for count in COUNTS if op == "sum" else COUNTS[:4]:
            arrays = data_of_ranks(hvd.size(), (count,), dtype, op=op)
            mine, expected = arrays[hvd.rank()], reference(op, arrays)
            before = mine.copy()
            require_equal(hvd.allreduce(mine, op=of_hvd, name=f"{op}{count}"), expected)
            require_equal(mine, before)
            hvd.allreduce_(mine, op=of_hvd, name=f"{op}{count} in place")
            require_equal(mine, expected)
    for count in COUNTS:
        arrays = data_of_ranks(hvd.size(), (count,), dtype)
        summed = np.array_split(reference("sum", arrays), hvd.size())[hvd.rank()]
        require_equal(hvd.reducescatter(arrays[hvd.rank()], op=hvd.Sum, name=f"scattered{count}"), summed)
        uneven = [data(rank, (count * rank % 1777,), dtype) for rank in range(hvd.size())]
        require_equal(hvd.allgather(uneven[hvd.rank()], name=f"gathered{count}"), np.concatenate(uneven))


@pytest.mark.ranks(2, 3, 5, 8, env=AUTO)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_around_the_sizes_where_the_algorithm_changes(dtype):
    sizes = sorted({size for size in _sizes_around_changes(hvd.size(), np.dtype(dtype).itemsize) if size < 6 << 20})
    assert len(sizes) >= 2
    for size in sizes:
        count = size // np.dtype(dtype).itemsize
        arrays = data_of_ranks(hvd.size(), (count,), dtype)
        require_equal(hvd.allreduce(arrays[hvd.rank()], op=hvd.Sum, name=f"{size}"), reference("sum", arrays))


def _way(ranks, size, element_bytes=4, hop_s=50e-6, bytes_per_s=1.25e9):
    return _core.predict_allreduce("auto", ranks, size, hop_s, bytes_per_s, element_bytes)


def _sizes_around_changes(ranks, element_bytes):
    sizes = [4 << 10]
    for size in range(4 << 10, 8 << 20, 4 << 10):
        if _way(ranks, size, element_bytes)[0] != _way(ranks, sizes[-1], element_bytes)[0]:
            sizes += [size - element_bytes, size]
    return sizes


@pytest.mark.ranks(3, 5, env=HALVING)
@pytest.mark.parametrize("dtype", ["float64", "float16", "int8"])
def test_many_arrays_at_once_by_halving(dtype):
    shapes = [(3,), (1 << 20,), (0,), (70_001,), (300_007, 2), (1,)]
    mine = [data(hvd.rank(), shape, dtype, seed=i) for i, shape in enumerate(shapes)]
    for i, result in enumerate(hvd.grouped_allreduce(mine, op=hvd.Sum)):
        require_equal(result, reference("sum", data_of_ranks(hvd.size(), shapes[i], dtype, seed=i)))


# --- 16-bit floats ----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3, 5, 8, env=HALVING)
@pytest.mark.parametrize("count", [7, 5003])
def test_sums_of_16_bit_floats_do_not_overflow_on_their_way_and_are_rounded_once(count):
    signs = [1 if rank % 4 < 2 else -1 for rank in range(hvd.size())]
    large = np.full(count, 50_016, np.float16)  # two of them are infinite
    require_equal(hvd.allreduce(large * np.float16(signs[hvd.rank()]), name="sum", op=hvd.Sum), large * sum(signs))
    # each of these is half of the last place of 256: one after the other they would be lost
    bits = np.full(count, 256 if hvd.rank() == 0 else 1, ml_dtypes.bfloat16)
    expected = np.full(count, 256 + hvd.size() - 1, np.float32).astype(ml_dtypes.bfloat16)
    require_equal(hvd.allreduce(bits, name="rounded", op=hvd.Sum), expected)


@pytest.mark.ranks(3, 5, env={**HALVING, "RINGTRAIN_WIRE_FORMAT": "bf16"})
@pytest.mark.parametrize("count", [1000, 40_001])
def test_sums_of_float32_that_travel_in_16_bits_by_halving(count):
    arrays = [
        (np.random.default_rng(rank).integers(-(1 << 12), 1 << 12, count) / 64).astype("f4")
        for rank in range(hvd.size())
    ]
    rounded = sum(array.astype(ml_dtypes.bfloat16).astype("f4") for array in arrays)
    expected = (rounded * np.float32(0.5)).astype(ml_dtypes.bfloat16).astype("f4")
    mine = arrays[hvd.rank()]
    before = mine.copy()
    require_equal(hvd.allreduce(mine, op=hvd.Sum, name=f"{count}", postscale_factor=0.5), expected)
    require_equal(mine, before)
    hvd.allreduce_(mine, op=hvd.Sum, name=f"{count} in place", postscale_factor=0.5)
    require_equal(mine, expected)


@pytest.mark.ranks(8, env=HALVING)
def test_a_rank_is_connected_to_the_partners_of_its_steps_alone():
    """Two for each of three steps, of which those of the longest are one: of 16-bit floats, too."""
    hvd.barrier()
    before = _sockets()
    for dtype in ("float16", "float32"):
        hvd.allreduce(np.ones(5003, dtype), op=hvd.Sum, name=dtype)
    hvd.barrier()
    assert _sockets() - before <= 5


def _sockets():
    return sum("socket:" in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_connections_grow_as_the_logarithm_of_many_ranks(element_bytes):
    for ranks in (*range(2, 70), 100, 127, 128, 129, 1000, 1024, 1025, 4096, 10_000):
        for power in range(2, 31):
            name, seconds, connections = _way(ranks, 1 << power, element_bytes)
            assert seconds > 0
            assert connections <= max(32, 2 * math.ceil(math.log2(ranks))), (ranks, power, name)


def test_the_size_from_which_the_ring_is_taken_grows_with_the_ranks():
    first = {ranks: next(s for s in range(16, 1 << 20) if _way(ranks, s << 10)[0] == "ring") for ranks in (2, 4, 8, 16)}
    assert first[2] <= first[4] < first[8] < first[16] and first[8] > 256
    assert _way(256, 1 << 20)[0] == "halving and doubling"
    assert _way(256, 1 << 10)[0] == "recursive doubling"


def test_on_a_long_link_the_ring_keeps_its_connections_and_halving_is_for_short_arrays():
    """The sizes of docs/inside/targets.md: 8 hosts, 1 Gbit/s, a round trip of 50 ms."""
    far = {size: _way(8, size, hop_s=25e-3, bytes_per_s=1.25e8)[0] for size in (256 << 10, 1 << 20, 4 << 20)}
    assert far == {256 << 10: "halving and doubling", 1 << 20: "ring", 4 << 20: "ring"}


# --- faults -----------------------------------------------------------------------------------------------------------

BY_HALVING = {"network": "sockets", "shared_memory": "off", "allreduce_algorithm": "doubling"}


@pytest.mark.parametrize("phase", ["reduce", "reduce float16", "scatter"])
def test_a_rank_is_killed_while_arrays_are_halved(phase):
    outcome = run(kill(rank=1).during(phase), 5, **BY_HALVING)
    require_error(outcome, hvd.PeerLostError, victim(outcome), "is gone: its process was killed or exited early")
    require_clean_end(outcome)


def test_a_rank_is_stopped_while_arrays_are_halved():
    outcome = run(stop(rank=2).during("reduce"), 5, stall_warning_time_s=0.3, stall_shutdown_time_s=1, **BY_HALVING)
    require_error(outcome, hvd.StalledError, victim(outcome), limit_s=3.5)
    require_clean_end(outcome)
