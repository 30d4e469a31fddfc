"""Elastic trainings whose arrays are on GPUs, on fakes of the driver and of NCCL."""

import os
import sys

import pytest
from elastic_ranks import Left, elastic_job
from harness import gpu_double
from harness.gpu_arrays import GPU

TRAINING = """
import os, sys, time, numpy as np
sys.path[:0] = os.environ["TESTS"].split(os.pathsep)
import cupy, ringtrain as hvd
hvd.init()
cupy.cuda.Device(hvd.local_rank()).use()

@hvd.elastic.run
def train(state):
    gradient = cupy.full(1000, hvd.rank() + 1, np.float32)
    on = hvd.allgather(np.array([gradient.device.id]))
    assert len(set(on)) == hvd.size(), on
    ranks = np.full(1000, hvd.size() * (hvd.size() + 1) / 2, np.float32)
    while state.step < STEPS:
        if state.step == STEPS - 20 and hvd.size() < 3:  # until the newcomer has come
            time.sleep(0.005)
            state.commit()
            continue
        total = hvd.allreduce(gradient, op=hvd.Sum, name="gradient")
        is_right = (total.get() == ranks).all()
        state.weights += total / total[0]
        state.step += 1
        time.sleep(0.005)
        state.commit()
        assert is_right  # what NCCL was at when a rank was lost is nobody's result, and is not committed
        print("step", state.step, hvd.size(), flush=True)
    assert (state.weights.get() == state.step).all()
    print("well on", gradient.device.id, flush=True)

STEPS = int(os.environ["STEPS"])
train(hvd.elastic.ArrayState(weights=cupy.zeros(1000, np.float32), step=0))
"""

GENERATIONS = """
import os, sys, numpy as np
sys.path[:0] = os.environ["TESTS"].split(os.pathsep)
import cupy, ringtrain as hvd
from harness import gpu_double
hvd.init()
cupy.cuda.Device(hvd.local_rank()).use()
seen = []

@hvd.elastic.run
def train(state):
    hvd.allreduce_(state.weights, name="x")
    resident = int(open("/proc/self/statm").read().split()[1]) * 4096
    counts = [gpu_double.control().count(what) for what in ("communicators", "streams", "device bytes")]
    seen.append((counts, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), resident))
    if hvd.elastic.generation() < 20:
        state.on_hosts_updated(0.0, None)
    state.commit()

train(hvd.elastic.ArrayState(weights=cupy.ones(1000, np.float32)))
early, late = seen[5], seen[-1]
assert early[:2] == late[:2] and abs(early[2] - late[2]) < 3 and late[3] - early[3] < 4 << 20, (early, late)
assert (late[0][0] > 0) == (os.environ["RINGTRAIN_GPU_ALGORITHM"] == "nccl")
"""


def job_on_gpus(program, folder, first, way, **variables):
    gpu_double.prepare(GPU)
    return elastic_job(
        program, folder, first, **GPU, TESTS=os.pathsep.join(sys.path), RINGTRAIN_GPU_ALGORITHM=way, **variables
    )


@pytest.mark.parametrize("way", ["nccl", "staged"])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_go_on_on_their_gpus_and_a_newcomer_takes_that_of_the_lost_one(tmp_path, way, victim):
    with job_on_gpus(TRAINING, tmp_path, 3, way, STEPS="120") as job:
        job.processes[victim].wait_for("step 20 ")
        job.processes[victim].kill()
        (newcomer,) = job.start(1)
        for number, process in enumerate(job.processes):
            if number != victim:
                text = process.ends()
                assert "step 120 3" in text and f"well on {victim if process is newcomer else number}\n" in text
        assert len(job.of(Left)) == 1


@pytest.mark.parametrize("way", ["nccl", "staged"])
def test_twenty_generations_leave_nothing_behind_on_gpus(tmp_path, way):
    with job_on_gpus(GENERATIONS, tmp_path, 2, way) as job:
        for process in job.processes:
            process.ends()
        assert job.server.summary().generations == 20
