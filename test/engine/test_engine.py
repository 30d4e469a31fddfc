"""The engine under load: many threads, many operations, any order, small caches, no names."""

import os
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from harness.exact import require_equal
from harness.ringrun_job import needs_mpi, ringrun
from preloaded import library

import ringtrain as hvd
from ringtrain import _core


def total(value=1):
    return value * hvd.size() * (hvd.size() + 1) / 2


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, 4)
def test_several_threads_submit_in_different_orders():
    errors = []

    def work(thread):
        try:
            order = list(range(50))
            random.Random(hvd.rank() * 100 + thread).shuffle(order)
            for step in range(3):
                handles = {
                    i: hvd.allreduce_async(np.full(i * 37, hvd.rank() + 1.0), op=hvd.Sum, name=f"{thread}/{i}")
                    for i in order
                }
                for i, handle in handles.items():
                    require_equal(hvd.synchronize(handle), np.full(i * 37, total()))
                assert step >= 0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not errors


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
def test_hundreds_of_operations_of_all_kinds_in_flight():
    order = list(range(400))
    random.Random(hvd.rank()).shuffle(order)
    handles = {}
    for i in order:
        name = f"mixed{i}"
        kind = i % 5
        if kind == 0:
            handles[i] = hvd.allreduce_async(np.full(i, hvd.rank() + 1, "int32"), op=hvd.Sum, name=name)
        elif kind == 1:
            handles[i] = hvd.allgather_async(np.full(2, hvd.rank(), "int16"), name=name)
        elif kind == 2:
            handles[i] = hvd.broadcast_async(np.full(i, hvd.rank(), "uint8"), i % hvd.size(), name=name)
        elif kind == 3:
            handles[i] = hvd.alltoall_async(np.full(hvd.size(), hvd.rank()), name=name)
        else:
            handles[i] = hvd.reducescatter_async(np.ones(hvd.size() * i, "float32"), op=hvd.Sum, name=name)
    for i, handle in handles.items():
        expected = [
            np.full(i, total(), "int32"),
            np.repeat(np.arange(hvd.size(), dtype="int16"), 2),
            np.full(i, i % hvd.size(), "uint8"),
            np.arange(hvd.size()),
            np.full(i, float(hvd.size()), "float32"),
        ][i % 5]
        require_equal(hvd.synchronize(handle), expected)


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_more_operations_without_a_name_than_there_are_names():
    handles = [hvd.allreduce_async(np.full(i % 7, float(i)), op=hvd.Sum) for i in range(700)]
    for i, handle in enumerate(handles):
        require_equal(hvd.synchronize(handle), np.full(i % 7, float(i * hvd.size())))


@pytest.mark.ranks(2, 3, env={"RINGTRAIN_CACHE_CAPACITY": "0"}, way="no cache")
@pytest.mark.ranks(2, 3, env={"RINGTRAIN_CACHE_CAPACITY": "1"}, way="small cache")
@pytest.mark.ranks(2, 3, env={"RINGTRAIN_FUSION_THRESHOLD_MB": "0"}, way="no fusion")
@pytest.mark.ranks(2, 3, env={"RINGTRAIN_FUSION_THRESHOLD_MB": "0.01"}, way="little fusion")
@pytest.mark.ranks(
    2, 3, env={"HOROVOD_FUSION_THRESHOLD": "65536", "HOROVOD_CACHE_CAPACITY": "5"}, way="Horovod's variables"
)
def test_steps_that_repeat_with_other_options():
    for step in range(10):
        order = list(range(20))
        random.Random(step * 10 + hvd.rank()).shuffle(order)
        handles = {
            i: hvd.allreduce_async(np.full(100 * i, step + hvd.rank() + 1.0), op=hvd.Sum, name=f"gradient{i}")
            for i in order
        }
        for i, handle in handles.items():
            require_equal(hvd.synchronize(handle), np.full(100 * i, total() + step * hvd.size()))


@pytest.mark.ranks(2, env={"RINGTRAIN_CACHE_CAPACITY": "70000"})
def test_more_operations_than_a_board_has_bits_for():
    arrays = [np.empty(1, np.float32) for _ in range(70_000)]
    for step in range(2):
        before = hvd.metrics()["cache_misses"]
        for array in arrays:
            array[:] = step + hvd.rank() + 1
        handles = [hvd.allreduce_async_(array, op=hvd.Sum, name=f"{i}") for i, array in enumerate(arrays)]
        for handle in handles:
            hvd.synchronize(handle)
        assert all(array[0] == total() + step * hvd.size() for array in arrays)
        assert hvd.metrics()["cache_misses"] - before == (len(arrays) if step == 0 else 0)


