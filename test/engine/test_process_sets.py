"""Process sets: overlapping ones, their lifetime, and what goes wrong with them."""

import copy
import pickle

import numpy as np
import pytest
from harness.exact import require_equal

import ringtrain as hvd


@pytest.mark.fast
@pytest.mark.ranks(2, 3, 4)
def test_overlapping_sets_in_different_orders():
    size, rank = hvd.size(), hvd.rank()
    pairs = [hvd.add_process_set([i, (i + 1) % size]) for i in range(size if size > 2 else 0)]
    mine = [pair for pair in pairs if pair.included()]
    if rank % 2:
        mine.reverse()
    for step in range(20):
        handles = {
            one: hvd.allreduce_async(np.full(5 + step, rank + 1.0), op=hvd.Sum, name=f"pair{step}", process_set=one)
            for one in mine
        }
        world = hvd.allreduce_async(np.full(3, 1.0), op=hvd.Sum, name=f"world{step}")
        for one, handle in handles.items():
            require_equal(hvd.synchronize(handle), np.full(5 + step, sum(r + 1.0 for r in one.ranks)))
        require_equal(hvd.synchronize(world), np.full(3, float(size)))
    for pair in pairs:
        assert hvd.remove_process_set(pair)


@pytest.mark.fast
@pytest.mark.ranks(3, 4)
def test_every_operation_within_a_set():
    size, rank = hvd.size(), hvd.rank()
    last = hvd.add_process_set(list(range(1, size)))
    assert (last.size(), last.ranks) == (size - 1, list(range(1, size)))
    if last.included():
        members, place = last.size(), last.rank()
        assert place == rank - 1
        values = np.full((members, 2), float(rank))
        require_equal(hvd.allreduce(values, process_set=last), np.full((members, 2), size / 2))
        require_equal(hvd.allgather(np.array([rank]), process_set=last), np.arange(1, size))
        require_equal(hvd.broadcast(np.array([rank]), size - 1, process_set=last), np.array([size - 1]))
        require_equal(hvd.alltoall(np.full(members, rank), process_set=last), np.arange(1, size))
        summed = hvd.reducescatter(values, op=hvd.Sum, process_set=last)
        require_equal(summed, np.full((1, 2), float(sum(range(1, size)))))
        hvd.barrier(process_set=last)
        assert hvd.broadcast_object({"from": rank}, 1, process_set=last) == {"from": 1}
        assert hvd.allgather_object(place, process_set=last) == list(range(members))
        with pytest.raises(ValueError, match="root_rank 0 is not one of the ranks"):
            hvd.broadcast(values, 0, process_set=last)
    else:
        with pytest.raises(ValueError, match="does not belong to it"):
            hvd.allreduce(np.ones(2), process_set=last)
        with pytest.raises(ValueError, match=r"rank 0 does not belong to ProcessSet\(.*included\(\)"):
            last.rank()
    hvd.remove_process_set(last)


@pytest.mark.ranks(2, 3)
def test_a_removed_set_cannot_be_used_and_can_be_added_again():
    alone = hvd.add_process_set([0])
    number = alone.process_set_id
    assert hvd.get_process_set_ids_and_ranks()[number] == [0]
    assert hvd.remove_process_set(alone)
    assert not hvd.remove_process_set(alone)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert (alone.process_set_id, alone.size(), alone.rank()) == (None, None, None)
    with pytest.raises(ValueError, match="is not registered"):
        hvd.allreduce(np.ones(2), process_set=alone)
    again = hvd.add_process_set(hvd.ProcessSet([0]))
    assert again.process_set_id > number
    if again.included():
        require_equal(hvd.allreduce(np.ones(2), process_set=again), np.ones(2))
    hvd.remove_process_set(again)


@pytest.mark.ranks(3)
def test_pending_operations_fail_when_their_set_is_removed():
    pair = hvd.add_process_set([0, 1])
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(np.ones(2), name="never", process_set=pair)
    hvd.remove_process_set(pair)
    if hvd.rank() == 0:
        with pytest.raises(hvd.RingtrainError, match="was removed"):
            hvd.synchronize(handle)
    require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, 3.0))


@pytest.mark.ranks(3)
def test_an_operation_and_the_removal_of_its_set_at_the_same_time():
    for _ in range(30):
        pair = hvd.add_process_set([0, 2])
        handles = []
        if pair.included():
            hvd.broadcast(np.ones(5), 2, name="b", process_set=pair)
            handles.append(hvd.broadcast_async(np.ones(5), 2, name="b", process_set=pair))
            handles.append(hvd.allreduce_async(np.ones(5), name="a", process_set=pair))
        hvd.remove_process_set(pair)
        assert all(handle.poll() for handle in handles)
        require_that_both_ends_are_alike([ended_well(handle, np.ones(5)) for handle in handles], (0, 2))
        require_equal(hvd.allreduce(np.ones(2), name="world"), np.ones(2))


