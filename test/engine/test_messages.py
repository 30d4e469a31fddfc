"""Messages between two ranks, and process sets that their members open alone."""

import os
import random
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from harness.exact import DTYPES, require_equal
from harness.frameworks import on_demand

import ringtrain as hvd
from ringtrain import _core

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


SIZES = (0, 1, 500, 2048, 2049, 8192, 8193, 120_000, 3_000_000)


def exchange_drawn_messages(seed):
    """Of all ranks: messages of many sizes and some tags, begun and waited for in any order that keeps each way's."""
    rank, size, draw = hvd.rank(), hvd.size(), random.Random(seed)
    own = {}  # by way: the numbers and sizes of this rank's messages
    for number in range(60):
        source, dest = draw.sample(range(size), 2)
        way, length = (source, dest, draw.randrange(3)), draw.choice(SIZES)
        if rank in (source, dest):
            own.setdefault(way, []).append((number, length))
    draw = random.Random(f"{seed} {rank}")
    under_way = []
    while any(own.values()):
        source, dest, tag = way = draw.choice([way for way, left in own.items() if left])
        number, length = own[way].pop(0)
        values = (np.arange(length) * 7 + number).astype(np.uint8)
        if rank == source:
            under_way.append((hvd.send_async(values, dest, tag), None, None))
        else:
            received = np.full(length, 255 - number, np.uint8)
            under_way.append((hvd.recv_async(received, source, tag), received, values))
    draw.shuffle(under_way)
    for handle, received, values in under_way:
        hvd.synchronize(handle)
        if values is not None:
            require_equal(received, values)


@pytest.mark.ranks(2, 3)
def test_messages_in_any_order_have_their_values():
    for seed in range(6):
        exchange_drawn_messages(seed)


@pytest.mark.ranks(3, env={"RINGTRAIN_SHARED_MEMORY": "off", "RINGTRAIN_NETWORK": "sockets"})
def test_messages_over_sockets_have_their_values():
    test_messages_in_any_order_have_their_values()


