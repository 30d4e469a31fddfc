"""Stores of elastic jobs: each generation makes its own, and an older one says so."""

from elastic_ranks import elastic_job

TRAINING = """
import os, signal, numpy as np, ringtrain as hvd
from ringtrain import kvstore
from ringtrain.elastic import generation

hvd.init()
older = []

@hvd.elastic.run
def train(state):
    for kv in older:
        for call in (lambda: kv.push(0, state.weights), lambda: kv.pull(0), kv.barrier):
            try:
                call()
            except hvd.NotInitializedError as error:
                assert "make a new one" in str(error)
            else:
                raise AssertionError("an older store works")
    kv = kvstore.create("dist_sync")
    older.append(kv)
    kv.set_updater(lambda key, total, stored: stored.__iadd__(total / kv.num_workers))
    kv.init(0, state.weights)
    while state.step < 40:
        kv.pushpull(0, np.ones(1000), out=state.weights)
        state.step += 1
        if generation() == 1 and state.step == 20 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
    return kv.num_workers

state = hvd.elastic.ArrayState(weights=np.zeros(1000), step=0)
workers = train(state)
assert (state.weights == 40).all()
print("well", workers, flush=True)
"""


def test_each_generation_makes_a_store_of_its_own(tmp_path):
    with elastic_job(TRAINING, tmp_path, 3) as job:
        for number in (0, 2):
            assert "well 2" in job.processes[number].ends()
