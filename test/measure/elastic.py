"""Storms over elastic trainings, with one seed after the other, until so many processes were killed.

    python -m measure.elastic --kills 1000

Each storm must end with the weights of a training that nobody disturbed: no committed step is lost, and nothing hangs.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

from elastic_storm import STEPS_OF_STORM, require_same_weights, storm, undisturbed


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill processes of elastic trainings at random.")
    parser.add_argument("--kills", type=int, default=1000, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first storm (default: %(default)s)")
    parser.add_argument("--longest", type=float, default=15.0, metavar="S", help="storm (default: %(default)s s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        expected = undisturbed(Path(folder), STEPS_OF_STORM)
    kills = failures = 0
    for seed in itertools.count(arguments.seed):
        memory = ["auto", "off"][seed % 2]
        with tempfile.TemporaryDirectory() as name:
            try:
                of_storm = storm(Path(name), seed, memory, arguments.longest)
                require_same_weights(Path(name), expected)
            except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                of_storm, failures = 0, failures + 1
                print(f"seed {seed}: {error}", file=sys.stderr, flush=True)
        kills += of_storm
        print(f"seed {seed}, shared memory {memory}: {of_storm} kills, {kills} in all", flush=True)
        if kills >= arguments.kills:
            break
    print(f"{kills} kills in {seed - arguments.seed + 1} storms, {failures} of which did not end as they must")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