def ended_well(handle, expected):
    """Whether it has its result; if not, its process set was removed before."""
    try:
        require_equal(hvd.synchronize(handle), expected)
    except hvd.RingtrainError as error:
        assert "was removed" in str(error)
        return False
    return True


def require_that_both_ends_are_alike(ends, members):
    """Of operations that were submitted before their set was removed: carried out by both members, or by none."""
    of_ranks = hvd.allgather_object(ends)
    assert of_ranks[members[0]] == of_ranks[members[1]], of_ranks


@pytest.mark.ranks(3)
@pytest.mark.parametrize("priority", [0, -1])
def test_a_set_is_removed_while_what_was_agreed_for_it_waits_for_more_urgent_operations(priority):
    for _ in range(3):
        pair = hvd.add_process_set([0, 1])
        before = hvd.allreduce_async_(np.ones(4_000_000), name="before")  # all else is agreed on behind it
        late = []
        if pair.included():
            late = [hvd.broadcast_async(np.full(5, hvd.rank()), 1, name="late", process_set=pair, priority=priority)]
        urgent = [hvd.broadcast_async(np.ones(5), 0, name=f"urgent {i}", priority=1) for i in range(200)]
        for handle in (before, urgent[0]):
            hvd.synchronize(handle)
        hvd.remove_process_set(pair)
        assert all(handle.poll() for handle in late)
        ends = [ended_well(handle, np.full(5, 1)) for handle in late]
        require_that_both_ends_are_alike(ends, (0, 1))
        for handle in urgent:
            require_equal(hvd.synchronize(handle), np.ones(5))


@pytest.mark.ranks(2, 3)
def test_bad_sets_are_refused():
    with pytest.raises(ValueError, match="different ranks"):
        hvd.ProcessSet([1, 1])
    with pytest.raises(ValueError, match="different ranks"):
        hvd.ProcessSet([-1])
    for nothing in ([0.5], ["0"], 3, None, "01"):
        with pytest.raises(ValueError, match="takes ranks or an mpi4py communicator, not"):
            hvd.ProcessSet(nothing)
    with pytest.raises(ValueError, match="at least one"):
        hvd.add_process_set([])
    with pytest.raises(ValueError, match="only"):
        hvd.add_process_set([0, 17])
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set(list(range(hvd.size())))


@pytest.mark.ranks(3)
def test_ranks_that_add_different_sets_all_hear_of_it():
    with pytest.raises(hvd.MismatchError, match=r"ranks 0-1 asked for process sets \[0, 1\], rank 2 asked for"):
        hvd.add_process_set([0, 1] if hvd.rank() < 2 else [0, 2])
    require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, 3.0))


@pytest.mark.ranks(4, initialised=False)
def test_sets_given_to_init():
    even, odd = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])
    hvd.init(process_sets=[even, odd])
    mine = odd if hvd.rank() % 2 else even
    require_equal(hvd.allgather(np.array([hvd.rank()]), process_set=mine), np.array(mine.ranks))
    hvd.barrier()  # who leaves ends the operations of all
    hvd.shutdown()
    assert even.process_set_id is None


@pytest.mark.fast
@pytest.mark.ranks(4, initialised=False)
def test_communicators_given_to_init_may_differ_between_the_ranks():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    mine = hvd.ProcessSet(world.Split(rank % 2))
    first = hvd.ProcessSet([0, 1, 2])
    hvd.init(comm=world, process_sets=[mine, first])
    assert mine.ranks == [rank % 2, 2 + rank % 2]
    assert sorted(hvd.get_process_set_ids_and_ranks().values()) == [[0, 1, 2], [0, 1, 2, 3], [0, 2], [1, 3]]
    require_equal(hvd.allgather(np.array([rank]), process_set=mine), np.array(mine.ranks))
    if first.included():
        require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=first), np.full(2, 3.0))
    hvd.barrier()
    hvd.shutdown()
    for duplicates in ([mine, hvd.ProcessSet([1, 3])], [[0, 1], [1, 0]], [hvd.ProcessSet(world)]):
        with pytest.raises(ValueError, match=r"is registered already; the job is initialised"):
            hvd.init(process_sets=duplicates)
        assert hvd.is_initialized() and hvd.size() == 4  # as in Horovod
        require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, 4.0))
        hvd.barrier()
        hvd.shutdown()
        world.Barrier()


