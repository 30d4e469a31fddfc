"""Every call of torch.distributed, with exact data: `python c10d_calls.py BACKEND [URL]`, as a rank of any launcher.

Calls that pass with gloo have to pass with ringtrain. Calls that gloo refuses are made with ringtrain alone.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

torch.set_num_threads(1)
IS_GLOO = False  # of the groups that are checked

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
R = dist.ReduceOp


def same(got, expected):
    assert got.shape == expected.shape and got.dtype == expected.dtype, (got, expected)
    assert torch.equal(got, expected), (got, expected)


def data(rank, count, dtype):
    values = (torch.arange(count) * 3 + rank * 5) % 7 + 1
    return values.to(dtype)


def of_all(group_ranks, count, dtype):
    return [data(rank, count, dtype) for rank in group_ranks]


def reduced(tensors, operation):
    total = tensors[0].clone()
    for one in tensors[1:]:
        total = operation(total, one)
    return total


OPERATIONS = {
    R.SUM: torch.add,
    R.PRODUCT: torch.mul,
    R.MIN: torch.minimum,
    R.MAX: torch.maximum,
}
BITWISE = {R.BAND: torch.bitwise_and, R.BOR: torch.bitwise_or, R.BXOR: torch.bitwise_xor}


def reductions(group, ranks, me):
    size = len(ranks)
    for dtype in FLOATS + INTEGERS:
        for op, operation in OPERATIONS.items():
            for count in (1, 5, 1031):
                expected = reduced(of_all(range(size), count, dtype), operation)
                tensor = data(me, count, dtype)
                dist.all_reduce(tensor, op, group=group)
                same(tensor, expected)
                root = ranks[size - 1]
                tensor = data(me, count, dtype)
                dist.reduce(tensor, root, op, group=group)
                if me == size - 1:
                    same(tensor, expected)
    for dtype in INTEGERS:
        for op, operation in BITWISE.items():
            tensor = data(me, 33, dtype)
            dist.all_reduce(tensor, op, group=group)
            same(tensor, reduced(of_all(range(size), 33, dtype), operation))
    for dtype in COMPLEX:
        tensor = data(me, 9, dtype) * (1 + 2j)
        dist.all_reduce(tensor, group=group)
        same(tensor, reduced([one * (1 + 2j) for one in of_all(range(size), 9, dtype)], torch.add))
    if not IS_GLOO:
        tensor = data(me, 8, torch.float32) * size
        dist.all_reduce(tensor, R.AVG, group=group)
        same(tensor, reduced(of_all(range(size), 8, torch.float32), torch.add))
    scalar = torch.tensor(float(me + 1))
    dist.all_reduce(scalar, group=group)
    same(scalar, torch.tensor(float(size * (size + 1) // 2)))
    empty = torch.empty(0)
    dist.all_reduce(empty, group=group)
    if not IS_GLOO:
        matrix = data(me, 12, torch.float32).reshape(3, 4).t()  # not contiguous
        dist.all_reduce(matrix, group=group)
        same(matrix, reduced(of_all(range(size), 12, torch.float32), torch.add).reshape(3, 4).t())
    works = [dist.all_reduce(data(me, 100, torch.float64), async_op=True, group=group) for _ in range(20)]
    assert all(work.wait() for work in works)
    tensor = data(me, 4, torch.float32)
    (result,) = dist.all_reduce(tensor, async_op=True, group=group).get_future().wait()
    same(result, reduced(of_all(range(size), 4, torch.float32), torch.add))


def sparse(group, ranks, me):
    size = len(ranks)
    tensor = torch.sparse_coo_tensor(torch.tensor([[me, me + 1]]), torch.ones(2, 3), (size + 1, 3))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    result = tensor if not IS_GLOO else work.result()[0]
    expected = torch.zeros(size + 1, 3)
    for rank in range(size):
        expected[rank : rank + 2] += 1
    same(result.to_dense(), expected)


def moving(group, ranks, me):
    size = len(ranks)
    everything = FLOATS + INTEGERS + COMPLEX + [torch.bool]
    for dtype in everything:
        for count in (1, 6, 1031):
            tensor = data(me, count, dtype)
            dist.broadcast(tensor, ranks[-1], group=group)
            same(tensor, data(size - 1, count, dtype))
            gathered = [torch.empty(count, dtype=dtype) for _ in range(size)]
            dist.all_gather(gathered, data(me, count, dtype), group=group)
            for got, expected in zip(gathered, of_all(range(size), count, dtype), strict=False):
                same(got, expected)
            output = torch.empty(size * count, dtype=dtype)
            dist.all_gather_into_tensor(output, data(me, count, dtype), group=group)
            same(output, torch.cat(of_all(range(size), count, dtype)))
            if IS_GLOO and dtype in (torch.bfloat16, *COMPLEX):
                continue
            targets = [torch.empty(count, dtype=dtype) for _ in range(size)] if me == 0 else None
            dist.gather(data(me, count, dtype), targets, ranks[0], group=group)
            for got, expected in zip(targets or [], of_all(range(size), count, dtype), strict=False):
                same(got, expected)
            target = torch.empty(count, dtype=dtype)
            dist.scatter(target, of_all(range(size), count, dtype) if me == size - 1 else None, ranks[-1], group=group)
            same(target, data(me, count, dtype))
    if not IS_GLOO:
        stacked = torch.empty(size, 2, 3)
        dist.all_gather_into_tensor(stacked, torch.full((2, 3), float(me)), group=group)
        same(stacked, torch.arange(float(size)).reshape(-1, 1, 1).expand(size, 2, 3).contiguous())


def scattering(group, ranks, me):
    size = len(ranks)
    for dtype in [torch.float32, torch.bfloat16, torch.int64]:
        for op, operation in OPERATIONS.items():
            lists = [[data(rank * size + part, 7, dtype) for part in range(size)] for rank in range(size)]
            expected = reduced([of_rank[me] for of_rank in lists], operation)
            output = torch.empty(7, dtype=dtype)
            dist.reduce_scatter(output, lists[me], op, group=group)
            same(output, expected)
            output = torch.empty(7, dtype=dtype)
            dist.reduce_scatter_tensor(output, torch.cat(lists[me]), op, group=group)
            same(output, expected)
    if not IS_GLOO:
        output = torch.empty(3, dtype=torch.int32)
        dist.reduce_scatter_tensor(output, data(me, 3 * size, torch.int32), R.BXOR, group=group)
        whole = reduced(of_all(range(size), 3 * size, torch.int32), torch.bitwise_xor)
        same(output, whole[3 * me : 3 * me + 3])


def all_to_all(group, ranks, me):
    size = len(ranks)
    for dtype in [torch.float32, torch.int64, torch.complex64, torch.bfloat16]:
        output = torch.empty(size * 2, dtype=dtype)
        dist.all_to_all_single(output, torch.cat([data(me * size + to, 2, dtype) for to in range(size)]), group=group)
        same(output, torch.cat([data(rank * size + me, 2, dtype) for rank in range(size)]))
    splits = [(me + to) % 3 for to in range(size)]
    output = torch.empty(sum((rank + me) % 3 for rank in range(size)), 2)
    sent = torch.cat([torch.full((count, 2), float(10 * me + to)) for to, count in enumerate(splits)])
    dist.all_to_all_single(output, sent, [(rank + me) % 3 for rank in range(size)], splits, group=group)
    same(output, torch.cat([torch.full(((rank + me) % 3, 2), float(10 * rank + me)) for rank in range(size)]))
    if not IS_GLOO:
        values = torch.tensor([float(10 * me + to) for to in range(size)])
        dist.all_to_all_single(values, values, group=group)
        same(values, torch.tensor([float(10 * rank + me) for rank in range(size)]))
        columns = torch.empty(2, size).t()  # not contiguous
        dist.all_to_all_single(columns, torch.full((size, 2), float(me)), group=group)
        same(columns, torch.arange(float(size)).unsqueeze(1).expand(size, 2))
        outputs = [torch.empty(rank + 1) for rank in range(size)]
        dist.all_to_all(outputs, [torch.full((me + 1,), float(10 * me + to)) for to in range(size)], group=group)
        for rank, got in enumerate(outputs):
            same(got, torch.full((rank + 1,), float(10 * rank + me)))


def point_to_point(group, ranks, me):
    size = len(ranks)
    if size == 1:
        return
    for dtype in FLOATS + INTEGERS + COMPLEX + [torch.bool]:
        for count in (1, 1031, 1 << 20 if dtype is torch.float32 else 17):
            if me == 0:
                dist.send(data(3, count, dtype), ranks[1], group=group)
                got = torch.empty(count, dtype=dtype)
                dist.recv(got, ranks[1], group=group)
                same(got, data(4, count, dtype))
            elif me == 1:
                got = torch.empty(count, dtype=dtype)
                assert dist.recv(got, ranks[0], group=group) == ranks[0]
                same(got, data(3, count, dtype))
                dist.send(data(4, count, dtype), ranks[0], group=group)
    # Tags, in another order than they are sent.
    if me == 0:
        works = [dist.isend(torch.full((3,), float(tag)), ranks[1], tag=tag, group=group) for tag in range(5)]
        for work in works:
            work.wait()
    elif me == 1:
        for tag in reversed(range(5)):
            got = torch.empty(3)
            dist.recv(got, ranks[0], tag=tag, group=group)
            same(got, torch.full((3,), float(tag)))
    # A ring, all at once.
    got = torch.empty(5)
    operations = [
        dist.P2POp(dist.isend, torch.full((5,), float(me)), ranks[(me + 1) % size], group),
        dist.P2POp(dist.irecv, got, ranks[(me - 1) % size], group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same(got, torch.full((5,), float((me - 1) % size)))
    # From any rank.
    if me == 0:
        seen = set()
        for _ in range(2 * (size - 1)):
            got = torch.empty(2, dtype=torch.int64)
            source = dist.recv(got, group=group, tag=9)
            assert got[0].item() == source
            seen.add((source, got[1].item()))
        assert seen == {(ranks[rank], number) for rank in range(1, size) for number in range(2)}
    else:
        for number in range(2):
            dist.send(torch.tensor([ranks[me], number]), ranks[0], group=group, tag=9)
    if size > 2:
        if me == 0:
            tensors = [torch.empty(1) for _ in range(size - 1)]
            for work in [dist.irecv(one, group=group, tag=11) for one in tensors]:
                work.wait()
            assert sorted(one.item() for one in tensors) == [float(rank) for rank in range(1, size)]
        else:
            dist.send(torch.tensor([float(me)]), ranks[0], group=group, tag=11)


def objects(group, ranks, me):
    size = len(ranks)
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": me, "text": "x" * (me * 100)}, group=group)
    assert [one["rank"] for one in gathered] == list(range(size)), gathered
    told = [("a", me), {"b": 2}] if me == 0 else [None, None]
    dist.broadcast_object_list(told, ranks[0], group=group)
    assert told == [("a", 0), {"b": 2}]
    collected = [None] * size if me == 0 else None
    dist.gather_object([me], collected, ranks[0], group=group)
    assert me or collected == [[rank] for rank in range(size)]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {rank}" for rank in range(size)] if me == 0 else None, ranks[0], group=group)
    assert mine == [f"for {me}"]
    if size > 1:
        if me == 0:
            dist.send_object_list([1, "two"], ranks[1], group=group)
        elif me == 1:
            received = [None, None]
            dist.recv_object_list(received, ranks[0], group=group)
            assert received == [1, "two"]


def synchronizing(group, ranks, me):
    dist.barrier(group=group)
    dist.barrier(group=group, async_op=True).wait()
    dist.monitored_barrier(group=group, timeout=timedelta(seconds=30))
    dist.monitored_barrier(group=group, timeout=timedelta(seconds=30), wait_all_ranks=True)


def coalescing(group, ranks, me):
    size = len(ranks)
    tensors = [data(me, count, torch.float32) for count in (3, 5, 7)]
    with dist._coalescing_manager(group=group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    for tensor in tensors:
        same(tensor, reduced(of_all(range(size), len(tensor), torch.float32), torch.add))
    if IS_GLOO:
        return
    outputs = [torch.empty(size * count) for count in (2, 4)]
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(output, torch.full((len(output) // size,), float(me)), group=group)
    manager.wait()
    for output in outputs:
        same(output, torch.arange(float(size)).repeat_interleave(len(output) // size))
    outputs = [torch.empty(count) for count in (2, 4)]
    with dist._coalescing_manager(group=group):
        for output in outputs:
            dist.reduce_scatter_tensor(output, torch.full((len(output) * size,), me + 1.0), group=group)
    for output in outputs:
        same(output, torch.full((len(output),), size * (size + 1) / 2))
    with dist._coalescing_manager(group=group, device=torch.device("cpu")):
        dist.broadcast(tensors[0], ranks[0], group=group)
        dist.all_reduce(tensors[1], group=group)


def functional(group, ranks, me):
    import torch.distributed._functional_collectives as funcol

    size = len(ranks)
    name = group if group is not None else dist.group.WORLD
    same(funcol.all_reduce(torch.full((3,), me + 1.0), "sum", name).clone(), torch.full((3,), size * (size + 1) / 2))
    same(
        funcol.all_gather_tensor(torch.full((2, 2), float(me)), 0, name).clone(),
        torch.arange(float(size)).repeat_interleave(4).reshape(-1, 2),
    )
    same(
        funcol.reduce_scatter_tensor(torch.full((2 * size,), me + 1.0), "sum", 0, name).clone(),
        torch.full((2,), size * (size + 1) / 2),
    )
    same(
        funcol.all_to_all_single(torch.full((size,), float(me)), [1] * size, [1] * size, name).clone(),
        torch.arange(float(size)),
    )
    same(funcol.broadcast(torch.full((2,), float(me)), 0, name).clone(), torch.zeros(2))
    reduced_all = funcol.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", name)
    assert [one.tolist() for one in reduced_all] == [[size] * 2, [size] * 3]


def run_all(group=None, ranks=None):
    ranks = ranks or list(range(dist.get_world_size()))
    me = dist.get_rank(group)
    for call in (
        reductions,
        sparse,
        moving,
        scattering,
        all_to_all,
        point_to_point,
        objects,
        synchronizing,
        coalescing,
        functional,
    ):
        call(group, ranks, me)


def check(backend, url, **place):
    """Run every call in the default group and in others, from its beginning to its end."""
    global IS_GLOO
    dist.init_process_group(backend, init_method=url, timeout=timedelta(seconds=60), **place)
    assert dist.get_backend() == backend
    IS_GLOO = type(dist.group.WORLD).__module__.startswith("torch.")
    run_all()
    size, rank = dist.get_world_size(), dist.get_rank()
    if size > 2:
        members = [[0, size - 1], list(range(1, size)), list(range(size))]
        groups = [dist.new_group(ranks) for ranks in members]
        for ranks, group in zip(members, groups, strict=True):
            if rank in ranks:
                run_all(group, ranks)
        if rank in members[0] and not IS_GLOO:  # two groups of the same ranks at once
            again = dist.new_group(members[0], use_local_synchronization=True)
            one = dist.all_reduce(a := torch.ones(3), group=again, async_op=True)
            other = dist.all_reduce(b := torch.ones(4), group=groups[0], async_op=True)
            other.wait(), one.wait()
            assert a.tolist() == [2.0] * 3 and b.tolist() == [2.0] * 4
            dist.destroy_process_group(again)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} of {size}: every call is right", flush=True)


if __name__ == "__main__":
    check(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "env://")
