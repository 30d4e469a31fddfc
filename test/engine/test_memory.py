"""Arrays in shared memory: the same results as with any others, and memory that comes and goes."""

import gc
import os
import shlex
import subprocess
import sys
import threading

import numpy as np
import pytest
from harness.children import fork, require_good_end
from harness.exact import (
    DTYPE_OF_EACH_SIZE,
    DTYPES,
    FLOATS,
    OPS,
    data,
    data_of_ranks,
    reference,
    require_equal,
    shapes_of,
)

import ringtrain as hvd
from ringtrain import _core

HVD_OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}

# from small slots to slices of all arrays: 16 KB, in elements of 1, 2, 4 and 8 bytes
AROUND_THE_SWITCH = [(count + more,) for count in (2048, 4096, 8192, 16384) for more in (-1, 0, 1)]


def shared(values):
    array = hvd.empty(values.shape, values.dtype)
    array[...] = values
    return array


@pytest.mark.ranks(3, dtypes=DTYPES)
@pytest.mark.ranks(1, 2, 4, dtypes=DTYPE_OF_EACH_SIZE)
def test_every_op_and_shape_in_shared_memory(dtype):
    for op in OPS:
        if op == "average" and dtype not in FLOATS:
            continue
        for shape in [*shapes_of(op), *AROUND_THE_SWITCH]:
            arrays = data_of_ranks(hvd.size(), shape, dtype, op=op)
            array = shared(arrays[hvd.rank()])
            assert hvd.allreduce_(array, op=HVD_OPS[op], name=f"{op}{shape}") is array
            require_equal(array, reference(op, arrays))


@pytest.mark.ranks(2, 3)
def test_more_arrays_than_fit_into_one_exchange_of_places():
    arrays = [shared(np.full(9, hvd.rank() + i, np.float32)) for i in range(5000)]
    hvd.grouped_allreduce_(arrays, op=hvd.Sum, name="many")
    ranks = hvd.size()
    for i, array in enumerate(arrays):
        require_equal(array, np.full(9, ranks * i + ranks * (ranks - 1) / 2, np.float32))


@pytest.mark.ranks(2, 3)
def test_shared_and_private_arrays_of_one_name_meet():
    for step in range(6):
        values = data(hvd.rank(), (40_000,), np.float32, seed=step)
        array = shared(values) if (hvd.rank() + step) % 3 else values.copy()
        hvd.allreduce_(array, op=hvd.Sum, name="mixed")
        require_equal(array, reference("sum", data_of_ranks(hvd.size(), (40_000,), np.float32, seed=step)))


@pytest.mark.ranks(2, 3)
def test_views_of_shared_memory_count_as_shared():
    flat = shared(np.full(60_000, hvd.rank() + 1.0))
    middle = flat[20_000:40_000].reshape(100, 200)
    hvd.allreduce_(middle, op=hvd.Sum, name="middle")
    total = hvd.size() * (hvd.size() + 1) / 2
    require_equal(flat, np.repeat([hvd.rank() + 1.0, total, hvd.rank() + 1.0], 20_000))


@pytest.mark.ranks(2, 3)
def test_a_joined_rank_contributes_zeros_to_shared_arrays():
    array = shared(np.ones(50_000, np.float32))
    for _ in range(3):
        array[...] = 1
        hvd.allreduce_(array, op=hvd.Sum, name="gradient")
    if hvd.rank() != 0:
        for _ in range(3):
            array[...] = 1
            hvd.allreduce_(array, op=hvd.Sum, name="gradient")
            require_equal(array, np.full(50_000, hvd.size() - 1, np.float32))
    hvd.join()


@pytest.mark.ranks(2)
def test_the_memory_goes_back_when_the_arrays_go():
    shared_files = [fd for fd in os.listdir("/proc/self/fd") if name_of_file(fd).startswith("/dev/shm/#")]
    arena = max(shared_files, key=lambda fd: os.fstat(int(fd)).st_size)

    def held_by_both_ranks():
        hvd.barrier()
        held = os.fstat(int(arena)).st_blocks * 512
        hvd.barrier()
        return held

    gc.collect()
    before = held_by_both_ranks()
    arrays = [shared(np.ones(1_000_000)) for _ in range(4)]
    assert held_by_both_ranks() - before >= 2 * 4 * 8_000_000
    del arrays[1], arrays[2]  # in any order
    del arrays
    assert held_by_both_ranks() - before < 100_000


@pytest.mark.ranks(2)
def test_a_size_near_the_largest_number_is_refused_and_leaves_the_memory_as_it_was():
    for size in (2**64 - 1, 2**64 - 8, 2**63):
        with pytest.raises(hvd.RingtrainError, match="no room for"):
            _core.empty_bytes(size)
    array = shared(np.ones(8))
    require_equal(hvd.allreduce(array, op=hvd.Sum), np.full(8, float(hvd.size())))


