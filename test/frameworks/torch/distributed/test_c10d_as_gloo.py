"""Habits of gloo that scripts rely on: when results arrive, timeouts, sources that are only read."""

import ctypes
import mmap
import time
from datetime import timedelta

import pytest
from harness.frameworks import need_torch_of_backend, on_demand
from test_c10d import LIMIT_S, default_group

need_torch_of_backend()

torch = on_demand("torch")
dist = on_demand("torch.distributed")
hvd = on_demand("ringtrain.torch")

INTEGERS = ["uint8", "int8", "int16", "int32", "bool"]
SHORT = timedelta(seconds=0.2)


def turned(rows, columns, value):
    """A tensor that is not contiguous."""
    return torch.full((columns, rows), float(value)).t()


# ------------------------------------------------------------------------------------------------------- averages


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_an_average_whose_sum_may_not_fit_is_refused_on_all_ranks(dtype):
    with default_group():
        group, average = dist.group.WORLD, dist.ReduceOp.AVG
        values = torch.ones(4, dtype=getattr(torch, dtype))
        half = torch.empty(2, dtype=values.dtype)
        for call in (
            lambda: dist.all_reduce(values, average),
            lambda: dist.all_reduce(values, average, async_op=True),
            lambda: dist.reduce(values, 0, average),
            lambda: dist.reduce_scatter(half, list(values.split(2)), average),
            lambda: dist.reduce_scatter_tensor(half, values, average),
            lambda: group.allreduce_coalesced([values], average),
        ):
            with pytest.raises(TypeError, match=rf"torch\.{dtype} has no AVG; convert to torch.int64 or a float"):
                call()
        dist.all_reduce(values, dist.ReduceOp.MAX)
        assert values.tolist() == [1] * 4


@pytest.mark.ranks(2)
def test_an_average_of_int64_is_rounded_towards_zero():
    """As NCCL does; Lightning averages numbers of samples so."""
    with default_group():
        values = torch.tensor([1, -1, 2**40]) * (dist.get_rank() + 1)
        dist.all_reduce(values, dist.ReduceOp.AVG)
        assert values.tolist() == [1, -1, 3 * 2**39]


# ----------------------------------------------------------------------------------- results that nobody waits for


def begin_all(rank, size):
    """Begins operations whose results need a copy, and drops what they return. Returns results and right values."""
    value, total = rank + 1.0, size * (size + 1) / 2
    of_ranks = [float(one + 1) for one in range(size)]
    lists = [[torch.zeros(2) for _ in range(size)] for _ in range(5)]
    uneven = [torch.zeros(one + 1) for one in range(size)]
    matrices = [turned(3, 2, value) for _ in range(5)]
    gathered, parts = turned(size, 3, 0), [torch.full((2,), value) for _ in range(size)]
    bits, own_bits = torch.full((3,), rank + 4), torch.zeros(3, dtype=torch.int64)
    sparse = torch.tensor([0.0, value]).to_sparse()
    options = {"async_op": True}
    dist.all_gather(lists[0], torch.full((2,), value), **options)
    dist.all_gather(uneven, torch.full((rank + 1,), value), **options)
    dist.gather(parts[0], lists[1] if rank == 0 else None, 0, **options)
    dist.all_to_all(lists[2], parts, **options)
    dist.group.WORLD.allgather_coalesced([[one] for one in lists[3]], [torch.full((2,), value)])
    dist.all_reduce(matrices[0], **options)
    dist.reduce(matrices[1], 0, **options)
    dist.broadcast(matrices[2], 0, **options)
    dist.scatter(matrices[3], [torch.full((3, 2), 7.0)] * size if rank == 0 else None, 0, **options)
    dist.reduce_scatter(matrices[4], [torch.full((3, 2), value)] * size, **options)
    dist.all_gather_into_tensor(gathered, torch.full((1, 3), value), **options)
    dist.all_reduce(bits, dist.ReduceOp.BOR, **options)
    dist.reduce_scatter_tensor(own_bits, torch.full((3 * size,), rank + 4), dist.ReduceOp.BXOR, **options)
    dist.all_reduce(sparse, **options)
    ones = [[one, one] for one in of_ranks]
    expected = [
        *zip(lists, [ones, ones if rank == 0 else [[0.0] * 2] * size, ones, ones], strict=False),
        (uneven, [[one] * (place + 1) for place, one in enumerate(of_ranks)]),
        *((matrix, [[right] * 2] * 3) for matrix, right in zip(matrices, (total, total, 1.0, 7.0, total), strict=True)),
        (gathered, [[one] * 3 for one in of_ranks]),
        (bits, [4 | 5 if size == 2 else 4 | 5 | 6] * 3),
        (own_bits, [4 ^ 5 if size == 2 else 4 ^ 5 ^ 6] * 3),
        (sparse, [0.0, total]),
    ]
    return [(got, right) for got, right in expected if got is not matrices[1] or rank == 0]