@pytest.mark.ranks(2, 3)
def test_a_name_whose_shape_changes_from_step_to_step():
    for step in range(30):
        shape = (step % 4, 2)
        require_equal(hvd.allreduce(np.ones(shape), op=hvd.Sum, name="changing"), np.full(shape, float(hvd.size())))
        rows = (step + hvd.rank()) % 3
        gathered = hvd.allgather(np.full(rows, hvd.rank()), name="growing")
        require_equal(gathered, np.concatenate([np.full((step + r) % 3, r) for r in range(hvd.size())]))


@pytest.mark.ranks(2)
def test_an_operation_that_nobody_waits_for_keeps_its_memory():
    for i in range(200):
        hvd.allreduce_async(np.ones(50_000), name=f"forgotten{i}")
    require_equal(hvd.allreduce(np.ones(3), name="after"), np.ones(3))


@pytest.mark.ranks(2)
def test_ctrl_c_interrupts_a_wait():
    import os
    import signal

    if hvd.rank() == 0:
        handle = hvd.allreduce_async(np.ones(2), name="late")
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            hvd.synchronize(handle)
        hvd.barrier(hvd.global_process_set)
        require_equal(hvd.synchronize(handle), np.ones(2))
    else:
        hvd.barrier(hvd.global_process_set)
        hvd.allreduce(np.ones(2), name="late")


@pytest.mark.ranks(1, 2, 3)
def test_several_threads_wait_and_each_gets_its_own():
    def work(number):
        for _ in range(100):
            values = np.full(3, float(number))
            require_equal(hvd.allreduce(values, name=f"of thread {number}", op=hvd.Sum), values * hvd.size())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


COUNTED_WAKES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

int wakes_by_first_thread;

