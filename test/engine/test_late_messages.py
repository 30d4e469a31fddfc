"""An MPI that still writes for operations that have failed, and waits where it may: a double of the library."""

import gc
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
from harness import mpi_double

import ringtrain as hvd
from ringtrain import _core

KB = 256  # elements of 4 bytes
MPI = {"RINGTRAIN_NETWORK": "mpi"}


def own(count, dtype="float32"):
    return np.full(count, hvd.rank(), dtype)


def two_sums(dtype, count):
    """In place, and nobody waits for the first one."""
    first = hvd.allreduce_async_(own(count, dtype), name="first")
    hvd.allreduce_(own(count, dtype), name="second")
    return first


class Case(NamedTuple):
    """After how many long messages rank 2 fails in an operation on so many elements."""

    operation: Callable[[int], object]
    count: int
    after: int = 0
    options: Mapping[str, str] = {}


CASES = {
    "allgather by doubling": Case(lambda count: hvd.allgather(own(count), name="x"), 10 * KB),
    "allgather by the ring": Case(lambda count: hvd.allgather(own(count), name="x"), 300 * KB),
    "alltoall": Case(lambda count: hvd.alltoall(own(count), name="x"), 300 * KB),
    "broadcast by the tree": Case(lambda count: hvd.broadcast_(own(count), 2, name="x"), 5 * KB),
    "broadcast by the chain": Case(lambda count: hvd.broadcast_(own(count), 2, name="x"), 300 * KB),
    "reducescatter by halving": Case(lambda count: hvd.reducescatter(own(count), name="x"), 20 * KB),
    "reducescatter by the ring": Case(lambda count: hvd.reducescatter(own(count), name="x"), 300 * KB),
    "reducescatters together": Case(lambda count: hvd.grouped_reducescatter([own(count), own(3)], name="x"), 20 * KB),
    "adasum": Case(lambda count: hvd.allreduce(own(count), op=hvd.Adasum, name="x"), 300 * KB),
    "doubling": Case(partial(two_sums, "float32"), 5 * KB),
    "ring": Case(partial(two_sums, "float32"), 1500 * KB, after=50),
    "exchange": Case(partial(two_sums, "float16"), 3000 * KB, after=50),
    "MPI": Case(partial(two_sums, "float32"), 700 * KB, options={"allreduce_algorithm": "mpi"}),
    "MPI, 16 bits": Case(partial(two_sums, "float16"), 20 * KB, options={"allreduce_algorithm": "mpi"}),
}


def fail(double, operation, after=0):
    """Rank 2 cannot send what is longer than messages of the negotiation, and the others hear of it."""
    if hvd.rank() == 2:
        double.refuse(from_bytes=2000, after=after)
    try:
        operation()
    except hvd.RingtrainError as error:
        kind = type(error)
    else:
        raise AssertionError("the operation has not failed")
    assert kind is (hvd.RingtrainError if hvd.rank() == 2 else hvd.RemoteError)
    double.refuse_nothing()
    gc.collect()


def new_arrays(size):
    """malloc mostly returns blocks of the same size that were freed."""
    sizes = [size, 3 * size, size // 3, *(1 << bits for bits in range(3, 16))]
    return [np.full(size, 7, np.uint8) for size in sizes for _ in range(4)]


@pytest.mark.fast
@pytest.mark.ranks(3, isolated=True, timeout=120, env=MPI)
def test_memory_that_mpi_may_still_write_to_is_never_used_again():
    double = mpi_double.install()
    for name, case in CASES.items():
        hvd.init(shared_memory="off", stall_shutdown_time_s=10, **case.options)
        rank = hvd.rank()
        case.operation(case.count)
        fail(double, partial(case.operation, case.count), case.after)
        for is_over in (False, True):
            if is_over:
                hvd.shutdown()
            arrays = new_arrays(4 * case.count)
            assert double.write_late() > 0 or rank == 2, name
            assert all((array == 7).all() for array in arrays), name
            del arrays


@pytest.mark.ranks(3, isolated=True, env=MPI)
@pytest.mark.parametrize("is_cancelled", [False, True], ids=["late", "cancelled"])
def test_arrays_stay_until_mpi_is_through_with_them(is_cancelled):
    double = mpi_double.install()
    hvd.init(shared_memory="off", stall_shutdown_time_s=10)
    waiting, array = own(300 * KB), own(300 * KB)
    of_others, of_mpi = weakref.ref(waiting), weakref.ref(array)
    handle = hvd.allreduce_async_(waiting, name="only here") if hvd.rank() == 0 else None
    if is_cancelled:
        double.let_cancel()
    fail(double, partial(hvd.broadcast_, array, 2, name="x"))
    del waiting, array, handle
    gc.collect()
    assert of_others() is None
    assert hvd.rank() == 2 or (of_mpi() is None) == is_cancelled
    hvd.shutdown()


@pytest.mark.ranks(3, isolated=True, env=MPI)
def test_a_rank_that_cannot_be_told_of_a_failure_hears_of_it_from_another_one():
    double = mpi_double.install()
    hvd.init(shared_memory="off", stall_warning_time_s=1, stall_shutdown_time_s=3)
    hvd.barrier()
    if hvd.rank() == 0:
        double.refuse(to=1)
        _core.give_up("what is told", 2)
    else:
        with pytest.raises(hvd.RemoteError, match="rank 0"):  # rank 2 tells rank 1
            hvd.barrier()
    hvd.shutdown()


@pytest.mark.ranks(3, isolated=True, env=MPI)
def test_communicators_are_freed_together():
    double = mpi_double.install()
    hvd.init(shared_memory="off")
    assert double.communicators() == 0  # nothing else needs one
    hvd.shutdown()
    hvd.init(shared_memory="off", allreduce_algorithm="mpi")
    before = double.communicators()
    pair = hvd.add_process_set([0, 2])
    assert double.communicators() == before  # made with the first operation
    if pair.included():
        hvd.allreduce(own(KB), process_set=pair)
    assert double.communicators() == before + pair.included()
    hvd.remove_process_set(pair)
    assert double.communicators() == before > 0
    hvd.shutdown()
    assert double.communicators() == 0


@pytest.mark.ranks(3, isolated=True, env=MPI)
def test_shutdown_after_a_failure_waits_for_nobody(tmp_path):
    mpi_double.install()
    hvd.init(shared_memory="off", allreduce_algorithm="mpi")
    hvd.allgather(own(KB))
    if hvd.rank() < 2:
        with pytest.raises(hvd.RemoteError):
            hvd.barrier()
        hvd.shutdown()
        (tmp_path / "done").mkdir(exist_ok=True)
        return
    _core.give_up("what is told", 2)
    deadline = time.monotonic() + 20
    while not (tmp_path / "done").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    hvd.shutdown()
