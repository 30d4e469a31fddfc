"""Several hosts, as network namespaces: 2 x 2 and 4 x 1 ranks, and hosts with different numbers of ranks."""

import socket
import time
from types import SimpleNamespace
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from harness.exact import (
    DTYPE_OF_EACH_SIZE,
    DTYPES,
    FLOATS,
    OPS,
    data,
    data_of_ranks,
    gathered_together,
    reference,
    require_equal,
)
from measure.process import measure_asleep

import ringtrain as hvd
from ringtrain.timeline import recording

HVD_OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


def check_every_operation(dtype):
    size, rank = hvd.size(), hvd.rank()
    for op in OPS:
        if op == "average" and dtype.kind in "biu":
            continue
        for count in (0, 1, 7, 1021, *([300_007] if op == "sum" else [])):
            expected = reference(op, data_of_ranks(size, (count,), dtype, op=op))
            result = hvd.allreduce(data(rank, (count,), dtype, op=op), op=HVD_OPS[op], name=f"{op}{count}")
            require_equal(result, expected)
    parts = data_of_ranks(size, (48_000, 2), dtype)
    require_equal(
        hvd.allgather(parts[rank][: rank * 9000]), np.concatenate([parts[r][: r * 9000] for r in range(size)])
    )
    for root in range(size):
        require_equal(hvd.broadcast(parts[rank], root), parts[root])
    require_equal(hvd.alltoall(parts[rank]), np.concatenate([np.split(part, size)[rank] for part in parts]))
    scattered = hvd.reducescatter(parts[rank][:47_999], op=hvd.Sum)
    require_equal(scattered, np.array_split(reference("sum", [part[:47_999] for part in parts]), size)[rank])


@pytest.mark.ranks(4, hosts=(2, 2), timeout=120, slow=True, dtypes=DTYPES)
@pytest.mark.ranks(4, hosts=(1, 1, 1, 1), timeout=120, dtypes=DTYPE_OF_EACH_SIZE)
def test_every_operation_on_hosts(dtype):
    check_every_operation(dtype)


@pytest.mark.ranks(3, hosts=(2, 1), timeout=120)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_every_operation_on_hosts_with_different_numbers_of_ranks(dtype):
    assert not hvd.is_homogeneous()
    check_every_operation(np.dtype(getattr(ml_dtypes, dtype, dtype)))


@pytest.mark.ranks(4, hosts=(2, 2), initialised=False, env={"RINGTRAIN_NETWORK": "mpi"})
def test_every_operation_where_the_ranks_go_round_the_hosts():
    MPI = pytest.importorskip("mpi4py.MPI")
    world = MPI.COMM_WORLD
    hvd.init(comm=world.Split(0, key=[0, 2, 1, 3][world.Get_rank()]))
    assert hvd.cross_rank() == hvd.rank() % 2
    for dtype in ("float32", "bfloat16", "int8"):
        check_every_operation(np.dtype(getattr(ml_dtypes, dtype, dtype)))


@pytest.mark.ranks(4, hosts=(2, 2))
@pytest.mark.parametrize("most", [3, 900, 40_000])
def test_messages_of_all_lengths_to_everybody(most):
    rank, size = hvd.rank(), hvd.size()
    splits = np.array([[(7 * sender + 3 * receiver) % most for receiver in range(size)] for sender in range(size)])
    sent = [data(sender, (splits[sender].sum(),), "int16") for sender in range(size)]
    received, counts = hvd.alltoall(sent[rank], splits=splits[rank])
    assert counts.tolist() == splits[:, rank].tolist()
    parts = [np.split(sent[sender], splits[sender].cumsum())[rank] for sender in range(size)]
    require_equal(received, np.concatenate(parts))


