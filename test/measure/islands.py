"""Time the steps of DiLoCo on two hosts with several ranks each: inside a host every step, between them every 50th.

In test/: `python -m measure.islands --rate 50mbit`. The hosts are simulated, so it needs root (test/harness/hosts.py).
Frames take 25 ms from one host to the other, so a round trip takes 50 ms. The parameters are NumPy arrays; differences
travel in 8 bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import numpy as np
from harness.hosts import HostsUnavailable, SimulatedHosts, simulated_hosts

from measure.hosts import result_of_ranks

ONE_WAY_S = 0.025
ARRAYS, ELEMENTS = 24, 1 << 16


def train(steps: int, every: int) -> None:
    """Runs on each rank; rank 0 prints the seconds of its steps."""
    import ringtrain as hvd
    from ringtrain import optim

    hvd.init()
    weights = [np.zeros(ELEMENTS, np.float32) for _ in range(ARRAYS)]
    gradients = [np.full(ELEMENTS, hvd.rank() + 1.0, np.float32) for _ in range(ARRAYS)]
    optimizer = hvd.DiLoCo(optim.SGD(lr=1e-3), weights, every, compression=hvd.Compression.int8)
    hvd.barrier()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.step(weights, gradients)
        seconds.append(time.perf_counter() - began)
    hvd.barrier()
    if hvd.rank() == 0:
        print("RESULT", json.dumps(seconds), flush=True)


def seconds_of_steps(hosts: SimulatedHosts, options: argparse.Namespace) -> list[float]:
    """Train on both hosts."""
    command = ["-m", "measure.islands", "--on-rank", "--steps", str(options.steps), "--every", str(options.every)]
    seconds: list[float] = result_of_ranks(hosts, options.ranks, "the training", command)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="50mbit", help="of the link of each host (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of each host (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--every", type=int, default=50, metavar="H", help="default: %(default)s")
    parser.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_rank:
        train(options.steps, options.every)
        return 0
    try:
        with simulated_hosts(2, options.rate) as hosts, hosts.bad_cable(ONE_WAY_S):
            seconds = seconds_of_steps(hosts, options)
    except HostsUnavailable as reason:
        print(reason, file=sys.stderr)
        return 1
    # The first steps are announced to all ranks; the one after an outer step may have to wait for the link, too.
    later = [(number, one) for number, one in enumerate(seconds, 1) if number > 10]
    inner = [one for number, one in later if number % options.every > 1]
    outer = [one for number, one in later if number % options.every == 0]
    print(f"{options.rate}, 50 ms, two hosts with {options.ranks} ranks each, {sum(seconds):.1f} s for all steps")
    print(
        f"inner step: median {1e3 * statistics.median(inner):.2f} ms, 9 of 10 within "
        f"{1e3 * statistics.quantiles(inner, n=10)[-1]:.2f} ms"
    )
    print(f"step with an outer step: median {1e3 * statistics.median(outer):.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