@pytest.mark.ranks(3, initialised=False)
def test_after_a_set_that_init_refuses_those_before_it_can_be_used():
    first, same, last = hvd.ProcessSet([0, 2]), hvd.ProcessSet([2, 0]), hvd.ProcessSet([0, 1])
    with pytest.raises(ValueError, match=r"\[0, 2\] is registered already; the job is initialised"):
        hvd.init(process_sets=[first, same, last], metrics_port=0)
    assert (first.process_set_id, same.process_set_id, last.process_set_id) == (1, None, None)
    if first.included():
        require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=first), np.full(2, 2.0))
    hvd.add_process_set(last)
    if last.included():
        require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=last), np.full(2, 2.0))
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.ranks(4, initialised=False)
def test_an_init_after_one_that_refused_its_sets_has_the_right_ones():
    """As in test_process_sets_static.py of Horovod, whose first init() has the third and fourth set twice."""
    first, others = hvd.ProcessSet([0]), hvd.ProcessSet(range(1, 4))
    wrong = [first, others, hvd.ProcessSet(range(3, -1, -1)), hvd.ProcessSet([0])]
    for _ in range(2):  # the same sets are refused each time
        with pytest.raises(ValueError, match=r"\[0, 1, 2, 3\] is registered already"):
            hvd.init(process_sets=wrong)
    hvd.init()  # of a library, which asks for nothing: as it was
    assert len(hvd.get_process_set_ids_and_ranks()) == 3
    hvd.init(process_sets=[first, others])
    hvd.init(process_sets=[first, others])  # and now nothing begins anew
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2, 3], 1: [0], 2: [1, 2, 3]}
    mine, size = (first, 1) if hvd.rank() == 0 else (others, 3)
    require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=mine), np.full(2, float(size)))
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.ranks(2, initialised=False)
def test_an_init_after_one_that_refused_its_communicators_has_the_right_ones():
    """As in test_process_sets_multi_comm.py of Horovod."""
    from mpi4py import MPI

    world, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.Get_rank()
    mine = world.Split(rank)
    even = hvd.ProcessSet([0])  # a second time on all ranks, since Split() has made it
    for wrong in ([mine, world.Dup(), mine.Dup(), even], [mine, world.Dup(), even], [mine, even]):
        sets = [one if isinstance(one, hvd.ProcessSet) else hvd.ProcessSet(one) for one in wrong]
        with pytest.raises(ValueError, match="is registered already"):
            hvd.init(comm=world, process_sets=sets)
        assert hvd.size() == 2
    with pytest.raises(ValueError, match="is registered already"):
        hvd.init([world, mine, mine.Dup()])
    hvd.init([world, mine])
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1], 1: [0], 2: [1]}
    assert hvd.global_process_set.mpi_comm is world
    hvd.barrier()
    hvd.shutdown()


WRONG = {
    "option": {"nonsense": 1},
    "range": {"fusion_threshold_mb": -5},
    "word": {"shared_memory": "maybe"},
    "same set": {"process_sets": [[0], [0]]},
    "rank": {"process_sets": [[0, 9]]},
    "no ranks": {"process_sets": [[]]},
    "text": {"process_sets": "static"},
    "type": {"process_sets": [1.5]},
    "number": {"process_sets": 5},
    "comm": {"comm": [9]},
    "twice": {"comm": [0, 0]},
    "servers": {"kv_servers": 7},
    "folder": {"timeline_filename": "/proc/none/timeline"},
}


@pytest.mark.ranks(2, initialised=False)
@pytest.mark.parametrize("then", ["init", "shutdown"])
@pytest.mark.parametrize("wrong", list(WRONG))
def test_an_init_that_failed_leaves_nothing_behind(wrong, then):
    with pytest.raises((TypeError, ValueError, hvd.RingtrainError)):
        hvd.init(**WRONG[wrong])
    if then == "shutdown":
        hvd.shutdown()
        assert not hvd.is_initialized()
    hvd.init(process_sets=[[0]])
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1], 1: [0]}
    require_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, 2.0))
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.ranks(2, initialised=False)
def test_the_global_set_has_the_communicator_that_init_was_given():
    from mpi4py import MPI

    turned = MPI.COMM_WORLD.Split(0, key=-MPI.COMM_WORLD.Get_rank())
    for given in (turned, [turned, turned.Split(turned.Get_rank())]):
        hvd.init(comm=given)
        assert hvd.global_process_set.mpi_comm is turned
        hvd.barrier()
        hvd.shutdown()
        assert hvd.global_process_set.mpi_comm is None


@pytest.mark.ranks(4, initialised=False)
def test_the_communicators_after_the_first_are_process_sets():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    mine = world.Split(rank % 2)
    for _ in range(2):  # the second init() asks for the same
        hvd.init([world, mine], process_sets=[[0, 3]])
    assert hvd.size() == 4
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2, 3], 1: [0, 2], 2: [1, 3], 3: [0, 3]}
    hvd.shutdown()
    with pytest.raises(ValueError, match="is registered already"):
        hvd.init([world, mine, mine.Dup()])
    assert hvd.is_initialized() and len(hvd.get_process_set_ids_and_ranks()) == 3
    hvd.barrier()
    hvd.shutdown()
    world.Barrier()


