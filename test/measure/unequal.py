"""One of the ranks computes at a third of the speed of the others: the throughput of equal and of measured parts.

In test/: `ringrun -np 4 python -m measure.unequal`. A rank computes by waiting for a fixed time for each sample, so a
few cores are enough. A training of a small model goes on with it, whose gradients are averaged by weight.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import ringtrain as hvd
from ringtrain import optim


def throughput(every: int, arguments: argparse.Namespace) -> tuple[float, list[int]]:
    """Samples per second of all ranks, after the first epoch, and the parts at the end."""
    samples, batch = arguments.steps * arguments.batch, arguments.batch
    seconds_per_sample = 1e-3 * arguments.ms_per_sample * (arguments.slower if hvd.rank() == 0 else 1)
    features = np.random.default_rng(0).standard_normal((samples, 1000), np.float32)
    params = [np.zeros(1000, np.float32)]
    optimizer = hvd.DistributedOptimizer(optim.SGD(lr=1e-3))
    sampler = hvd.SpeedSampler(samples, batch, every=every)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        hvd.barrier()
        begin = time.perf_counter()
        for indices in sampler:
            asked = time.perf_counter()
            gradient = features[indices].mean(0)
            time.sleep(max(0.0, len(indices) * seconds_per_sample - (time.perf_counter() - asked)))
            optimizer.set_weight(len(indices))
            sampler.arrive()
            optimizer.step(params, [gradient])
    return samples / (time.perf_counter() - begin), sampler.shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=80, help="of all ranks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="of an epoch (default: %(default)s)")
    parser.add_argument("--ms-per-sample", type=float, default=2.0, help="of a fast rank (default: %(default)s)")
    parser.add_argument("--slower", type=float, default=3.0, help="times as long on rank 0 (default: %(default)s)")
    arguments = parser.parse_args()
    hvd.init()
    most = 1e3 / arguments.ms_per_sample * (hvd.size() - 1 + 1 / arguments.slower)
    for title, every in (("equal parts", arguments.steps * 3), ("measured parts", 5)):
        rate, shares = throughput(every, arguments)
        if hvd.rank() == 0:
            print(f"{title}: {rate:.0f} samples/s, {rate / most:.3f} of the sum of all ranks; parts {shares}")


if __name__ == "__main__":
    main()
