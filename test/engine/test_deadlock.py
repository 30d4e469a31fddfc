"""A deadlock that is certain is an error on all ranks at once; one that is not stays a stall."""

import signal
import threading
import time

import numpy as np
import pytest
from harness.clocks import require_within

import ringtrain as hvd
from ringtrain import failure


def together(name):
    return hvd.allreduce(np.ones(3), op=hvd.Sum, name=name)


def wait_for_main_thread():
    """Returns when the main thread waits. Were no other thread to submit anything, that would soon be a deadlock."""
    while threading.main_thread().ident not in failure._waiting:
        time.sleep(0.01)


def deadlocks(call, *parts):
    begin = time.monotonic()
    with pytest.raises(hvd.DeadlockError) as raised:
        call()
    require_within(3, begin)
    for part in ("deadlock: every rank waits", *parts):
        assert part in str(raised.value)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("is_cached", [False, True])
def test_ranks_that_wait_for_each_other(is_cached):
    names = [f"{'cached' if is_cached else 'fresh'} {rank}" for rank in range(hvd.size())]
    for name in names * is_cached:
        together(name)
    own = names[hvd.rank()]
    deadlocks(lambda: together(own), *(f'rank {rank} for allreduce "{name}"' for rank, name in enumerate(names)))
    deadlocks(lambda: together(own), "test_deadlock.py:")
    assert together("the next one").tolist() == [hvd.size()] * 3  # works


@pytest.mark.ranks(2)
def test_a_deadlock_of_rank_0_alone_asks_whether_it_is_under_a_condition():
    name = "validation loss" if hvd.rank() == 0 else "gradients"
    deadlocks(
        lambda: together(name),
        'Is allreduce "validation loss" under `if rank() == 0`?',
        "different numbers of batches? In PyTorch put the loop into `with hvd.Join(optimizer):`, elsewhere call",
    )


@pytest.mark.ranks(2)
def test_a_deadlock_of_as_many_operations_with_other_names_asks_for_the_model():
    part = "encoder" if hvd.rank() == 0 else "decoder"
    handles = [hvd.allreduce_async(np.ones(3), name=f"{part}.{number}") for number in range(12)]
    deadlocks(
        lambda: hvd.synchronize(handles[0]),
        'rank 0 for allreduce "encoder.0" (at ',
        'rank 1 for allreduce "decoder.0" (at ',
        " and 11 more operations",
        "Do all ranks build the same model? The names of their operations differ.",
    )


@pytest.mark.ranks(2, 3)
def test_one_rank_waits_for_something_else():
    operation = hvd.barrier if hvd.rank() == 0 else (lambda: hvd.allgather(np.ones(2), name="gather"))
    deadlocks(operation, "rank 0 for barrier", 'for allgather "gather"')
    hvd.barrier()


@pytest.mark.ranks(2)
def test_pending_operations_that_nobody_waits_for_fail_too():
    forgotten = hvd.allreduce_async(np.ones(2), name="forgotten") if hvd.rank() == 0 else None
    deadlocks(lambda: together(f"of {hvd.rank()}"), *(['allreduce "forgotten"'] if forgotten else []))
    if forgotten is not None:
        with pytest.raises(hvd.DeadlockError):
            hvd.synchronize(forgotten)


@pytest.mark.ranks(3)
def test_process_sets_that_wait_crosswise():
    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2]), hvd.add_process_set([0, 2])]
    own = pairs[hvd.rank()]  # 0 waits for 1, 1 for 2, 2 for 0
    deadlocks(lambda: hvd.allreduce(np.ones(2), name="round", process_set=own))
    for pair in pairs:
        hvd.remove_process_set(pair)


@pytest.mark.ranks(2)
def test_a_process_set_that_not_all_ranks_add_or_remove():
    pair = hvd.add_process_set([1])
    for operation in (lambda: hvd.add_process_set([0]), lambda: hvd.remove_process_set(pair)):
        deadlocks(operation if hvd.rank() == 0 else lambda: together("of all"), "rank 0 for ", "test_deadlock.py:")
    assert hvd.get_process_set_ids_and_ranks() == {0: [0, 1], pair.process_set_id: [1]}
    hvd.remove_process_set(pair)
    assert together("after").tolist() == [2.0] * 3


@pytest.mark.ranks(3)
def test_a_join_in_a_deadlock():
    pair = hvd.add_process_set([1, 2])
    if hvd.rank() == 0:
        deadlocks(hvd.join, "rank 0 in join()")
    elif hvd.rank() == 1:
        deadlocks(lambda: hvd.allreduce(np.ones(2), name="of two", process_set=pair), 'rank 1 for allreduce "of two"')
    else:
        deadlocks(lambda: together("of all"), 'rank 2 for allreduce "of all"')
    assert together("after").tolist() == [3.0] * 3  # nobody has joined any more
    hvd.remove_process_set(pair)


@pytest.mark.ranks(2)
def test_a_thread_that_is_still_at_work_may_submit_what_is_missing():
    if hvd.rank() == 0:
        assert together("late").tolist() == [2.0] * 3
        together("early")
    else:
        thread = threading.Thread(target=lambda: (time.sleep(2), together("late")))
        thread.start()
        together("early")
        thread.join()


@pytest.mark.ranks(2)
def test_a_daemon_thread_counts_from_its_first_submission_on():
    first = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="first") if hvd.rank() == 0 else None
    if hvd.rank() == 1:

        def work():
            wait_for_main_thread()
            hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="first")
            time.sleep(2)
            together("second")

        threading.Thread(target=work, daemon=True).start()
        together("third")
    else:
        assert together("second").tolist() == [2.0] * 3
        hvd.synchronize(first)
        together("third")


