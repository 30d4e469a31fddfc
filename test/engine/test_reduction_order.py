"""reduction_order=ranks: sums are those of NumPy in the order of the ranks, wherever the ranks are."""

import ml_dtypes
import numpy as np
import pytest
from harness.exact import require_equal

import ringtrain as hvd

RANKS = {"RINGTRAIN_REDUCTION_ORDER": "ranks"}
SOCKETS = {**RANKS, "RINGTRAIN_NETWORK": "sockets", "RINGTRAIN_SHARED_MEMORY": "off"}
MPI = {**RANKS, "RINGTRAIN_SHARED_MEMORY": "off"}
DTYPES = [np.dtype(one) for one in ("float32", "float64", "float16", ml_dtypes.bfloat16)]
COUNTS = [1, 5, 200, 9000, 70_001, 600_000]


def arrays_of(ranks, count, dtype):
    return [np.random.default_rng([count, rank]).standard_normal(count).astype(dtype) for rank in ranks]


def sum_of(arrays, factor=1.0):
    """((v0 + v1) + v2) and so on; 16-bit floats in float32, rounded once."""
    wide = np.float64 if arrays[0].dtype == np.float64 else np.float32
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = total + array.astype(wide)
    return (total * wide(factor)).astype(arrays[0].dtype)


@pytest.mark.ranks(2, 4, 5, env=RANKS, fast=True, way="shared memory")
@pytest.mark.ranks(2, 3, 8, env=SOCKETS, fast=True, way="sockets")
@pytest.mark.ranks(4, env={**SOCKETS, "RINGTRAIN_ALLREDUCE_ALGORITHM": "ring"}, way="sockets, ring")
@pytest.mark.ranks(3, 6, env=MPI, slow=True, way="mpi")
@pytest.mark.ranks(3, env={**MPI, "RINGTRAIN_ALLREDUCE_ALGORITHM": "mpi"}, way="mpi adds up")
@pytest.mark.ranks(4, hosts=(2, 2), timeout=120, env=RANKS, slow=True)
@pytest.mark.ranks(5, hosts=(2, 1, 2), timeout=120, env=RANKS, slow=True)
def test_sums_are_those_in_the_order_of_the_ranks():
    ranks = range(hvd.size())
    last = hvd.add_process_set(ranks[1:])
    for dtype in DTYPES:
        batches = {count: arrays_of(ranks, count, dtype) for count in COUNTS}
        handles = {
            count: hvd.allreduce_async(arrays[hvd.rank()], op=hvd.Sum, name=f"{dtype}.{count}")
            for count, arrays in batches.items()
        }
        for count, handle in handles.items():
            require_equal(hvd.synchronize(handle), sum_of(batches[count]))
        arrays = batches[9000]
        mean = hvd.allreduce(arrays[hvd.rank()], name=f"{dtype}.mean", prescale_factor=0.5)
        require_equal(mean, sum_of(arrays, 0.5 / hvd.size()))
        part = hvd.reducescatter(arrays[hvd.rank()], op=hvd.Sum, name=f"{dtype}.part")
        require_equal(part, np.array_split(sum_of(arrays), hvd.size())[hvd.rank()])
        if last.included():
            of_some = hvd.allreduce(arrays[hvd.rank()], op=hvd.Sum, name=f"{dtype}.some", process_set=last)
            require_equal(of_some, sum_of(arrays[1:]))
    hvd.remove_process_set(last)
