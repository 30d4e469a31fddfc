"""Messages between two ranks, and process sets that their members open alone."""

import threading

import numpy as np
import pytest
from harness.exact import DTYPES, require_equal
from harness.frameworks import on_demand

import ringtrain as hvd

torch = on_demand("torch")
torch_hvd = on_demand("ringtrain.torch")


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
def test_messages_arrive_in_order_whatever_their_size_and_dtype():
    rank, size = hvd.rank(), hvd.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in DTYPES:
        for shape in [(), (0,), (3,), (2, 70_000)]:
            sent = np.full(shape, rank % 2, dtype)
            handle = hvd.send_async(sent, dest=after)
            received = np.full(shape, 1, dtype)
            assert hvd.synchronize(hvd.recv_async(received, source=before)) is received
            hvd.synchronize(handle)
            require_equal(received, np.full(shape, before % 2, dtype))
    handles = [hvd.send_async(np.full(4, number), after, tag=number % 2) for number in range(20)]
    for tag in (1, 0):
        for number in range(tag, 20, 2):
            assert hvd.recv(np.empty(4, int), before, tag=tag).tolist() == [number] * 4
    for handle in handles:
        assert hvd.synchronize(handle) is None


@pytest.mark.ranks(2, 3)
def test_a_small_message_that_is_repeated_travels_with_its_bit():
    rank, size = hvd.rank(), hvd.size()
    for elements in (1, 16, 17):
        before = hvd.metrics()["came_with_values"]
        for number in range(40):
            if rank == 0:
                hvd.send(np.full(elements, number, "float32"), dest=1, tag=elements)
            elif rank == 1:
                received = hvd.recv(np.zeros(elements, "float32"), source=0, tag=elements)
                require_equal(received, np.full(elements, number, "float32"))
        hvd.barrier()
        if rank < 2:
            with_values = hvd.metrics()["came_with_values"] - before
            assert 20 <= with_values <= 40 if elements <= 16 else with_values == 0
    for number in range(30):  # others are under way at the same time
        pair = [hvd.send_async(np.full(3, number + rank), (rank + 1) % size, tag=9)]
        pair.append(hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="beside"))
        received = hvd.recv(np.zeros(3, int), (rank - 1) % size, tag=9)
        assert received.tolist() == [number + (rank - 1) % size] * 3
        for handle in pair:
            hvd.synchronize(handle)


@pytest.mark.ranks(3, env={"RINGTRAIN_SHARED_MEMORY": "off"})
def test_a_small_message_that_is_repeated_travels_with_its_bit_over_a_network():
    test_a_small_message_that_is_repeated_travels_with_its_bit()


@pytest.mark.ranks(2)
def test_messages_of_tensors_are_received_in_place():
    rank = hvd.rank()
    for shape, step in [((6,), 1), ((6, 4), 2)]:
        rows = torch.arange(24.0).reshape(6, 4)[:, ::step] if len(shape) == 2 else torch.arange(6.0)
        if rank == 0:
            torch_hvd.send(rows, dest=1)
            torch_hvd.synchronize(torch_hvd.send_async(rows, dest=1, tag=1))
        else:
            received = torch.zeros(rows.shape[::-1]).t() if len(shape) == 2 else torch.zeros(6)
            version = received._version
            assert torch_hvd.recv(received, source=0) is received
            assert torch.equal(received, rows) and received._version > version
            received = torch_hvd.synchronize(torch_hvd.recv_async(torch.empty(rows.shape), source=0, tag=1))
            assert torch.equal(received, rows)
    group = torch_hvd.new_group([0, 1])
    assert torch_hvd.allreduce(torch.ones(2), op=torch_hvd.Sum, process_set=group).tolist() == [2, 2]
    torch_hvd.remove_process_set(group)
    if rank == 0:
        hvd.send(np.arange(3, dtype=np.float32), dest=1)
    else:
        assert hvd.recv(torch.zeros(3), source=0).tolist() == [0, 1, 2]


@pytest.mark.ranks(3)
def test_other_ranks_take_no_part_in_a_message_or_in_a_group():
    rank = hvd.rank()
    if rank == 1:
        assert hvd.allreduce(np.ones(2), name="after", op=hvd.Sum).tolist() == [3, 3]
        return
    group = hvd.new_group([2, 0])
    assert (group.ranks, group.size(), group.rank()) == ([0, 2], 2, [0, 2].index(rank))
    assert hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=group).tolist() == [2, 2]
    if rank == 0:
        hvd.send(np.arange(3), dest=2, process_set=group)
    else:
        assert hvd.recv(np.zeros(3, int), source=0, process_set=group).tolist() == [0, 1, 2]
    again = hvd.new_group([0, 2])
    assert again.process_set_id != group.process_set_id
    assert hvd.remove_process_set(group) and not hvd.remove_process_set(group)
    with pytest.raises(ValueError, match="is not registered"):
        hvd.barrier(process_set=group)
    assert hvd.broadcast(np.full(2, rank), 2, process_set=again).tolist() == [2, 2]
    hvd.remove_process_set(again)
    assert hvd.allreduce(np.ones(2), name="after", op=hvd.Sum).tolist() == [3, 3]


@pytest.mark.ranks(2)
def test_threads_of_a_rank_open_and_remove_groups_of_their_own():
    sums = []

    def work(number):
        for _ in range(5):
            group = hvd.new_group([0, 1])
            sums.append(hvd.allreduce(np.ones(1), name=f"of {number}", op=hvd.Sum, process_set=group)[0])
            hvd.remove_process_set(group)

    work(0)
    thread = threading.Thread(target=work, args=(1,))
    thread.start()
    thread.join()
    assert sums == [2.0] * 10


@pytest.mark.ranks(2)
def test_mistakes_in_messages_and_groups_are_refused_where_they_are_made():
    rank = hvd.rank()
    for call, argument in [(hvd.send, "dest"), (hvd.recv, "source")]:
        kind = call.__name__
        with pytest.raises(ValueError, match=rf"{kind}: {argument} {rank} is this rank; a rank cannot send to itself"):
            call(np.ones(2), rank)
        with pytest.raises(ValueError, match=rf"{kind}: {argument} 2 is not one of the ranks 0-1"):
            call(np.ones(2), 2)
        with pytest.raises(TypeError, match=rf"{kind}: {argument} must be an integer, not 'a'"):
            call(np.ones(2), "a")
        with pytest.raises(ValueError, match=rf"{kind}: tag must be at least 0 and less than 2\*\*31, not -1"):
            call(np.ones(2), 1 - rank, tag=-1)
        with pytest.raises(TypeError, match=rf"{kind}: process_set must be a ProcessSet"):
            call(np.ones(2), 1 - rank, process_set=[0, 1])
    with pytest.raises(TypeError, match="in place needs a NumPy array, not a float"):
        hvd.recv(1.0, 1 - rank)
    with pytest.raises(ValueError, match="this one is read-only"):
        hvd.recv(np.broadcast_to(np.ones(1), 2), 1 - rank)
    with pytest.raises(ValueError, match=rf"new_group: rank {rank} is not one of the ranks \[{1 - rank}\]"):
        hvd.new_group([1 - rank])
    with pytest.raises(ValueError, match="have rank 5, but the job has only 2 ranks"):
        hvd.new_group([0, 1, 5])
    title = r'transfer "message 1 from rank 0 to 1, tag 99": rank 0 sent float64\[2\], rank 1 sent float64\[3\]'
    with pytest.raises(hvd.MismatchError, match=title):
        if rank == 0:
            hvd.send(np.ones(2), 1, tag=99)
        else:
            hvd.recv(np.ones(3), 0, tag=99)
