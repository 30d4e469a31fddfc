"""One process of an elastic training in NumPy: the same steps on the same samples, on whichever ranks.

Arguments: steps, seconds of each, file for the parameters, MB of further state. With RANKS_WANTED the last 20 steps
wait until there are so many ranks.
"""

import os
import sys
import time

import numpy as np

import ringtrain as hvd
from ringtrain.optim import SGD

STEPS, PAUSE_S, FILE, EXTRA_MB = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], float(sys.argv[4])
RANKS_WANTED = int(os.environ.get("RANKS_WANTED", "1"))
SAMPLES, PIXELS, HIDDEN, BATCH = 2400, 64, 32, 48

random = np.random.default_rng(1)
inputs = random.normal(size=(SAMPLES, PIXELS))
targets = np.sin(inputs @ random.normal(size=(PIXELS, 4)) / 4)
weights = [random.normal(size=(PIXELS, HIDDEN)) / 8, random.normal(size=(HIDDEN, 4)) / 8]
further = np.ones(int(EXTRA_MB * (1 << 17)))


def gradients(first, second, batch):
    hidden = np.tanh(inputs[batch] @ first)
    difference = (hidden @ second - targets[batch]) / BATCH
    return [inputs[batch].T @ ((difference @ second.T) * (1 - hidden * hidden)), hidden.T @ difference]


def note(*words):
    print(f"{time.monotonic():.4f}", *words, flush=True)


@hvd.elastic.run
def train(state):
    note("synced", state.step, hvd.rank(), hvd.size(), hvd.elastic.generation())
    while state.step < STEPS:
        if state.step == STEPS - 20 and hvd.size() < RANKS_WANTED:
            time.sleep(PAUSE_S)
            state.commit()
            continue
        begin = state.step * BATCH % SAMPLES
        batch = np.arange(begin, begin + BATCH)[hvd.rank() :: hvd.size()]
        time.sleep(PAUSE_S)
        optimizer.step(state.weights, gradients(*state.weights, batch))
        state.step += 1
        state.commit()
        note("step", state.step, hvd.size(), hvd.elastic.generation())


hvd.init()
time.sleep(float(os.environ.get("LOADING_S", "0")))
optimizer = hvd.DistributedOptimizer(SGD(0.5, momentum=0.5), op=hvd.Sum)
state = hvd.elastic.ArrayState(weights=weights, further=further, optimizer=optimizer, step=0)
if "CHECKPOINT" in os.environ:
    state.save_to(os.environ["CHECKPOINT"], every_s=0)
train(state)
note("well", state.step)
note("seconds lost:", hvd.metrics()["seconds_lost"])
if hvd.rank() == 0:
    np.savez(FILE, *state.weights)
