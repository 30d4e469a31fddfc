"""`ringrun status`: ten jobs that hang or are slow, each with the sentence that says why."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness.hosts import hosts_or_skip
from harness.ringrun_job import needs_mpi
from harness.status_job import LONG_S, planted

pytestmark = [needs_mpi, pytest.mark.alike]


def test_a_stuck_loader_is_named_with_its_line(tmp_path: Path) -> None:
    script = """
def load():
    tell()
    time.sleep(1000)

if hvd.rank() == 2:
    load()
hvd.allreduce(np.ones(4), name="loss")
"""
    with planted(tmp_path, script) as job:
        job.wait_for(2)
        kind, sentence = job.verdict()
        assert kind == "late"
        assert sentence.startswith("Rank 2 is in load() at train.py:18; ranks 0-1 have waited for it for ")
        assert sentence.endswith(' in allreduce "loss" (train.py:22).')


def test_a_branch_of_some_ranks_is_named_with_both_lines(tmp_path: Path) -> None:
    script = """
tell()
if hvd.rank() == 0:
    hvd.broadcast(np.ones(4), root_rank=0, name="best")
hvd.allreduce(np.ones(4), name="loss")
"""
    with planted(tmp_path, script) as job:
        job.wait_for(0, 1, 2)
        kind, sentence = job.verdict()
        assert kind == "branches" and "is a branch taken by some ranks only" in sentence
        assert 'rank 0 waits in broadcast "best" (train.py:18) for ranks 1-2' in sentence
        assert 'ranks 1-2 wait in allreduce "loss" (train.py:19) for rank 0' in sentence


def test_a_deadlock_of_two_groups_is_named(tmp_path: Path) -> None:
    script = """
pair, all_ranks = hvd.add_process_set([0, 1]), hvd.global_process_set
tell()
if hvd.rank() == 0:
    hvd.allreduce(np.ones(4), name="of pair", process_set=pair)
hvd.allreduce(np.ones(4), name="of all")
if hvd.rank() == 1:
    hvd.allreduce(np.ones(4), name="of pair", process_set=pair)
"""
    with planted(tmp_path, script) as job:
        job.wait_for(0, 1, 2)
        kind, sentence = job.verdict()
        assert kind == "deadlock" and "in the same order on all ranks" in sentence
        assert 'rank 0 waits in allreduce "of pair" (train.py:19) of process set 1 for rank 1' in sentence
        assert 'ranks 1-2 wait in allreduce "of all" (train.py:20) of all ranks for rank 0' in sentence


def test_a_stopped_rank_is_named_with_its_process(tmp_path: Path) -> None:
    script = """
tell()
while True:
    hvd.allreduce(np.ones(4), name="loss")
    time.sleep(0.01)
"""
    with planted(tmp_path, script) as job:
        job.wait_for(1)
        pid = job.told()["ranks"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(LONG_S)
        kind, sentence = job.verdict()
        assert kind == "stopped"
        assert sentence.startswith(f"Rank 1 is stopped, by SIGSTOP or a debugger (state T, pid {pid} on ")
        assert "ranks 0, 2 have waited for it for " in sentence and 'allreduce "loss" (train.py:18)' in sentence
        os.kill(pid, signal.SIGCONT)


def test_a_slow_link_is_the_limit(tmp_path: Path) -> None:
    script = """
gradient = np.ones(1_000_000, np.float32)
tell()
while True:
    time.sleep(0.01)
    hvd.allreduce(gradient, name="gradient")
"""
    with hosts_or_skip(2, rate="200mbit") as hosts, planted(tmp_path, script, 2, hosts) as job:
        job.wait_for(0, 1)
        kind, sentence = job.verdict()
        assert kind == "network" and sentence.startswith("The network is the limit: ranks wait for it for ")
        assert f"{hosts.names[0]} sends " in sentence and f"{hosts.names[1]} sends " in sentence


def test_a_slow_rank_is_named_with_its_line(tmp_path: Path) -> None:
    script = """
def compute():
    time.sleep(0.1 if hvd.rank() == 1 else 0.01)

tell()
while True:
    compute()
    hvd.allreduce(np.ones(4), name="gradient")
"""
    with planted(tmp_path, script) as job:
        job.wait_for(0, 1, 2)
        kind, sentence = job.verdict()
        assert kind == "slow_rank" and sentence.startswith("Rank 1 is the slowest: the others wait for it for ")
        assert sentence.endswith("it is in compute() at train.py:17.")


def test_a_rank_that_keeps_the_gil_is_named_with_its_line(tmp_path: Path) -> None:
    script = """
def compute():
    tell()
    ctypes.PyDLL(None).usleep(500_000_000)

if hvd.rank() == 1:
    compute()
hvd.allreduce(np.ones(4), name="loss")
"""
    with planted(tmp_path, script) as job:
        job.wait_for(1)
        kind, sentence = job.verdict()
        assert kind == "late"
        assert sentence.startswith("Rank 1 is in compute() at train.py:18, where it keeps the GIL; ranks 0, 2 have ")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=False).returncode == 0
    if not mounted:
        pytest.skip("only root may mount a small disk")
    script = """
def save():
    while True:
        try:
            with open("disk/checkpoint", "wb") as file:
                file.write(bytes(10_000_000))
            return
        except OSError:
            tell()
            time.sleep(0.5)

if hvd.rank() == 0:
    save()
hvd.barrier()
"""
    try:
        with planted(tmp_path, script) as job:
            job.wait_for(0)
            kind, sentence = job.verdict()
            assert kind == "late" and sentence.startswith("Rank 0 is in save() at train.py:")
            assert f"{disk}" in sentence.partition(";")[0] and " is full; ranks 1-2 have waited for it" in sentence
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_lost_host_is_named(tmp_path: Path) -> None:
    script = """
tell()
while True:
    hvd.allreduce(np.ones(4), name="loss")
    time.sleep(0.01)
"""
    with hosts_or_skip(2) as hosts, planted(tmp_path, script, 2, hosts) as job:
        job.wait_for(0, 1)
        hosts.run_on(1, "ip", "link", "set", "eth0", "down")
        time.sleep(LONG_S)
        kind, sentence = job.verdict()
        assert kind == "host"
        assert sentence.startswith(f"{hosts.names[1]} does not answer, with rank 1: look at power and link; ")
        assert 'allreduce "loss" (train.py:18)' in sentence


def test_uneven_data_is_named_with_the_steps(tmp_path: Path) -> None:
    script = """
from ringtrain import optim

weights = [np.zeros(4)]
optimizer = hvd.DistributedOptimizer(optim.SGD(lr=0.1))
for batch in range(20 if hvd.rank() == 1 else 21):
    optimizer.step(weights, [np.ones(4)])
    hvd.allreduce(np.ones(4), name="loss")
tell()
hvd.allreduce(np.ones(1), name="accuracy")
"""
    with planted(tmp_path, script) as job:
        job.wait_for(1)
        kind, sentence = job.verdict()
        assert kind == "uneven", sentence
        assert "rank 1 made 20 steps and others 21: give all ranks as many batches, or call hvd.join()" in sentence
