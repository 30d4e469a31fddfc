"""Ranks that die and are stopped among many: all others name one that has died, also where each leaves at once."""

import json
import os
import signal
import subprocess
import sys

import pytest
from harness.socket_ranks import free_port
from preloaded import library

from ringtrain.job.rendezvous import secret

# One process forks all ranks, after the imports. They work until a rank has died; a rank that hears of it writes what
# it has heard, and ends without a goodbye, so that its connections end as those of a dead one.
JOB = """
import json, os, signal, sys, time
import numpy as np
import ringtrain as hvd
import ringtrain.face
size, victims, stopped = map(json.loads, sys.argv[1:])
ready, told = os.pipe(), os.pipe()

def live(rank):
    os.environ["RINGTRAIN_RANK"] = str(rank)
    try:
        hvd.init(start_timeout_s=200)
        hvd.allreduce(np.ones(4), name="x")
        os.write(ready[1], b"1")
        while True:
            hvd.allreduce(np.ones(4), name="x")
    except Exception as error:
        os.write(told[1], json.dumps([rank, type(error).__name__ + ": " + str(error)[:200]]).encode() + b"\\n")
    finally:
        os._exit(0)

processes = []
for rank in range(size):
    processes.append(os.fork())
    if processes[-1] == 0:
        live(rank)
os.close(told[1])
left = size
while left > 0:
    left -= len(os.read(ready[0], left))
for rank in stopped:
    os.kill(processes[rank], signal.SIGSTOP)
for rank in victims:
    os.kill(processes[rank], signal.SIGKILL)
lines = os.fdopen(told[0])
texts = dict(json.loads(lines.readline()) for _ in range(size - len(victims) - len(stopped)))
for rank in stopped:
    os.kill(processes[rank], signal.SIGKILL)
print(json.dumps(texts))
"""


def texts_of_survivors(size, victims, stopped=(), shared_memory="off", folder=None, program=JOB, **variables):
    own = folder / "secret"
    secret.write(own)
    place = {"RINGTRAIN_RENDEZVOUS": f"127.0.0.1:{free_port()}", "RINGTRAIN_SIZE": str(size)}
    options = {"RINGTRAIN_NETWORK": "sockets", "RINGTRAIN_SHARED_MEMORY": shared_memory, "RINGTRAIN_LOG_LEVEL": "error"}
    environment = {**os.environ, **place, **options, secret.FILE_VARIABLE: str(own), "OPENBLAS_NUM_THREADS": "1"}
    words = [sys.executable, "-c", program, *map(json.dumps, (size, list(victims), list(stopped)))]
    process = subprocess.Popen(
        words, env={**environment, **variables}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        return {int(rank): text for rank, text in json.loads(process.communicate(timeout=280)[0]).items()}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def require_all_name_a_victim(texts, size, victims, stopped=()):
    assert sorted(texts) == sorted(set(range(size)) - set(victims) - set(stopped))
    beginnings = tuple(f"PeerLostError: rank {victim} (" for victim in victims)
    wrong = {rank: text for rank, text in texts.items() if not text.startswith(beginnings)}
    assert not wrong


@pytest.mark.parametrize(
    ("size", "victims", "stopped"),
    [
        (8, [7], []),
        (8, [0, 1, 2, 3, 4, 6], []),
        # The parent of rank 17 in the tree of the negotiation is rank 4, which has connections to five more.
        (65, [17], []),
        # Rank 64 has connections to rank 15 and, where it ever had one in a hypercube, to rank 0.
        (65, [0], [15]),
    ],
)
def test_a_death_is_named_by_all_over_sockets(size, victims, stopped, tmp_path):
    texts = texts_of_survivors(size, victims, stopped, folder=tmp_path)
    require_all_name_a_victim(texts, size, victims, stopped)


@pytest.mark.parametrize(
    ("size", "victims", "stopped"),
    [(100, [24, 25, 26], [40]), (129, [128], []), (257, [0], [63]), (300, [299, 74], [])],
)
def test_a_death_among_hundreds_is_named_by_all_over_sockets(size, victims, stopped, tmp_path):
    texts = texts_of_survivors(size, victims, stopped, folder=tmp_path)
    require_all_name_a_victim(texts, size, victims, stopped)


@pytest.mark.parametrize(
    ("size", "victims", "stopped"),
    [
        (4, [2], []),
        (16, [5, 6, 7], []),
        (16, [6], [5]),
        (16, [7, 8], [4, 5, 6]),
        (16, list(range(1, 16)), []),
    ],
)
def test_a_death_is_named_by_all_that_share_memory(size, victims, stopped, tmp_path):
    texts = texts_of_survivors(size, victims, stopped, "auto", tmp_path)
    require_all_name_a_victim(texts, size, victims, stopped)


def test_a_death_is_named_by_all_of_128_that_share_memory(tmp_path):
    size, victims, stopped = 128, [127, 0, 1], [125, 126]
    require_all_name_a_victim(texts_of_survivors(size, victims, stopped, "auto", tmp_path), size, victims, stopped)


COUNTED = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#define MOST 64
static long counts[MOST];
long questions_for(int member) { return counts[member]; }
static int counted(const char* name, int descriptor, int command, void* argument) {
  if (command == F_GETLK && ((struct flock*)argument)->l_start < MOST)
    __sync_fetch_and_add(&counts[((struct flock*)argument)->l_start], 1);
  int (*next)(int, int, void*) = (int (*)(int, int, void*))dlsym(RTLD_NEXT, name);
  return next(descriptor, command, argument);
}
#define COUNTED(name)                            \
  int name(int descriptor, int command, ...) {   \
    va_list rest;                                \
    va_start(rest, command);                     \
    void* argument = va_arg(rest, void*);        \
    va_end(rest);                                \
    return counted(#name, descriptor, command, argument); \
  }
COUNTED(fcntl)
COUNTED(fcntl64)
"""
# The last rank keeps the others waiting. A look of rank r begins with the question for rank r + 1.
COUNTING = JOB.replace(
    "        while True:\n",
    """        import ctypes
        questions_for = ctypes.CDLL(None).questions_for
        if rank == size - 1:
            time.sleep(3)
        hvd.allreduce(np.ones(4), name="y")
        counts = [questions_for(other) for other in range(size)]
        raise RuntimeError(f"{counts[(rank + 1) % size]} {sum(counts)}")
        while True:
""",
)


def test_a_rank_asks_for_the_life_lock_of_the_next_one_only(tmp_path):
    size = 16
    preloaded = library(tmp_path, COUNTED)
    texts = texts_of_survivors(size, [], [], "auto", tmp_path, COUNTING, LD_PRELOAD=preloaded)
    looks, questions = (sum(int(text.split()[column]) for text in texts.values()) for column in (1, 2))
    assert looks > 2 * size
    assert questions < 4 * looks  # and not 15 times as many
