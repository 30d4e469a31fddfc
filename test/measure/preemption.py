"""Tells jobs of their preemption in drawn ways at drawn moments, and says how long they took to save and to end.

    python -m measure.preemption --count 100 --seed 1

Fails if the ranks of a job have not saved at the same step within the grace time, or if it ends with another exit code
than 75.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter

from harness.preempted_job import carry_out, drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="number of jobs (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first one (default %(default)s)")
    options = parser.parse_args()
    found, kinds, failed = [], Counter[str](), 0
    for seed in range(options.seed, options.seed + options.count):
        trial = drawn(seed)
        try:
            found.append(carry_out(trial))
            kinds[f"{trial.command}, {trial.target}"] += 1
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: {error}", flush=True)
    print(f"{len(found)} of {options.count} jobs saved at one step and ended with 75")
    for kind, count in sorted(kinds.items()):
        print(f"  {count:3} {kind}")
    for what in ("saved_s", "ended_s"):
        values = sorted(one[what] for one in found)
        if values:
            print(f"{what}: median {statistics.median(values):.2f}, most {values[-1]:.2f}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