def check_sizes_around_switches(dtype):
    # around the doubling of a lane, its halving and its ring, blocks, and many blocks
    element = dtype.itemsize
    for base in (16, 65536 // element, 131072 // element, 262144 // element, 393216 // element, 4_000_000 // element):
        for count in (base - 1, base, base + 1):
            expected = reference("sum", data_of_ranks(hvd.size(), (count,), dtype))
            require_equal(hvd.allreduce(data(hvd.rank(), (count,), dtype), op=hvd.Sum, name=f"{count}"), expected)


@pytest.mark.ranks(4, hosts=(2, 2), timeout=120, dtypes=["float16", "int8"])
@pytest.mark.ranks(5, hosts=(1, 3, 1), timeout=120, dtypes=["float32", "int8"])
def test_sizes_around_every_switch_on_hosts(dtype):
    check_sizes_around_switches(np.dtype(dtype))


@pytest.mark.ranks(5, hosts=(3, 2), timeout=120)
def test_a_rank_without_a_lane():
    check_sizes_around_switches(np.dtype("float32"))


@pytest.mark.ranks(4, hosts=(2, 2))
def test_many_arrays_at_once_across_hosts():
    shapes = [(3,), (1 << 20,), (0,), (70_001,), (300_007, 2), (1,)]
    for dtype in ("float32", "float16"):
        mine = [data(hvd.rank(), shape, dtype, seed=i) for i, shape in enumerate(shapes)]
        hvd.grouped_allreduce_(mine, op=hvd.Sum)
        for i, shape in enumerate(shapes):
            require_equal(mine[i], reference("sum", data_of_ranks(hvd.size(), shape, dtype, seed=i)))


@pytest.mark.ranks(4, hosts=(2, 2))
@pytest.mark.ranks(5, hosts=(3, 2), timeout=120)
def test_many_allgathers_at_once_across_hosts():
    everybody = gathered_together(hvd.size(), [1, 0, 200_001, 5, 70_007, 3], step=0)
    gathered = hvd.grouped_allgather([arrays[hvd.rank()] for arrays in everybody])
    for result, arrays in zip(gathered, everybody, strict=True):
        require_equal(result, np.concatenate(arrays))


@pytest.mark.ranks(4, hosts=(2, 2))
def test_all_ranks_hold_the_same_bits_across_hosts():
    random = np.random.default_rng(hvd.rank())
    for dtype in FLOATS:
        for count in (100, 50_003, 300_007):
            result = hvd.allreduce(random.standard_normal(count).astype(dtype), name=f"inexact {dtype} {count}")
            copies = hvd.allgather(result.view("uint8"), name=f"copies {dtype} {count}").reshape(hvd.size(), -1)
            assert (copies == copies[0]).all()


@pytest.mark.ranks(4, hosts=(2, 2), timeout=120, env={"RINGTRAIN_CROSS_ALGORITHM": "ring"}, way="ring")
@pytest.mark.ranks(
    4, hosts=(2, 2), timeout=120, env={"RINGTRAIN_NETWORK": "mpi", "RINGTRAIN_CROSS_ALGORITHM": "mpi"}, way="mpi"
)
def test_the_algorithm_between_hosts_may_be_chosen():
    check_every_operation(np.dtype("float32"))


@pytest.mark.ranks(4, hosts=(2, 2))
@pytest.mark.parametrize("count", [10, 100_003])
def test_float16_is_summed_in_float32_across_hosts(count):
    mine = np.full(count, 2048 if hvd.rank() == 0 else 1, "float16")
    require_equal(hvd.allreduce(mine, op=hvd.Sum), np.full(count, 2052, "float16"))  # 2051 is none
    require_equal(hvd.allreduce(np.full(count, 40_000, "float16")), np.full(count, 40_000, "float16"))


@pytest.mark.ranks(4, hosts=(2, 2))
@pytest.mark.parametrize("count", [10, 100_003])
def test_nan_is_never_lost(count):
    mine = np.ones(count, "float32")
    if hvd.rank() == 2:
        mine[3] = np.nan
    for op in (hvd.Min, hvd.Max, hvd.Sum, hvd.Product):
        assert np.isnan(hvd.allreduce(mine, op=op)).nonzero()[0].tolist() == [3]


@pytest.mark.ranks(4, hosts=(2, 2))
def test_place_in_the_world():
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank() % 2, 2)
    assert (hvd.cross_rank(), hvd.cross_size()) == (hvd.rank() // 2, 2)
    assert hvd.is_homogeneous()
    assert len(set(hvd.allgather_object(socket.gethostname()))) == 2


@pytest.mark.ranks(4, hosts=(2, 2))
def test_process_sets_inside_and_across_hosts():
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2])]
    for step in range(5):
        for one in sets:
            if one.included():
                result = hvd.allreduce(np.full(40_000, hvd.rank() + 1.0), op=hvd.Sum, name=f"{step}", process_set=one)
                require_equal(result, np.full(40_000, sum(rank + 1.0 for rank in one.ranks)))
    for one in sets:
        hvd.remove_process_set(one)


