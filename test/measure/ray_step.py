"""Measures a step on ranks that are actors of Ray, and the same step under ringrun, in turn.

    ../.venv-ray/bin/python -m measure.ray_step --rounds 7

The step is that of a perceptron in PyTorch with a million parameters: forward, backward, average, update. A round takes
the median step of rank 0 of each, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import ray
import torch

import ringtrain.torch as hvd
from ringtrain.ray import RayExecutor

RANKS = 2
WARM_UP = 20


def median_step_ms(steps: int) -> float:
    """Returns that of this rank."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    inputs = torch.randn(64, 512)
    times = []
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times[WARM_UP:])


def under_ray(steps: int) -> float:
    executor = RayExecutor(num_workers=RANKS)
    executor.start()
    medians = executor.run(median_step_ms, [steps])
    executor.shutdown()
    return float(medians[0])


def under_ringrun(steps: int) -> float:
    ringrun = [sys.executable, "-m", "ringtrain.run", "-np", str(RANKS), "--network", "sockets"]
    ranks = [sys.executable, "-m", "measure.ray_step", "--as-rank", "--steps", str(steps)]
    folder = Path(__file__).parents[1]
    done = subprocess.run([*ringrun, *ranks], cwd=folder, capture_output=True, text=True, timeout=600, check=True)
    of_rank_0 = next(line for line in done.stdout.splitlines() if line.startswith("[0] step:"))
    return float(of_rank_0.rpartition(" ")[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        print(f"step: {median_step_ms(options.steps)}")
        return
    ray.init(num_cpus=RANKS, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
    ratios = []
    for number in range(options.rounds):
        ways = [under_ray, under_ringrun]
        times = {way: way(options.steps) for way in (ways if number % 2 == 0 else ways[::-1])}
        ratios.append(times[under_ray] / times[under_ringrun])
        print(
            f"round {number}: {times[under_ray]:.2f} ms under Ray, {times[under_ringrun]:.2f} ms under ringrun, "
            f"ratio {ratios[-1]:.3f}",
            flush=True,
        )
    print(f"ratio: {statistics.median(ratios):.3f} [{min(ratios):.3f}-{max(ratios):.3f}]")


if __name__ == "__main__":
    main()
