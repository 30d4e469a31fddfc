"""Groups whose ranks are in another order than in the job, groups that are split and merged, and their barriers."""

import random
import time
from datetime import timedelta

import pytest
from harness.frameworks import need_torch_of_backend, on_demand, version_of
from test_c10d import default_group

import ringtrain as hvd

need_torch_of_backend()

torch = on_demand("torch")
dist = on_demand("torch.distributed")

if version_of("torch") < (2, 13):
    pytest.skip("this PyTorch sorts the ranks of every group", allow_module_level=True)


def require_places(group, order, count):
    """Every operation of the group that knows places, with arrays of so many elements."""
    rank, size, place = dist.get_rank(), len(order), dist.get_rank(group)
    own = torch.full((count,), float(rank))

    def empty(sizes):
        return [torch.zeros(one) for one in sizes]

    def last_of(tensors):
        return [int(tensor[-1]) for tensor in tensors]

    gathered = empty([count] * size)
    dist.all_gather(gathered, own, group=group)
    assert last_of(gathered) == order
    uneven = empty(range(1, size + 1))
    dist.all_gather(uneven, torch.full((place + 1,), float(rank)), group=group)
    assert last_of(uneven) == order
    objects = [None] * size
    dist.all_gather_object(objects, rank, group=group)
    assert objects == order

    for root in range(size):
        values = own.clone()
        dist.broadcast(values, group=group, group_src=root)
        assert last_of([values]) == [order[root]]
        part = torch.zeros(count)
        parts = [torch.full((count,), 10.0 + one) for one in range(size)]
        dist.scatter(part, parts if place == root else None, group=group, group_src=root)
        assert last_of([part]) == [10 + place]
        gathered = empty([count] * size) if place == root else None
        dist.gather(own, gathered, group=group, group_dst=root)
        assert gathered is None or last_of(gathered) == order

    total, part = own.clone(), torch.zeros(count)
    dist.all_reduce(total, group=group)
    dist.reduce_scatter(part, [torch.full((count,), float(rank + one)) for one in range(size)], group=group)
    assert last_of([total, part]) == [sum(order), sum(order) + size * place]
    received = empty(range(1, size + 1))
    dist.all_to_all(received, [torch.full((place + 1,), 10.0 * rank + one) for one in range(size)], group=group)
    assert last_of(received) == [10 * one + place for one in order]

    sending = dist.isend(own, group=group, group_dst=(place + 1) % size)
    dist.recv(received := torch.zeros(count), group=group, group_src=(place - 1) % size)
    sending.wait()
    assert last_of([received]) == [order[place - 1]]


@pytest.mark.ranks(3)
@pytest.mark.ranks(3, env={"RINGTRAIN_SHARED_MEMORY": "off"}, way="network")
@pytest.mark.ranks(4, hosts=(2, 2), isolated=True, way="hosts")
def test_places_are_those_that_the_script_gave():
    with default_group() as rank:
        size = dist.get_world_size()
        orders = [[*range(size)][::-1], [2, 0, 1], [1, 0], [size - 1, 1], random.Random(1).sample(range(size), size)]
        for order in orders:
            group = dist.new_group(order, sort_ranks=False)
            if rank in order:
                assert dist.get_process_group_ranks(group) == order
                for count in (1, 40_000):
                    for _ in range(2):  # what comes again is not announced again
                        require_places(group, order, count)
                dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_orders_that_differ_are_refused_on_all_ranks():
    with default_group() as rank:
        with pytest.raises(hvd.MismatchError, match="asked for process sets"):
            dist.new_group([0, 1] if rank == 0 else [1, 0], sort_ranks=False)
        dist.all_reduce(total := torch.ones(1))
        assert total.item() == 2


# ------------------------------------------------------------------------------------------------ split and merged


