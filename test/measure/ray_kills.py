"""Kills actors of an elastic job on Ray again and again, and says how long the others took to go on.

    .venv-ray/bin/python test/measure/ray_kills.py --kills 200

Fails if a step is lost or counted twice, or if the job leaves actors or shared memory behind.
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
from pathlib import Path
from typing import Any

import numpy as np
import ray

import ringtrain as hvd
from ringtrain.ray import RayExecutor


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
                Path(folder, f"pid-{hvd.rank()}-{generation}").write_text(str(os.getpid()))
            state.step += 1
            state.commit()
            if total[1] == 1:
                return
            time.sleep(0.01)

    steps(state)
    return state.step, state.wrong, (hvd.elastic.generation(), hvd.metrics()["seconds_lost"])


def pids_of_newest(folder: Path) -> list[int]:
    """Of the generation that was formed last."""
    files = list(folder.glob("pid-*"))
    newest = max((int(file.name.rpartition("-")[2]) for file in files), default=0)
    texts = [file.read_text() for file in files if file.name.endswith(f"-{newest}")]
    return [int(text) for text in texts if text]


class Killer(threading.Thread):
    """Kills a rank of each generation that has two or more."""

    def __init__(self, folder: Path, kills: int, longest_s: float, rng: random.Random):
        super().__init__(daemon=True)
        self.done = 0
        self._folder, self._kills, self._longest_s, self._rng = folder, kills, longest_s, rng

    def run(self) -> None:
        end, known = time.monotonic() + self._longest_s, set[int]()
        while self.done < self._kills and time.monotonic() < end:
            living = [pid for pid in pids_of_newest(self._folder) if pid not in known]
            if len(living) < 2:
                time.sleep(0.02)
                continue
            time.sleep(self._rng.uniform(0, 0.2))
            victim = self._rng.choice(living)
            known.add(victim)
            try:
                os.kill(victim, signal.SIGKILL)
                self.done += 1
            except ProcessLookupError:
                continue
        (self._folder / "over").touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3600, help="end earlier after so long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ray.init(num_cpus=options.workers, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
    shared = set(os.listdir("/dev/shm"))
    executor = RayExecutor(min_workers=1, max_workers=options.workers, cooldown_range=(0.1, 0.1))
    executor.start()
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(Path(folder), options.kills, options.seconds, random.Random(options.seed))
        killer.start()
        begin = time.monotonic()
        results = executor.run(train, [folder])
        killer.join()
    seconds = time.monotonic() - begin
    executor.shutdown()
    steps, wrong, (generations, lost_s) = results[0]
    print(f"{killer.done} kills in {seconds:.0f} s, {steps} steps, {generations} generations")
    print(f"{lost_s:.2f} s lost in all, {1000 * lost_s / max(1, killer.done):.0f} ms for each kill")
    left = sorted(one for one in set(os.listdir("/dev/shm")) - shared if "ringtrain" in one)
    time.sleep(2)
    free = ray.available_resources().get("CPU")
    print(f"wrong sums: {wrong}; left in /dev/shm: {left}; free CPUs: {free:g} of {options.workers}")
    if wrong or left or free != options.workers or any(result[0] != steps for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
