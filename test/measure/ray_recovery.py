"""Kills a rank of an elastic job on Ray, and one of Ray Train's elastic TorchTrainer, in turn: how long until a step.

    ../.venv-ray/bin/python -m measure.ray_recovery --rounds 5

Both train the same network with the same number of workers, on one cluster, and go on with one worker at least. A time
runs from `kill -9` of one worker until all workers of the job have finished a step that the killed one took no part in.
ringtrain commits after each step. TorchTrainer writes a checkpoint after every 50 steps; a step that it repeats from
there counts, too.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray import train as ray_train
from ray.train.torch import TorchTrainer, prepare_model

import ringtrain.torch as hvd
from ringtrain.ray import RayExecutor

STEPS_BETWEEN_CHECKPOINTS = 50
STEP_S = 0.01
LONGEST_S = 300.0


class Group(NamedTuple):
    """A worker writes a line for each finished step: the group of workers that took it, and when it had ended."""

    name: str
    size: int


def tell(folder: str, group: Group, step: int) -> None:
    with open(Path(folder, str(os.getpid())), "a") as file:
        file.write(f"{group.name} {group.size} {step} {time.monotonic()}\n")


def is_over(folder: str) -> bool:
    return Path(folder, "over").exists()


def model_of_all() -> torch.nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(STEP_S)


def train_with_ringtrain(folder: str) -> None:
    hvd.init()
    model = model_of_all()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )

    @hvd.elastic.run
    def steps(state: Any) -> None:
        while hvd.allreduce(torch.tensor(float(is_over(folder)))) == 0:
            take_step(model, optimizer)
            state.step += 1
            state.commit()
            tell(folder, Group(str(hvd.elastic.generation()), hvd.size()), state.step)

    steps(hvd.elastic.TorchState(model, optimizer, step=0))


def train_with_ray_train(config: dict[str, str]) -> None:
    folder = config["folder"]
    context = ray_train.get_context()
    model = prepare_model(model_of_all())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    if checkpoint := ray_train.get_checkpoint():
        with checkpoint.as_directory() as there:
            model.load_state_dict(torch.load(Path(there, "model.pt")))
            step = int(Path(there, "step").read_text())
    names = [f"{os.getpid()}-{step}"]
    torch.distributed.broadcast_object_list(names)
    group = Group(names[0], context.get_world_size())
    over = torch.zeros(1)
    while not over:
        take_step(model, optimizer)
        step += 1
        over.fill_(is_over(folder))
        torch.distributed.all_reduce(over)
        if step % STEPS_BETWEEN_CHECKPOINTS == 0:
            with tempfile.TemporaryDirectory() as there:
                of_rank_0 = context.get_world_rank() == 0
                if of_rank_0:
                    torch.save(model.state_dict(), Path(there, "model.pt"))
                    Path(there, "step").write_text(str(step))
                ray_train.report({}, checkpoint=ray_train.Checkpoint.from_directory(there) if of_rank_0 else None)
        tell(folder, group, step)


def run_ringtrain(folder: str, workers: int) -> None:
    executor = RayExecutor(min_workers=1, max_workers=workers)
    executor.start()
    executor.run(train_with_ringtrain, [folder])
    executor.shutdown()


def run_ray_train(folder: str, workers: int) -> None:
    TorchTrainer(
        train_with_ray_train,
        train_loop_config={"folder": folder},
        scaling_config=ray_train.ScalingConfig(num_workers=(1, workers)),
        run_config=ray_train.RunConfig(
            storage_path=f"{folder}/storage", failure_config=ray_train.FailureConfig(max_failures=3)
        ),
    ).fit()


# --- what the workers have written ------------------------------------------------------------------------------------


class Finished(NamedTuple):
    """A step that all workers of a group have finished."""

    group: Group
    step: int
    when: float
    pids: frozenset[int]


def finished_steps(folder: Path) -> list[Finished]:
    """Returns them in the order of their ends."""
    ends: dict[tuple[Group, int], dict[int, float]] = {}
    for file in folder.glob("[0-9]*"):
        *lines, _ = file.read_text().split("\n")  # the last one may not have ended
        for line in lines:
            name, size, step, when = line.split()
            ends.setdefault((Group(name, int(size)), int(step)), {})[int(file.name)] = float(when)
    of_all = [
        Finished(group, step, max(times.values()), frozenset(times))
        for (group, step), times in ends.items()
        if len(times) == group.size
    ]
    return sorted(of_all, key=lambda one: one.when)


def wait_for(folder: Path, fits: Callable[[Finished], bool]) -> Finished:
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        found = next((one for one in finished_steps(folder) if fits(one)), None)
        if found is not None:
            return found
        time.sleep(0.2)
    raise TimeoutError(f"no such step within {LONGEST_S:g} s: {finished_steps(folder)[-3:]}")


class Recovery(NamedTuple):
    """Seconds after a kill."""

    next_step_s: float
    all_workers_s: float
    """until a step of as many workers as before"""


def recovery(run: Callable[[str, int], None], workers: int, rng: random.Random) -> Recovery:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = threading.Thread(target=run, args=(name, workers), daemon=True)
        job.start()
        first = wait_for(folder, lambda one: one.group.size == workers)
        begin = first.step // STEPS_BETWEEN_CHECKPOINTS + 2
        at = wait_for(folder, lambda one: one.group.size == workers and one.step >= begin * STEPS_BETWEEN_CHECKPOINTS)
        victim = rng.choice(sorted(at.pids))
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        later = wait_for(folder, lambda one: one.when > killed and victim not in one.pids)
        full = wait_for(folder, lambda one: one.when > killed and victim not in one.pids and one.group.size == workers)
        (folder / "over").touch()
        job.join(LONGEST_S)
        if job.is_alive():
            raise TimeoutError(f"the job of {run.__name__} has not ended")
    return Recovery(later.when - killed, full.when - killed)


def in_words(values: list[float], unit: str = "") -> str:
    return f"{statistics.median(values):.2f}{unit} [{min(values):.2f}-{max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    ray.init(num_cpus=options.workers, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
    ours, theirs = list[Recovery](), list[Recovery]()
    for number in range(options.rounds):
        pairs = [(run_ringtrain, ours), (run_ray_train, theirs)]
        for run, recoveries in pairs if number % 2 == 0 else pairs[::-1]:
            recoveries.append(recovery(run, options.workers, rng))
            print(f"round {number}: {run.__name__}: {recoveries[-1]}", flush=True)
    for what in Recovery._fields:
        own, other = ([getattr(one, what) for one in those] for those in (ours, theirs))
        ratios = [b / a for a, b in zip(own, other, strict=True)]
        print(f"{what}: ringtrain {in_words(own, ' s')}, Ray Train {in_words(other, ' s')}, ratio {in_words(ratios)}")


if __name__ == "__main__":
    main()