def values_of(got):
    if isinstance(got, list):
        return [one.tolist() for one in got]
    return (got.to_dense() if got.is_sparse else got).tolist()


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
def test_results_that_need_a_copy_arrive_before_a_barrier_ends():
    with default_group() as rank:
        for _ in range(20):
            results = begin_all(rank, dist.get_world_size())
            dist.barrier()
            for got, right in results:
                assert values_of(got) == right


@pytest.mark.ranks(2)
def test_results_that_need_a_copy_arrive_without_any_call():
    with default_group() as rank:
        results = begin_all(rank, 2)
        if rank:
            dist.isend(torch.full((6,), 5.0).reshape(3, 2), 0)
        else:
            dist.irecv(received := turned(3, 2, 0), 1)
            results.append((received, [[5.0] * 2] * 3))
        end = time.monotonic() + LIMIT_S
        while not all(values_of(got) == right for got, right in results):
            assert time.monotonic() < end, [(values_of(got), right) for got, right in results]
            time.sleep(0.01)
        dist.barrier()


# ------------------------------------------------------------------------------------------------------- timeouts


def late_ones(rank):
    """Operations that rank 1 calls later, by name: each returns its Work, its result and the right value."""
    group = dist.group.WORLD
    value = rank + 1.0
    lists, pair, whole = [torch.zeros(2) for _ in range(2)], [torch.zeros(2) for _ in range(2)], torch.ones(3)
    part, turned_one, other, found = torch.zeros(2), turned(3, 2, value), torch.zeros(4), torch.zeros(2)
    yield dist.all_reduce(whole, async_op=True), whole, [2.0] * 3
    yield dist.all_gather(lists, torch.full((2,), value), async_op=True), lists, [[1.0] * 2, [2.0] * 2]
    yield dist.all_reduce(turned_one, async_op=True), turned_one, [[3.0] * 2] * 3
    yield dist.reduce_scatter(part, [torch.full((2,), value)] * 2, async_op=True), part, [3.0] * 2
    yield dist.all_to_all(pair, [torch.full((2,), value)] * 2, async_op=True), pair, [[1.0] * 2, [2.0] * 2]
    yield dist.barrier(async_op=True), [], []
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        dist.all_gather_into_tensor(other, torch.full((2,), value))
    yield manager.works[0], other, [1.0, 1.0, 2.0, 2.0]
    if rank == 0:
        yield dist.batch_isend_irecv([dist.P2POp(dist.irecv, found, 1)])[0], found, [9.0, 9.0]
        anyone = torch.zeros(2)
        yield dist.irecv(anyone), anyone, [8.0, 8.0]
    else:
        yield dist.isend(torch.full((2,), 9.0), 0), [], []
        yield dist.isend(torch.full((2,), 8.0), 0), [], []


@pytest.mark.ranks(2)
def test_a_wait_that_was_too_short_may_be_repeated():
    # Rank 1 waits in the store, which ringtrain does not see: in a barrier, beside operations that a slow rank 0 waits
    # for, it would be in a deadlock.
    with default_group() as rank:
        store = dist.distributed_c10d._get_default_store()
        for number in range(2):
            if rank:
                store.wait([f"{number} was too short"])
                for work, got, right in late_ones(rank):
                    work.wait()
                    assert values_of(got) == right
                continue
            works = list(late_ones(rank))
            for work, _, _ in works:
                for _ in range(2):
                    with pytest.raises(hvd.StalledError, match=r"not complete within the timeout of 0\.2 s"):
                        work.wait(SHORT)
                assert not work.is_completed() and not work.is_success() and work.exception() is None
            futures = [work.get_future() for work, _, _ in works[:3]]
            store.set(f"{number} was too short", "")
            for work, got, right in works:
                work.wait()
                assert values_of(got) == right
                assert work.is_completed() and work.is_success() and work.exception() is None
            for future in futures:
                future.wait()


@pytest.mark.ranks(2)
def test_the_timeout_of_an_operation_is_its_end():
    with default_group(timeout_s=0.3) as rank:
        if rank == 0:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            for _ in range(2):
                with pytest.raises(hvd.StalledError, match=r"within the timeout of 0\.3 s"):
                    work.wait()
            assert work.is_completed() and not work.is_success()
            assert isinstance(work.exception(), hvd.StalledError)
        hvd.barrier()