@pytest.mark.ranks(2)
def test_a_rank_that_only_polls_does_not_wait():
    if hvd.rank() == 0:
        assert together("slow").tolist() == [2.0] * 3
    else:
        time.sleep(2)
        together("slow")
    handle = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name=f"polled {hvd.rank()}")
    for _ in range(15):
        assert not hvd.poll(handle)
        time.sleep(0.1)
    together(f"polled {1 - hvd.rank()}")
    hvd.synchronize(handle)


@pytest.mark.ranks(2)
def test_a_thread_thrown_out_of_its_wait_does_not_wait():
    if hvd.rank() == 0:
        late = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="left")

        def leave(*_):
            raise TimeoutError

        signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, 1.5)
        with pytest.raises(TimeoutError):
            hvd.synchronize(late)
        time.sleep(1.2)
        assert together("not yet").tolist() == [2.0] * 3
        hvd.synchronize(late)
    else:
        time.sleep(1.7)
        together("not yet")
        together("left")


@pytest.mark.ranks(2)
def test_a_thread_whose_result_is_ready_does_not_wait():
    if hvd.rank() == 0:
        signal.signal(signal.SIGALRM, lambda *_: time.sleep(1.8))
        signal.setitimer(signal.ITIMER_REAL, 0.4)
    else:
        time.sleep(0.6)
    assert together("during the handler").tolist() == [2.0] * 3
    assert together("after it").tolist() == [2.0] * 3


@pytest.mark.ranks(2)
def test_a_daemon_thread_counts_whoever_has_used_its_names_before():
    def known():
        hvd.allreduce_(np.ones(3), op=hvd.Sum, name="known")

    known()
    if hvd.rank() == 1:

        def work():
            known()
            time.sleep(1.7)
            known()

        threading.Thread(target=work, daemon=True).start()
    else:
        known()
        known()
    assert together("last").tolist() == [2.0] * 3


@pytest.mark.ranks(2)
def test_a_daemon_thread_counts_from_its_first_submission_of_a_known_name_on():
    def known():
        handle = hvd.allreduce_async_(np.ones(3), op=hvd.Sum, name="known to both")
        assert hvd.synchronize(handle).tolist() == [2.0] * 3

    for _ in range(3):
        known()
    if hvd.rank() == 1:

        def work():
            wait_for_main_thread()
            known()
            time.sleep(2)
            together("later")

        threading.Thread(target=work, daemon=True).start()
    else:
        known()
        assert together("later").tolist() == [2.0] * 3
    assert together("at last").tolist() == [2.0] * 3


@pytest.mark.slow
@pytest.mark.ranks(4, hosts=(1, 1, 1, 1), rate="2mbit", timeout=90)
def test_long_steps_while_a_second_thread_waits_for_a_late_rank():
    steps, size, rank = 4, hvd.size(), hvd.rank()
    gradients = [np.empty(20_000, np.float32) for _ in range(8)]  # more than 1 s at this rate, burst and all
    is_over = [threading.Event() for _ in range(steps)]
    totals = []

    def watch():
        for step in range(steps):
            if step % size == rank:
                is_over[step].wait()
                time.sleep(0.3)
            totals.append(together("status").tolist())

    thread = threading.Thread(target=watch)
    before = hvd.metrics()["cache_misses"]
    thread.start()
    try:
        for step in range(steps):
            begin = time.monotonic()
            handles = []
            for i, gradient in enumerate(gradients):
                gradient[:] = rank + step
                handles.append(hvd.allreduce_async_(gradient, op=hvd.Sum, name=f"gradient{i}"))
            for handle in handles:
                assert hvd.synchronize(handle).tolist() == [sum(range(size)) + size * step] * 20_000
            assert time.monotonic() - begin > 1
            is_over[step].set()
    finally:
        for event in is_over:
            event.set()
        thread.join(20)
    assert totals == [[float(size)] * 3] * steps
    assert hvd.metrics()["cache_misses"] - before == len(gradients) + 1  # each name once


@pytest.mark.ranks(2, 3)
def test_messages_whose_other_ends_do_not_come():
    rank, size = hvd.rank(), hvd.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for length in (3, 100_000):
        sent, received = np.full(length, rank), np.zeros(length, int)
        tag = 1000 + length  # of no other test: messages are numbered by tag as long as the job lasts
        way = f"message 1 from rank {rank} to {after}, tag {tag}"
        deadlocks(
            lambda values=sent, tag=tag: hvd.send(values, after, tag=tag), f'rank {rank} for transfer "{way}" (at '
        )
        deadlocks(lambda values=received, tag=tag: hvd.recv(values, before, tag=tag), "test_deadlock.py:")
        handle = hvd.send_async(sent, after, tag=tag)
        assert (hvd.recv(received, before, tag=tag) == before).all()
        hvd.synchronize(handle)


@pytest.mark.ranks(3)
def test_messages_and_operations_that_wait_for_each_other():
    if hvd.rank() == 0:
        way = "message 1 from rank 1 to 0, tag 1001"
        deadlocks(lambda: hvd.recv(np.zeros(2), 1, tag=1001), f'rank 0 for transfer "{way}" (at ')
        assert hvd.recv(np.zeros(2), 1, tag=3).tolist() == [1, 1]
    else:
        deadlocks(lambda: together("of all"), 'ranks 1-2 for allreduce "of all"')
        if hvd.rank() == 1:
            hvd.send(np.ones(2), 0, tag=3)
    assert together("after").tolist() == [3.0] * 3
