"""Time the steps of DiLoCo on two islands of several ranks: inside an island every step, between them every 50th.

In test/: `python -m measure.islands --rate 50mbit`. The hosts are simulated, so it needs root (test/harness/hosts.py).
An island is a host, or the hosts of a site (`--hosts 2`). Frames take 25 ms from one site to the other, so a round trip
takes 50 ms. The parameters are NumPy arrays; differences travel in 8 bits.
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


def train(options: argparse.Namespace) -> None:
    """Runs on each rank; rank 0 prints the seconds of its steps."""
    import ringtrain as hvd
    from ringtrain import optim

    hvd.init(shared_memory="off" if options.without_shared_memory else "auto")
    size = options.hosts * options.ranks
    islands = [list(range(first, first + size)) for first in range(0, hvd.size(), size)]
    weights = [np.zeros(ELEMENTS, np.float32) for _ in range(ARRAYS)]
    gradients = [np.full(ELEMENTS, hvd.rank() + 1.0, np.float32) for _ in range(ARRAYS)]
    how = {"overlap": options.overlap, "compression": hvd.Compression.int8, "islands": islands}
    optimizer = hvd.DiLoCo(optim.SGD(lr=1e-3), weights, options.every, **how)
    hvd.barrier()
    seconds = []
    for _ in range(options.steps):
        began = time.perf_counter()
        time.sleep(options.compute_ms / 1e3)
        optimizer.step(weights, gradients)
        seconds.append(time.perf_counter() - began)
    hvd.barrier()
    if hvd.rank() == 0:
        print("RESULT", json.dumps(seconds), flush=True)


def seconds_of_steps(hosts: SimulatedHosts, options: argparse.Namespace) -> list[float]:
    """Train on all hosts."""
    command = ["-m", "measure.islands", "--on-rank", *sys.argv[1:]]
    seconds: list[float] = result_of_ranks(hosts, options.ranks, "the training", command)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="50mbit", help="of the link of each site (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="of each island (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="of each host (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--every", type=int, default=50, metavar="H", help="default: %(default)s")
    parser.add_argument("--overlap", type=int, default=0, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--compute-ms", type=float, default=0, metavar="X", help="that a step waits, as if it computed")
    parser.add_argument("--without-shared-memory", action="store_true", help="of the ranks of a host")
    parser.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_rank:
        train(options)
        return 0
    count = 2 * options.hosts
    sites = [range(options.hosts), range(options.hosts, count)]
    try:
        with simulated_hosts(count) as hosts, hosts.slow_sites(sites, ONE_WAY_S, options.rate):
            seconds = seconds_of_steps(hosts, options)
    except HostsUnavailable as reason:
        print(reason, file=sys.stderr)
        return 1
    # The first steps are announced to all ranks; the one after an outer step may have to wait for the link, too.
    later = [(number, one) for number, one in enumerate(seconds, 1) if number > 10]
    inner = [one for number, one in later if number % options.every > 1]
    outer = [one for number, one in later if number % options.every == 0]
    what = f"two islands of {options.hosts} hosts with {options.ranks} ranks each"
    print(f"{options.rate}, 50 ms, {what}, {sum(seconds):.1f} s for all steps")
    print(
        f"inner step: median {1e3 * statistics.median(inner):.2f} ms, 9 of 10 within "
        f"{1e3 * statistics.quantiles(inner, n=10)[-1]:.2f} ms"
    )
    if outer:
        print(f"step with an outer step: median {1e3 * statistics.median(outer):.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