@pytest.mark.ranks(2)
def test_a_future_ends_with_the_timeout_of_its_group():
    with default_group(timeout_s=0.3) as rank:
        if rank == 0:
            begun = [
                dist.all_reduce(torch.ones(2), async_op=True),
                dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2), async_op=True),
                dist.barrier(async_op=True),
            ]
            for future in [work.get_future() for work in begun]:
                with pytest.raises(RuntimeError, match=r"StalledError: .* within the timeout of 0\.3 s"):
                    future.wait()
            layer = torch.nn.Linear(2, 2)
            layer.bias.register_hook(lambda gradient: dist.all_reduce(gradient, async_op=True).get_future().wait()[0])
            with pytest.raises(hvd.StalledError, match=r"all_reduce #4 .* within the timeout of 0\.3 s"):
                layer(torch.ones(2)).sum().backward()
        hvd.barrier()


@pytest.mark.ranks(2)
def test_the_timeout_of_a_group_can_be_set_later():
    with default_group():
        group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
        dist.all_reduce(torch.ones(2), group=group)
        for set_timeout in (
            dist.distributed_c10d._set_pg_timeout,
            lambda timeout, group: group._get_backend(torch.device("cpu"))._set_default_timeout(timeout),
            lambda timeout, group: group.set_timeout(timeout),
        ):
            set_timeout(timedelta(seconds=LIMIT_S), group)
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=LIMIT_S)
            set_timeout(SHORT, group)
            assert group._get_backend(torch.device("cpu")).options._timeout == SHORT
            if dist.get_rank() == 0:
                with pytest.raises(hvd.StalledError, match=r"within the timeout of 0\.2 s"):
                    dist.all_reduce(torch.ones(2), group=group)
            hvd.barrier()
            if dist.get_rank() == 1:
                dist.all_reduce(torch.ones(2), group=group)
            hvd.barrier()
            with pytest.raises(TypeError, match=r"timeout .*timedelta"):
                set_timeout(5, group)
            with pytest.raises(ValueError, match=r"timeout must not be negative"):
                set_timeout(-SHORT, group)
        dist.distributed_c10d._set_pg_timeout(SHORT)
        assert dist.group.WORLD.options._timeout == SHORT


@pytest.mark.ranks(2)
def test_functions_of_torch_that_ask_for_a_backend_of_another_device_go_on():
    functions = dist.distributed_c10d
    with default_group():
        group = dist.new_group()
        group._get_backend(torch.device("cpu")).eager_connect_single_device(torch.device("cpu"))
        with pytest.raises(RuntimeError, match=r"groups are for tensors on cpu.*, not on meta"):
            group._get_backend(torch.device("meta"))
        with pytest.raises(NotImplementedError), functions._time_estimator(group, torch.device("cpu")):
            pass
        if not torch.cuda.is_available():
            assert functions._get_process_group_uid(group) == -1
        functions._abort_process_group(group)
        with pytest.raises(hvd.ShutDownError):
            group.allreduce([torch.ones(2)])
        functions._abort_process_group()
        assert not dist.is_initialized()


# ---------------------------------------------------------------------------------------------- what is only read


def read_only(count, value):
    """A tensor in memory that nobody may write."""
    memory = mmap.mmap(-1, 4 * count)
    torch.frombuffer(memory, dtype=torch.float32).fill_(value)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ) == 0
    return torch.frombuffer(memory, dtype=torch.float32)


