"""Kills actors of an elastic job on Ray again and again, and says how long the others took to go on.

    ../.venv-ray/bin/python -m measure.ray_kills --kills 200
    ../.venv-ray/bin/python -m measure.ray_kills --kills 200 --ways signal ray signal ray node

The ways take turns: `signal` is `kill -9`, `ray` is `ray.kill`, and `node` ends a node of the cluster and adds another
one. Fails if a step is lost or counted twice, or if the job leaves actors, processes or shared memory behind.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.cluster_utils import Cluster

import ringtrain as hvd
from ringtrain.ray import RayExecutor

END_S = 60.0


def train(folder: str) -> tuple[int, list[float], tuple[int, float]]:
    """Returns the number of steps, the errors of their sums, and how many generations and lost seconds there were."""
    hvd.init()
    state = hvd.elastic.ObjectState(step=0, wrong=[])

    @hvd.elastic.run
    def steps(state: Any) -> None:
        generation = 0
        while True:
            is_over = float(Path(folder, "over").exists())
            total = hvd.allreduce(np.array([state.step + 1.0, is_over]), op=hvd.Average)
            if total[0] != state.step + 1:
                state.wrong = [*state.wrong, total[0] - state.step - 1]
            if hvd.elastic.generation() != generation:
                generation = hvd.elastic.generation()
                context = ray.get_runtime_context()
                own = Rank(os.getpid(), context.get_node_id(), context.current_actor)
                Path(folder, f"rank-{hvd.rank()}-{generation}.part").write_bytes(ray.cloudpickle.dumps(own))
                os.rename(*(Path(folder, f"rank-{hvd.rank()}-{generation}{end}") for end in (".part", "")))
            state.step += 1
            state.commit()
            if total[1] == 1:
                return
            time.sleep(0.01)

    steps(state)
    return state.step, state.wrong, (hvd.elastic.generation(), hvd.metrics()["seconds_lost"])


class Rank(NamedTuple):
    """A process of the job."""

    pid: int
    node: str
    actor: Any


def ranks_of_newest(folder: Path) -> list[Rank]:
    """Returns those of the generation that was formed last."""
    files = [file for file in folder.glob("rank-*") if not file.suffix]
    newest = max((int(file.name.rpartition("-")[2]) for file in files), default=0)
    return [ray.cloudpickle.loads(file.read_bytes()) for file in files if file.name.endswith(f"-{newest}")]


class Nodes:
    """A head, and one more node with a single CPU, which is lost and replaced."""

    def __init__(self, workers: int):
        of_each = {"object_store_memory": 10**8, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": workers - 1, **of_each})
        self._node = self._add()
        ray.init(address=self._cluster.address, log_to_driver=False)

    def replace(self) -> None:
        self._cluster.remove_node(self._node, allow_graceful=False)
        self._node = self._add()

    @property
    def id(self) -> str:
        """The one that `replace` ends."""
        return str(self._node.node_id)

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=10**8)


class Killer:
    """Kills a rank of each generation that has two or more. In the main thread, where Ray wants to add nodes."""

    def __init__(
        self, folder: Path, nodes: Nodes, ways: Sequence[str], kills: int, longest_s: float, rng: random.Random
    ):
        self.done: Counter[str] = Counter()
        self._folder, self._nodes, self._ways, self._kills = folder, nodes, ways, kills
        self._longest_s, self._rng = longest_s, rng
        self._known = set[int]()  # that were killed

    def run(self, job: threading.Thread) -> None:
        """Returns when all is done, or the job has ended."""
        end = time.monotonic() + self._longest_s
        while self.done.total() < self._kills and time.monotonic() < end and job.is_alive():
            living = [rank for rank in ranks_of_newest(self._folder) if rank.pid not in self._known]
            way = self._ways[self.done.total() % len(self._ways)]
            victims = [rank for rank in living if way != "node" or rank.node == self._nodes.id]
            if len(living) < 2 or not victims:
                time.sleep(0.02)
                continue
            time.sleep(self._rng.uniform(0, 0.2))
            if self._kill(self._rng.choice(victims), way):
                self.done[way] += 1
        (self._folder / "over").touch()

    def _kill(self, victim: Rank, way: str) -> bool:
        """Returns false if the process had ended before."""
        self._known.add(victim.pid)
        if way == "node":
            self._nodes.replace()
        elif way == "ray":
            ray.kill(victim.actor)
        else:
            try:
                os.kill(victim.pid, signal.SIGKILL)
            except ProcessLookupError:
                return False
        return True


def processes_of_ranks() -> list[int]:
    """Returns those on this host whose names say so, as Ray gives actors the name of their method."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if file.read_bytes().startswith(b"ray::RankActor"):
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=3, help="at most")
    parser.add_argument("--ways", nargs="+", default=["signal"], choices=["signal", "ray", "node"])
    parser.add_argument("--seconds", type=float, default=3600, help="end earlier after so long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    before = set(processes_of_ranks())
    nodes = Nodes(options.workers)
    shared = set(os.listdir("/dev/shm"))
    executor = RayExecutor(min_workers=1, max_workers=options.workers, cooldown_range=(0.1, 0.1))
    executor.start()
    results = list[Any]()
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(Path(folder), nodes, options.ways, options.kills, options.seconds, random.Random(options.seed))
        job = threading.Thread(target=lambda: results.extend(executor.run(train, [folder])), daemon=True)
        begin = time.monotonic()
        job.start()
        killer.run(job)
        job.join(END_S)
    if not results:
        sys.exit(f"the job hangs or has failed after {dict(killer.done)}")
    seconds = time.monotonic() - begin
    executor.shutdown()
    steps, wrong, (generations, lost_s) = results[0]
    kills = killer.done.total()
    print(f"{kills} kills {dict(killer.done)} in {seconds:.0f} s, {steps} steps, {generations} generations")
    print(f"{lost_s:.2f} s lost in all, {1000 * lost_s / max(1, kills):.0f} ms for each kill")
    time.sleep(2)
    left = sorted(one for one in set(os.listdir("/dev/shm")) - shared if "ringtrain" in one)
    processes = sorted(set(processes_of_ranks()) - before)
    free = ray.available_resources().get("CPU")
    print(
        f"wrong sums: {wrong}; left in /dev/shm: {left}; processes left: {processes}; "
        f"free CPUs: {free:g} of {options.workers}"
    )
    nodes.close()
    is_clean = not left and not processes and free == options.workers
    if kills < options.kills or wrong or not is_clean or any(result[0] != steps for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