long syscall(long number, ...) {
  va_list more;
  va_start(more, number);
  long words[6];
  for (int i = 0; i < 6; ++i) words[i] = va_arg(more, long);
  va_end(more);
  long (*real)(long, ...) = dlsym(RTLD_NEXT, "syscall");
  if (number == SYS_futex && words[1] == FUTEX_WAKE && real(SYS_gettid) == getpid()) ++wakes_by_first_thread;
  return real(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
"""

BURST = """
import ctypes, os, time
import numpy as np
import ringtrain as hvd

hvd.init()
wakes = ctypes.c_int.in_dll(ctypes.CDLL(os.environ["LD_PRELOAD"]), "wakes_by_first_thread")
arrays = [np.ones(3) for _ in range(100)]
for step in range(5):
    time.sleep(0.05)  # the engine sleeps
    before = wakes.value
    handles = [hvd.allreduce_async_(array, name=str(i)) for i, array in enumerate(arrays)]
    woken = wakes.value - before
    for handle in handles:
        hvd.synchronize(handle)
assert woken < 20, woken
"""


@needs_mpi
def test_a_burst_of_submissions_wakes_the_engine_once(tmp_path):
    job = ringrun("-np", "2", "python", "-c", BURST, LD_PRELOAD=library(tmp_path, COUNTED_WAKES))
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.ranks(2)
def test_nobody_polls_while_several_threads_wait():
    names = ("first of two", "second of two")
    threads = [threading.Thread(target=hvd.allreduce, args=(np.ones(3),), kwargs={"name": name}) for name in names]
    slept = 0
    hvd.barrier()
    if hvd.rank() == 0:
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        before = times_asleep()
        time.sleep(1)
        slept = times_asleep() - before
    hvd.barrier()
    if hvd.rank() != 0:
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    assert slept < 200  # each thread looks around every 0.2 s


@pytest.mark.ranks(2)
def test_a_waiting_thread_is_not_woken_for_what_another_one_waits_for():
    alone = hvd.add_process_set([0])
    patient = threading.Thread(target=hvd.allreduce, args=(np.ones(3),), kwargs={"name": "patient"})
    slept = 0
    hvd.barrier()
    if hvd.rank() == 0:
        patient.start()
        time.sleep(0.1)
        before = times_asleep(patient.native_id)
        for _ in range(200):
            require_equal(hvd.allreduce(np.ones(3), name="of another", process_set=alone), np.ones(3))
            time.sleep(2e-3)  # the patient one sleeps again
        slept = times_asleep(patient.native_id) - before
    hvd.barrier()
    if hvd.rank() != 0:
        patient.start()
    patient.join()
    hvd.remove_process_set(alone)
    assert slept < 100


@pytest.mark.ranks(2)
def test_a_waiting_thread_is_woken_when_another_one_has_carried_out_its_operation():
    patient = threading.Thread(target=hvd.allreduce, args=(np.ones(3),), kwargs={"name": "patient"})
    large = np.ones(10_000_000, np.float32)
    lateness_s = []
    hvd.barrier()
    if hvd.rank() == 0:
        patient.start()
        time.sleep(0.1)
    for _ in range(10):
        handle = hvd.allreduce_async_(large, op=hvd.Max, name="large")
        time.sleep(3e-3)  # the patient one is at work with it
        hvd.synchronize(handle)
        ended_s = next(one["ended_s"] for one in reversed(_core.last_operations()) if one["name"] == "large")
        lateness_s.append(time.monotonic() - ended_s)
    hvd.barrier()
    if hvd.rank() != 0:
        patient.start()
    patient.join()
    assert min(lateness_s) < 0.05  # who is not woken looks after 0.2 s


def times_asleep(thread="*"):
    """How often this process's threads have gone to sleep, or one of them."""
    files = Path("/proc/self/task").glob(f"{thread}/status")
    return sum(int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", file.read_text(), re.M)[1]) for file in files)


@pytest.mark.ranks(2)
def test_calls_that_follow_each_other_leave_the_engines_thread_asleep():
    threads = [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    cores = os.sched_getaffinity(0)
    for thread in threads:
        os.sched_setaffinity(thread, {min(cores)})  # the other rank is at its next call before this one has its result
    try:
        repeat_a_call(100)
        times = []
        for _ in range(3):  # what else the machine does counts as little as possible
            before = times_asleep_beside_this_thread()
            repeat_a_call(1000)
            times.append(times_asleep_beside_this_thread() - before)
    finally:
        for thread in threads:
            os.sched_setaffinity(thread, cores)
    assert min(times) < 50


def repeat_a_call(times):
    for _ in range(times):
        hvd.allreduce_(np.ones(1, np.float32), op=hvd.Max, name="again")


def times_asleep_beside_this_thread():
    return times_asleep() - times_asleep(threading.get_native_id())


@pytest.mark.ranks(2, 3, env={"RINGTRAIN_FUSION_THRESHOLD_MB": "1"})
def test_urgent_operations_overtake_those_agreed_before():
    large = [np.ones(1_000_000, np.float32) for _ in range(40)]
    patient = [hvd.allreduce_async_(array, name=f"patient{i}", op=hvd.Max) for i, array in enumerate(large)]
    hvd.allreduce(np.ones(3), name="urgent", priority=1)
    assert not all(handle.poll() for handle in patient)
    for handle in patient:
        require_equal(handle.wait(), np.ones(1_000_000, np.float32))


@pytest.mark.ranks(1, 2)
def test_an_address_that_is_none_is_refused():
    float32 = _core.DTYPES["float32"]
    operation = _core.Operation(_core.OpKind.ALLREDUCE, "nowhere")
    nothing, empty = (0, float32, (3, 2)), (0, float32, (3, 0))
    for tensors in ([nothing], [empty, nothing]):
        with pytest.raises(ValueError, match="in no memory of its own"):
            _core.submit(operation, tensors, tensors)
    with pytest.raises(ValueError, match="in no memory of its own"):
        _core.allreduce_in_place(nothing, "nowhere", hvd.Sum, 1.0, 1.0, 0, 0, False, _core.Site(""))
    assert _core.wait(_core.submit(operation, [empty], [empty]), 10)


@pytest.mark.ranks(1, 2)
def test_two_threads_that_wait_for_one_operation_get_one_result_that_is_made_once():
    made = []

    class Slow(hvd.Compressor):
        @staticmethod
        def compress(tensor):
            return tensor * 2, None

        @staticmethod
        def decompress(tensor, ctx):
            made.append(threading.get_ident())
            time.sleep(0.2)  # the others come meanwhile
            return tensor / 2

    for number in range(3):
        handle = hvd.allreduce_async(np.ones(3), op=hvd.Sum, name=f"made once {number}", compression=Slow)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _, handle=handle: hvd.synchronize(handle), range(4)))
        require_equal(results[0], np.full(3, float(hvd.size())))
        assert all(result is results[0] for result in results)
        assert len(made) == number + 1