@pytest.mark.ranks(2, env={"RINGTRAIN_SHARED_MEMORY": "off", "RINGTRAIN_NETWORK": "sockets"})
def test_long_messages_that_have_come_leave_no_memory():
    """A sender keeps them only until the receiver has confirmed them."""
    values = np.arange(50_000, dtype=np.float32)

    def exchange(count):
        for _ in range(count):
            if hvd.rank() == 0:
                hvd.send(values, 1)
            else:
                hvd.recv(values, 0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = exchange(500)
    assert exchange(8000) - before < 6 << 20  # of 1.6 GB


@pytest.mark.ranks(3, env={"RINGTRAIN_SHARED_MEMORY": "off", "RINGTRAIN_NETWORK": "mpi"})
def test_messages_over_mpi_have_their_values():
    test_messages_in_any_order_have_their_values()


@pytest.mark.ranks(3, hosts=(2, 1))
def test_messages_within_a_host_and_between_hosts_have_their_values():
    test_messages_in_any_order_have_their_values()


@pytest.mark.ranks(2)
def test_messages_need_no_rounds():
    hvd.barrier()
    rank, rounds = hvd.rank(), hvd.metrics()["rounds"]
    values = np.arange(1000)
    for _ in range(20):
        if rank == 0:
            hvd.send(values, 1)
        else:
            require_equal(hvd.recv(np.empty(1000, int), 0), values)
    assert hvd.metrics()["rounds"] == rounds
    if rank == 0:
        hvd.recv(np.empty(1), 1)  # the other one has looked
    else:
        hvd.send(np.empty(1), 0)
    hvd.barrier()


@pytest.mark.ranks(2)
def test_a_mismatch_fails_both_ends_and_nothing_else():
    rank = hvd.rank()
    for length in (3, 100_000):
        for other, dtype in [(4, "float32"), (length, "int32"), (100_001, "float32")]:
            fitting = (np.arange(length), np.zeros(length, int))
            pair = [(np.full(length, 1.0, "float32"), np.zeros(other, dtype)), fitting]
            if rank == 0:
                handles = [hvd.send_async(sent, 1, tag=5) for sent, _ in pair]
            else:
                handles = [hvd.recv_async(received, 0, tag=5) for _, received in pair]
            with pytest.raises(
                hvd.MismatchError, match=rf"rank 0 sent float32\[{length}\], rank 1 sent {dtype}"
            ) as raised:
                hvd.synchronize(handles[0])
            assert re.search(r"\(rank 0 at \S+messages.py:\d+; rank 1 at \S+messages.py:\d+\)$", str(raised.value))
            hvd.synchronize(handles[1])
            require_equal(pair[1][1], np.arange(length) if rank == 1 else np.zeros(length, int))


@pytest.mark.ranks(2, env={"RINGTRAIN_STALL_WARNING_TIME_S": "0.5", "RINGTRAIN_STALL_SHUTDOWN_TIME_S": "2"})
def test_an_end_that_has_waited_too_long_fails_with_its_other_end(tmp_path):
    rank = hvd.rank()
    for length in (3, 100_000):
        values, received = np.arange(length), np.zeros(length, int)
        for late, tag in ((1, 1), (0, 2)):  # the receiver, the sender
            stalled = tmp_path / f"{length} {tag}"
            while rank == late and not stalled.exists():
                time.sleep(0.01)
            with pytest.raises(hvd.StalledError, match=rf"rank {1 - late} submitted it .*, rank {late} did not"):
                if rank == 0:
                    hvd.send(values, 1, tag=tag)
                else:
                    hvd.recv(received, 0, tag=tag)
            stalled.touch()
            if rank == 0:
                hvd.send(values + tag, 1, tag=tag)
            else:
                require_equal(hvd.recv(received, 0, tag=tag), values + tag)


@pytest.mark.ranks(3)
def test_messages_go_on_while_an_operation_waits_for_another_rank():
    rank = hvd.rank()
    if rank < 2:
        waiting = hvd.allreduce_async(np.ones(2), name="of all", op=hvd.Sum)
        for number in range(10):
            if rank == 0:
                hvd.send(np.full(3, number), 1)
            else:
                require_equal(hvd.recv(np.zeros(3, int), 0), np.full(3, number))
        if rank == 0:
            hvd.send(np.ones(1), 2)
        assert hvd.synchronize(waiting).tolist() == [3, 3]
    else:
        hvd.recv(np.ones(1), 0)  # the others have had all their messages
        assert hvd.allreduce(np.ones(2), name="of all", op=hvd.Sum).tolist() == [3, 3]


@pytest.mark.ranks(3, isolated=True)
def test_a_message_to_a_rank_that_submits_nothing_more_fails_at_once(tmp_path):
    hvd.init()
    rank = hvd.rank()
    refused = tmp_path / "refused"
    if rank == 0:
        early = hvd.send_async(np.ones(3), 1)  # before that rank has ended, it may be
        for length, tag in ((3, 1), (100_000, 2)):
            with pytest.raises(hvd.ShutDownError, match="rank 1 will never submit it: the script has ended there"):
                hvd.send(np.zeros(length), 1, tag=tag)
            with pytest.raises(hvd.ShutDownError, match="rank 1 will never submit it"):
                hvd.recv(np.zeros(length), 1, tag=tag)
        with pytest.raises(hvd.ShutDownError, match="rank 1 will never submit it"):
            hvd.synchronize(early)
        refused.touch()
    end = _core.Operation(_core.OpKind.BARRIER, "<end>")
    while rank == 2 and not refused.exists():  # so not all are blocked
        time.sleep(0.01)
    assert _core.wait(_core.submit(end, [], [], is_awaited=True), 60)


@pytest.mark.ranks(3, isolated=True)
def test_messages_of_a_set_go_on_when_a_rank_outside_has_left():
    hvd.init()
    rank = hvd.rank()
    pair = hvd.add_process_set([0, 1])
    if rank < 2:
        with pytest.raises(hvd.ShutDownError, match=r"rank 2 .* exited early"):
            hvd.recv(np.zeros(3), 1 - rank)  # of all ranks, which is over when rank 2 has left
        for length in (3, 5000, 3_000_000):
            if rank == 0:
                hvd.send(np.full(length, 7, np.uint8), 1, process_set=pair)
            else:
                received = hvd.recv(np.zeros(length, np.uint8), 0, process_set=pair)
                require_equal(received, np.full(length, 7, np.uint8))
    hvd.shutdown()


def wait_for_a_message_that_never_comes(told):
    hvd.init(stall_warning_time_s=0.5, stall_shutdown_time_s=2)
    rank = hvd.rank()
    pair = hvd.add_process_set([0, 1])
    if rank == 0:
        # A message that has met its other end does not count.
        require_equal(hvd.recv(np.zeros(3), 1, process_set=pair), np.ones(3))
        with pytest.raises(hvd.StalledError, match=r"in a message between two ranks for .*tag 5"):
            hvd.recv(np.zeros(3), 1, tag=5, process_set=pair)
        told.touch()
    if rank == 1:
        time.sleep(1)
        hvd.send(np.ones(3), 0, process_set=pair)
        while not told.exists():
            time.sleep(0.01)
    hvd.shutdown()


@pytest.mark.ranks(3, isolated=True)
@pytest.mark.ranks(3, isolated=True, env={"RINGTRAIN_SHARED_MEMORY": "off"}, way="network")
def test_a_message_without_its_other_end_ends_the_wait_when_a_rank_outside_has_left(tmp_path):
    wait_for_a_message_that_never_comes(tmp_path / "told")


@pytest.mark.ranks(2, env={"RINGTRAIN_SHARED_MEMORY": "off", "RINGTRAIN_NETWORK": "sockets"})
def test_a_message_after_a_pause_wakes_its_ranks():
    """And is not found by chance when they look around, five times a second."""
    waits = []
    for number in range(15):
        time.sleep(0.03 if hvd.rank() == 0 else 0)
        begin = time.monotonic()
        values = np.full(4, number)
        if hvd.rank() == 0:
            hvd.send(values, 1)
            hvd.recv(values, 1)
        else:
            hvd.recv(values, 0)
            time.sleep(0.03)
            hvd.send(values, 0)
        assert values.tolist() == [number] * 4
        waits.append(time.monotonic() - begin)
    assert sorted(waits)[len(waits) // 2] < 0.15, waits  # 0.03 s, and 0.2 s where nobody is woken


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
