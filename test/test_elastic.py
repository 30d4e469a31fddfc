"""Trainings that go on when ranks are lost and when others come."""

import random
import time
from pathlib import Path

import numpy as np
import pytest
from elastic_ranks import Left, elastic_job

TRAINING = str(Path(__file__).with_name("elastic_training.py"))
OPTIONS = pytest.mark.parametrize("memory", ["auto", "off"], ids=["shm", "sockets"])


def training(folder, steps=60, pause_s=0.01, extra_mb=0.0):
    return [TRAINING, str(steps), str(pause_s), str(folder / "weights.npz"), str(extra_mb)]


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The weights after so many steps that nobody disturbed, by steps."""
    found = {}

    def weights_after(steps):
        if steps not in found:
            folder = tmp_path_factory.mktemp("clean")
            with elastic_job(training(folder, steps, pause_s=0.0), folder, 2) as job:
                for process in job.processes:
                    process.ends()
            found[steps] = load(folder)
        return found[steps]

    return weights_after


def load(folder):
    with np.load(folder / "weights.npz") as file:
        return [file[name] for name in file.files]


def require_same_weights(folder, expected):
    """But for the order in which the gradients of the samples were added."""
    for own, other in zip(load(folder), expected, strict=True):
        assert np.max(np.abs(own - other) / (np.abs(other) + 1e-12)) < 1e-9


@OPTIONS
@pytest.mark.parametrize("victims", [[0], [3], [1, 2], [0, 3], [0, 1, 2]], ids=str)
def test_no_committed_step_is_lost_whoever_is_killed(tmp_path, clean, victims, memory):
    with elastic_job(training(tmp_path), tmp_path, 4, RINGTRAIN_SHARED_MEMORY=memory) as job:
        for process in job.processes:
            process.wait_for("step 20")
        for victim in victims:
            job.processes[victim].popen.kill()
        survivors = [process for number, process in enumerate(job.processes) if number not in victims]
        for process in survivors:
            assert "well 60" in process.ends()
        assert len(job.of(Left)) == len(victims)
    require_same_weights(tmp_path, clean(60))


@OPTIONS
def test_newcomers_go_on_where_the_others_are(tmp_path, clean, memory):
    with elastic_job(training(tmp_path, 150), tmp_path, 2, RINGTRAIN_SHARED_MEMORY=memory) as job:
        job.processes[0].wait_for("step 20")
        job.processes[1].kill()
        job.start(2)
        for process in (job.processes[0], *job.processes[2:]):
            assert "well 150" in process.ends()
        assert job.formed(2)
        assert "step 150 3" in job.processes[2].output()
    require_same_weights(tmp_path, clean(150))


def test_a_job_whose_ranks_are_all_lost_goes_on_from_its_file(tmp_path, clean):
    file = str(tmp_path / "checkpoint")
    with elastic_job(training(tmp_path), tmp_path, 2, CHECKPOINT=file) as job:
        job.processes[0].wait_for("step 20")
        for process in job.processes:
            process.popen.kill()
        for process in job.start(2):
            text = process.ends()
            assert int(text.split("synced ")[1].split()[0]) >= 19 and "well 60" in text
    require_same_weights(tmp_path, clean(60))
    assert [path for path in tmp_path.iterdir() if "unfinished" in path.name] == []


# Seconds from the first to the last of all that happens to a job.
STORM_S = 6.0


@pytest.mark.parametrize("seed", [1, 2])
@OPTIONS
def test_a_storm_of_kills_and_starts_loses_no_step_and_hangs_nowhere(tmp_path, clean, seed, memory):
    chance = random.Random(seed)
    kills = 0
    with elastic_job(training(tmp_path, 600, 0.005), tmp_path, 4, RINGTRAIN_SHARED_MEMORY=memory) as job:
        job.processes[0].wait_for("step 1 ")
        end = time.monotonic() + STORM_S
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
        assert kills > 3
    require_same_weights(tmp_path, clean(600))