@pytest.mark.ranks(4, hosts=(2, 2))
def test_the_ranks_of_one_host_come_much_later():
    for step in range(3):
        if hvd.rank() // 2 == step % 2:
            time.sleep(0.2)
        handles = [hvd.allreduce_async(np.full(i, 1.0), op=hvd.Sum, name=f"late{i}") for i in range(20)]
        for i, handle in enumerate(handles):
            require_equal(hvd.synchronize(handle), np.full(i, 4.0))


@pytest.mark.fast
@pytest.mark.ranks(2, hosts=(1, 1))
def test_hosts_take_turns_at_being_late():
    # The early rank calls the other one, which must take that message and not only see it.
    for number in range(200):
        time.sleep(0.003 * (number % 2 == hvd.rank()))
        assert hvd.allreduce(np.full(20_000, hvd.rank(), np.int32), op=hvd.Sum, name=f"{number % 3}")[-1] == 1


@pytest.mark.ranks(4, hosts=(2, 2))
def test_ranks_that_disagree_across_hosts():
    with pytest.raises(hvd.MismatchError, match=r"ranks 0-2 sent float64\[2\], rank 3 sent float64\[3\]"):
        hvd.allreduce(np.ones(3 if hvd.rank() == 3 else 2), name="bad")
    require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, 4.0))


@pytest.mark.ranks(4, hosts=(2, 2))
def test_uneven_data_across_hosts():
    for batch in range(hvd.rank()):
        hvd.allreduce(np.ones(10), name=f"batch{batch}")
    assert hvd.join() == 3


@pytest.mark.ranks(4, hosts=(2, 2))
@pytest.mark.ranks(2, hosts=(1, 1))
def test_idle_ranks_on_2_hosts_sleep():
    hvd.allreduce(np.ones(3))
    time.sleep(0.2)
    asleep = measure_asleep(2)
    assert asleep.wakeups < 150 and asleep.cpu_s < 0.1


@pytest.mark.ranks(4, hosts=(1, 1, 1, 1), initialised=False)
def test_init_and_shutdown_many_times():
    for step in range(5):
        hvd.init()
        require_equal(hvd.allreduce(np.full(1000, float(step)), op=hvd.Sum), np.full(1000, 4.0 * step))
        hvd.shutdown()


@pytest.mark.ranks(4, hosts=(2, 2))
def test_a_timeline_begins_at_one_moment_whatever_the_hosts_are_called():
    ahead_s = 1000.0 * hvd.cross_rank()  # of the clock of this host
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
    with mock.patch("socket.gethostname", lambda: "localhost"), mock.patch("ringtrain.timeline.recording.time", clock):
        start = recording._common_start()
    starts = hvd.allgather(np.array([start]))
    assert starts[0] == starts[1]  # ranks of one host have one clock
    assert np.abs(starts - starts[0] - [0, 0, 1000, 1000]).max() < 5