SOURCES = {
    "expanded": lambda count, value: torch.tensor(float(value)).expand(count),
    "overlapping": lambda count, value: torch.full((3,), float(value)).as_strided((count // 2, 2), (0, 1)),
    "read-only": read_only,
    "leaf": lambda count, value: torch.full((2, count // 2), float(value), requires_grad=True).t(),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", list(SOURCES))
def test_a_source_need_not_be_writable(kind):
    with default_group() as rank:
        for count in (4, 1024):
            value = rank + 1.0
            source = SOURCES[kind](count, value)
            given = source if rank == 0 else torch.zeros(source.shape)
            version = source._version
            dist.broadcast(given, 0)
            assert torch.equal(given, torch.full_like(given, 1.0))
            outputs = [torch.zeros(source.shape) for _ in range(2)]
            dist.all_gather(outputs, source)
            assert [one.sum().item() for one in outputs] == [count, 2.0 * count]
            dist.gather(source, outputs if rank == 0 else None, 0)
            dist.scatter(outputs[0], [source, source] if rank == 1 else None, 1)
            assert torch.equal(outputs[0], torch.full_like(outputs[0], 2.0))
            dist.all_to_all(outputs, [source, source])
            assert [one.sum().item() for one in outputs] == [count, 2.0 * count]
            dist.reduce_scatter(outputs[0], [source, source])
            assert torch.equal(outputs[0], torch.full_like(outputs[0], 3.0))
            flat = source.reshape(-1) if kind == "leaf" else source
            dist.all_to_all_single(whole := torch.zeros(flat.shape), flat)
            assert whole.sum() == count * 1.5
            dist.all_gather_into_tensor(whole := torch.zeros(2 * flat.shape[0], *flat.shape[1:]), flat)
            assert whole.sum() == 3.0 * count
            dist.reduce_scatter_tensor(half := torch.zeros(flat.shape[0] // 2, *flat.shape[1:]), flat)
            assert torch.equal(half, torch.full_like(half, 3.0))
            given = source if rank == 1 else torch.full(source.shape, 1.0)
            dist.reduce(given, 0)
            assert torch.equal(given, torch.full_like(given, 3.0 if rank == 0 else 2.0))
            if rank == 0:
                dist.send(source, 1)
            else:
                dist.recv(outputs[0], 0)
                assert torch.equal(outputs[0], torch.full_like(outputs[0], 1.0))
            assert source._version == version
            assert torch.equal(source, torch.full_like(source, value))


@pytest.mark.ranks(2)
def test_a_result_in_a_tensor_whose_elements_share_memory_is_refused_by_the_call():
    with default_group() as rank:
        group, plain, shared = dist.group.WORLD, torch.ones(4), torch.ones(1).expand(4)
        bits = torch.ones(1, dtype=torch.int32).expand(4)
        for call in (
            lambda: dist.all_reduce(shared),
            lambda: dist.all_reduce(bits, dist.ReduceOp.BXOR),
            lambda: dist.reduce(shared, rank),
            lambda: dist.broadcast(shared, 1 - rank),
            lambda: dist.all_gather([plain, shared], plain),
            lambda: dist.gather(plain, [plain, shared], rank),
            lambda: dist.scatter(shared, [plain, plain], rank),
            lambda: dist.all_to_all([plain, shared], [plain, plain]),
            lambda: group.all_to_all_single(shared, plain),
            lambda: dist.reduce_scatter(shared, [plain, plain]),
            lambda: group.all_gather_single(torch.ones(1).expand(8), plain),
            lambda: dist.recv(shared, 1 - rank),
        ):
            with pytest.raises(
                ValueError, match=r"elements of the tensor of shape \(\d,\) share memory, as after expand"
            ):
                call()
        with pytest.raises(TypeError, match=r"all_to_all of .*: inputs and outputs have different dtypes"):
            group.alltoall([plain, plain.int()], [plain, plain])
        with pytest.raises(TypeError, match=r"reduce_scatter of .*: inputs and output have different dtypes"):
            group.reduce_scatter([plain], [[plain, plain.int()]])
        dist.all_reduce(plain)
        assert plain.tolist() == [2.0] * 4


# ---------------------------------------------------------------------------------------- messages from any rank


@pytest.mark.ranks(2, 3)
def test_messages_from_any_rank_arrive_in_the_order_of_the_calls():
    with default_group() as rank:
        for tag in (0, 3):
            if rank == 1:
                for value in range(6):
                    dist.send(torch.full((2,), value + 1.0), 0, tag=tag)
            elif rank == 0:
                tensors = [torch.zeros(2) for _ in range(6)]
                works = [dist.irecv(tensor, tag=tag) for tensor in tensors]
                del works[0]  # takes its message all the same
                works[3].wait()
                assert tensors[0][0] == 1.0 and works[3].source_rank() == 1
                while not works[2].is_completed():
                    pass
                for work in reversed(works):
                    work.wait()
                assert [tensor.tolist() for tensor in tensors] == [[value + 1.0] * 2 for value in range(6)]
        if rank == 0:
            late = torch.zeros(2)
            with pytest.raises(hvd.StalledError, match=r"recv \(from any rank.* within the timeout of 0\.2 s"):
                dist.irecv(late).wait(SHORT)
            dist.distributed_c10d._set_pg_timeout(SHORT)
            with pytest.raises(hvd.StalledError, match=r"recv \(from any rank.* within the timeout of 0\.2 s"):
                dist.recv(torch.zeros(2))
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S))
        hvd.barrier()
        if rank == 1:
            for value in (5.0, 6.0):
                dist.send(torch.full((2,), value), 0)
        elif rank == 0:
            dist.recv(received := torch.zeros(2))
            assert late.tolist() == [5.0, 5.0] and received.tolist() == [6.0, 6.0]
