"""An elastic training whose processes die at random while others come, and what must come out of it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
from elastic_ranks import elastic_job

_TRAINING = str(Path(__file__).with_name("elastic_training.py"))
STEPS_OF_STORM = 600

Weights = list[np.ndarray[Any, np.dtype[Any]]]


def training(folder: Path, steps: int = 60, pause_s: float = 0.01, extra_mb: float = 0.0) -> list[str]:
    """The program of each process, which leaves its weights in the folder."""
    return [_TRAINING, str(steps), str(pause_s), str(folder / "weights.npz"), str(extra_mb)]


def weights_in(folder: Path) -> Weights:
    with np.load(folder / "weights.npz") as file:
        return [file[name] for name in file.files]


def undisturbed(folder: Path, steps: int) -> Weights:
    """The weights after so many steps in which nobody dies."""
    with elastic_job(training(folder, steps, pause_s=0.0), folder, 2) as job:
        for process in job.processes:
            process.ends()
    return weights_in(folder)


def require_same_weights(folder: Path, expected: Weights) -> None:
    """But for the order in which the gradients of the samples were added."""
    for own, other in zip(weights_in(folder), expected, strict=True):
        assert np.max(np.abs(own - other) / (np.abs(other) + 1e-12)) < 1e-9


def storm(folder: Path, seed: int, memory: str, longest_s: float) -> int:
    """Train for STEPS_OF_STORM; returns how many processes were killed, for so many seconds at most.

    Raises AssertionError where one of the others does not end well within a minute.
    """
    chance = random.Random(seed)
    kills = 0
    with elastic_job(training(folder, STEPS_OF_STORM, 0.005), folder, 4, RINGTRAIN_SHARED_MEMORY=memory) as job:
        job.processes[0].wait_for("step 1 ")
        end = time.monotonic() + longest_s
        while time.monotonic() < end and not any("well" in process.output() for process in job.processes):
            time.sleep(chance.choice([0.003, 0.01, 0.03, 0.1, 0.3]))
            living = [process for process in job.processes if process.popen.poll() is None]
            if not living:
                break
            synced = [process for process in living if "synced" in process.output()]
            victim = chance.choice(living)
            if chance.random() < 0.5 and len(living) > 2:
                if victim in synced and len(synced) < 3:
                    continue  # somebody has to have the state
                victim.kill()
                kills += 1
            elif len(living) < 5:
                job.start()
        for process in job.processes:
            if process.popen.wait(60) != -9:
                assert process.popen.returncode == 0, f"seed {seed}:\n{job.outputs()}"
    return kills