def name_of_file(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # that of the listing itself
        return ""


@pytest.mark.ranks(2)
def test_memory_that_a_forked_child_releases_stays_with_its_parent():
    arrays = [shared(np.full(1_000_000, hvd.rank() + 1.0)) for _ in range(3)]
    require_good_end(fork(arrays.clear))
    for array in arrays:
        require_equal(array, np.full(1_000_000, hvd.rank() + 1.0))


@pytest.mark.ranks(2)
def test_a_forked_child_may_let_go_of_arrays_after_its_parent():
    arrays = [shared(np.ones(1_000_000))]
    address = arrays[0].ctypes.data
    reading, writing = os.pipe()
    child = fork(lambda: (os.read(reading, 1), arrays.clear()))
    arrays.clear()
    again = shared(np.full(1_000_000, 7.0))
    assert again.ctypes.data == address
    os.write(writing, b" ")
    require_good_end(child)
    hvd.allreduce_(again, op=hvd.Sum, name="again")
    require_equal(again, np.full(1_000_000, 14.0))


@pytest.mark.ranks(2)
def test_a_child_that_is_forked_while_another_thread_takes_shared_memory_ends():
    held = [hvd.empty(1) for _ in range(10_000)]  # to look for a free place among these takes a while
    is_over = threading.Event()

    def take():
        while not is_over.is_set():
            hvd.empty(1)

    thread = threading.Thread(target=take)
    thread.start()
    for _ in range(20):
        require_good_end(fork(held.pop))
    is_over.set()
    thread.join()


@pytest.mark.ranks(2, initialised=False)
def test_shared_arrays_outlive_shutdown():
    hvd.init()
    array = shared(np.arange(100_000))
    hvd.shutdown()
    require_equal(array, np.arange(100_000))
    array += 1
    require_equal(array, np.arange(1, 100_001))


@pytest.mark.ranks(2, 3, initialised=False)
def test_shared_arrays_are_reduced_where_they_lie_after_another_init():
    array = None
    for generation in range(3):
        hvd.init()
        if array is None:
            array = shared(np.zeros(100_000))
        array[...] = hvd.rank() + 1
        hvd.allreduce_(array, op=hvd.Sum, name=f"of generation {generation}")
        require_equal(array, np.full(100_000, hvd.size() * (hvd.size() + 1) / 2))
        assert _core.last_operations()[-1]["is_registered"]
        hvd.shutdown()


@pytest.mark.ranks(3, initialised=False)
def test_shared_arrays_of_other_ranks_are_copied_after_another_init():
    from mpi4py import MPI

    pair = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.Get_rank() == 2)
    hvd.init(comm=pair)
    array = shared(np.ones(100_000))
    hvd.shutdown()
    hvd.init()
    hvd.allreduce_(array, op=hvd.Sum, name="x")
    require_equal(array, np.full(100_000, 3.0))
    assert not _core.last_operations()[-1]["is_registered"]
    hvd.allreduce_(shared(array), op=hvd.Sum, name="y")
    assert _core.last_operations()[-1]["is_registered"]
    hvd.shutdown()
    pair.Free()


@pytest.mark.ranks(2, env={"RINGTRAIN_SHARED_MEMORY": "off"})
def test_without_shared_memory_it_is_an_array_like_others():
    array = shared(np.ones(50_000, np.float32))
    hvd.allreduce_(array, op=hvd.Sum, name="private")
    require_equal(array, np.full(50_000, 2, np.float32))


@pytest.mark.ranks(1)
def test_shapes_are_those_of_numpy():
    assert hvd.empty(3).shape == (3,)
    assert hvd.empty((2, np.int64(3)), "float16").shape == (2, 3)
    assert hvd.empty([]).shape == ()
    assert hvd.empty(np.int32(4)).dtype == np.float32
    with pytest.raises(ValueError, match="negative"):
        hvd.empty(-1)
    with pytest.raises(TypeError):
        hvd.empty(2.5)


IN_SMALL_SHM = """
import warnings
import numpy as np
import ringtrain as hvd

warnings.simplefilter("always")
hvd.init()
array = hvd.empty(20_000_000)
array[...] = 1
hvd.allreduce_(array, op=hvd.Sum, name="large")
assert (array == 2).all()
hvd.allreduce_(array[:300_000], op=hvd.Sum, name="small")
assert (array[:300_000] == 4).all() and (array[300_000:] == 2).all()
print(f"rank {hvd.rank()} is right")
"""


def run_with_shm(mount_options):
    """Two ranks whose /dev/shm is another than the machine's."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs root with the right to mount: it puts another /dev/shm in place")
    job = [sys.executable, "-m", "ringtrain.run", "-np", "2", sys.executable, "-c", IN_SMALL_SHM]
    script = f"mount -t tmpfs -o {mount_options} tmpfs /dev/shm && exec {shlex.join(job)}"
    command = ["unshare", "--mount", "sh", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "rank 0 is right" in result.stdout and "rank 1 is right" in result.stdout
    return result.stderr


def test_a_container_with_64_mb_of_shared_memory():
    assert "ringtrain.empty gives ordinary memory" in run_with_shm("size=64m")


def test_a_container_where_shared_memory_cannot_be_used():
    errors = run_with_shm("ro")
    said = "cannot create shared memory /dev/shm: Read-only file system. All ranks go through the network instead"
    assert errors.count(said) == 1


def test_before_init_there_is_none():
    with pytest.raises(hvd.NotInitializedError):
        hvd.empty(3)