@pytest.mark.ranks(2, initialised=False)
def test_sets_given_to_init_must_be_the_same_everywhere():
    with pytest.raises(hvd.MismatchError):
        hvd.init(process_sets=[[hvd_rank_before_init()]])
    assert not hvd.is_initialized()


def hvd_rank_before_init():
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank()


@pytest.mark.ranks(2)
def test_a_set_of_any_iterable():
    for ranks in ([1, 0], (1, 0), {1, 0}, range(2), iter([1, 0]), np.array([1, 0]), {0: "a", 1: "b"}):
        assert hvd.ProcessSet(ranks).ranks == [0, 1]
    empty = hvd.ProcessSet([])
    assert (empty.ranks, empty.mpi_comm, empty.size(), empty.rank(), empty.included()) == ([], None, None, None, False)
    last = hvd.add_process_set(rank for rank in range(1, 2))
    assert (last.ranks, last.size(), last.included()) == ([1], 1, hvd.rank() == 1)
    hvd.remove_process_set(last)


@pytest.mark.ranks(2, initialised=False)
def test_the_state_of_a_set_before_init_and_after_shutdown():
    first = hvd.ProcessSet([0])
    for _ in range(2):
        for one in (first, hvd.global_process_set):
            assert (one.size(), one.rank()) == (None, None)
            with pytest.raises(hvd.NotInitializedError):
                one.included()
        assert (first.ranks, hvd.global_process_set.ranks) == ([0], [])
        hvd.init(process_sets=[first])
        assert (first.size(), first.included()) == (1, hvd.rank() == 0)
        everybody = hvd.global_process_set
        assert (everybody.size(), everybody.rank(), everybody.included()) == (2, hvd.rank(), True)
        assert (everybody.process_set_id, everybody.mpi_comm) == (0, None)
        hvd.barrier()
        hvd.shutdown()


def check_parts(parts):
    """Of a set that each of 4 ranks has made of one half of them."""
    mine = [0, 1] if hvd.rank() < 2 else [2, 3]
    assert (parts.ranks, parts.size(), parts.rank(), parts.included()) == (mine, 2, hvd.rank() % 2, True)
    assert sorted(hvd.get_process_set_ids_and_ranks().values()) == [[0, 1], [0, 1, 2, 3], [2, 3]]
    require_equal(hvd.allgather(np.array([hvd.rank()]), process_set=parts), np.array(mine))


@pytest.mark.ranks(4)
def test_a_set_from_an_mpi4py_communicator():
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(hvd.rank() // 2)
    parts = hvd.ProcessSet(half)
    assert parts.mpi_comm is half
    for _ in range(2):
        assert (parts.size(), parts.rank()) == (None, None)
        assert hvd.add_process_set(parts) is parts
        check_parts(parts)
        assert hvd.remove_process_set(parts)
        assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1, 2, 3]}
    half.Free()


@pytest.mark.ranks(4, initialised=False)
def test_sets_from_communicators_given_to_init():
    """As in Horovod's documentation. The ranks of the job are not those of COMM_WORLD."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    turned = world.Split(0, key=-world.Get_rank())
    half = turned.Split(turned.Get_rank() // 2)
    parts = hvd.ProcessSet(half)
    assert (parts.ranks, parts.included()) == (None, None)
    hvd.init(turned, process_sets=[parts])
    assert hvd.rank() == 3 - world.Get_rank()
    check_parts(parts)
    hvd.barrier()
    hvd.shutdown()
    assert (parts.ranks, parts.process_set_id, parts.included()) == (None, None, None)


@pytest.mark.ranks(2, initialised=False)
def test_a_communicator_with_others_than_the_ranks_of_the_job_is_refused():
    from mpi4py import MPI

    hvd.init(comm=MPI.COMM_SELF)
    with pytest.raises(ValueError, match="processes that are not ranks of this job"):
        hvd.add_process_set(MPI.COMM_WORLD)
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set(MPI.COMM_SELF)
    hvd.shutdown()


@pytest.mark.ranks(2)
def test_a_copied_set_is_the_same_and_a_loaded_one_is_not_registered():
    alone = hvd.add_process_set([0])
    assert copy.deepcopy([alone, hvd.global_process_set]) == [alone, hvd.global_process_set]
    loaded = pickle.loads(pickle.dumps([alone, hvd.global_process_set]))
    assert (loaded[0].ranks, loaded[0].process_set_id) == ([0], None)
    assert loaded[1] is hvd.global_process_set
    hvd.remove_process_set(alone)