@pytest.mark.ranks(3)
def test_a_group_is_split_in_any_order_and_its_parts_are_split_again():
    with default_group() as rank:
        group = dist.group.WORLD
        assert group.supports_splitting
        part = group.split_group([2, 0], group_name="part", group_desc="of two")
        assert (part is None) == (rank == 1) and group.comm_split_count() == (part is not None)
        if part is not None:
            assert (part.rank(), part.size(), part.group_name, part.group_desc) == (1 - rank // 2, 2, "part", "of two")
            gathered = [torch.zeros(1), torch.zeros(1)]
            part.allgather([gathered], [torch.tensor([float(rank)])]).wait()
            assert [one.item() for one in gathered] == [2, 0]
            with pytest.raises(ValueError, match="comes twice"):
                part.split_group([0, 0])
            with pytest.raises(ValueError, match="has no rank 2"):
                part.split_group([2])
            alone = part.split_group([part.rank()])
            alone.allreduce([total := torch.ones(1)]).wait()
            assert total.item() == 1
            alone.shutdown(), part.shutdown()
            with pytest.raises(hvd.ShutDownError):
                part.split_group([0])


@pytest.mark.ranks(3)
def test_groups_are_merged_with_ranks_of_others(tmp_path):
    with default_group() as rank:
        group = dist.group.WORLD
        side = group.split_group([0] if rank == 0 else [1, 2], group_name=f"side {min(rank, 1)}")
        store = dist.FileStore(str(tmp_path / "store"), 3)
        merged = side.merge_remote_group(store, 3, timedelta(seconds=30), "merged")
        places = [None] * 3
        dist.all_gather_object(places, (rank, merged.rank()))
        assert sorted(place for _, place in places) == [0, 1, 2]
        gathered = [torch.zeros(1) for _ in range(3)]
        merged.allgather([gathered], [torch.tensor([float(rank)])]).wait()
        assert [one.item() for one in gathered] == [one for one, _ in sorted(places, key=lambda place: place[1])]
        with pytest.raises(ValueError, match="3 ranks have come already"):
            side.merge_remote_group(store, 3, timedelta(seconds=30), "again")
        with pytest.raises(hvd.StalledError, match="1 of 2 ranks came"):
            store = dist.FileStore(str(tmp_path / f"alone {rank}"), 1)
            side.merge_remote_group(store, 2, timedelta(seconds=0.2))
        merged.shutdown(), side.shutdown()


@pytest.mark.ranks(2)
def test_split_group_of_torch_takes_the_groups_where_there_is_an_accelerator():
    """Which a CPU stands for here."""
    with default_group() as rank, pytest.MonkeyPatch.context() as monkeypatch:
        cpu = torch.device("cpu", 0)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: cpu)
        dist.group.WORLD.bound_device_id = cpu
        part = dist.split_group(split_ranks=[[0, 1]])
        assert dist.get_rank(part) == rank and dist.get_process_group_ranks(part) == [0, 1]
        dist.all_reduce(total := torch.full((1,), rank + 1.0), group=part)
        assert total.item() == 3


# -------------------------------------------------------------------------------------------------------- barriers


class SlowStore:
    """A store whose answers take a while."""

    def __init__(self, store):
        self._store = store

    def get(self, key):
        time.sleep(0.5)
        return self._store.get(key)

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.mark.ranks(2)
def test_a_monitored_barrier_may_be_the_last_call_of_the_rank_that_has_the_store():
    with default_group() as rank:
        group = dist.group.WORLD
        if rank == 1:
            group._store = SlowStore(group._store)
        group.monitored_barrier()


@pytest.mark.ranks(2)
def test_a_barrier_of_a_group_hears_nothing_of_an_earlier_group_of_the_same_name():
    with default_group() as rank:
        for _ in range(2):
            part = dist.group.WORLD.split_group([0, 1], group_name="part")
            if rank == 0:
                with pytest.raises(hvd.StalledError, match="Rank 1 failed to pass"):
                    part.monitored_barrier(timedelta(seconds=0.2))
            dist.barrier()
            if rank == 1:
                with pytest.raises(hvd.StalledError):
                    part.monitored_barrier(timedelta(seconds=0.2))
            dist.barrier()
            part.shutdown()
