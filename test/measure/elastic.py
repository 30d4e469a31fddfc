"""Storms over elastic trainings, with one seed after the other, until there were so many faults.

    python -m measure.elastic --faults 1000
    python -m measure.elastic --faults 1000 --only kill start
    python -m measure.elastic --faults 1000 --hosts

Each storm must end with the weights of a training that nobody disturbed: no committed step is lost, and nothing hangs.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from elastic_storm import FAULTS, STEPS_OF_STORM, require_same_weights, storm, storm_of_hosts, undisturbed

from ringtrain.job.rendezvous import generations

# Instead of 10 s and of 30 s: a stopped process wakes up before and after that.
SILENCE_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Disturb elastic trainings at random.")
    parser.add_argument("--faults", type=int, default=1000, help="in all (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=list(FAULTS), choices=sorted(set(FAULTS)), help="of these kinds")
    parser.add_argument("--hosts", action="store_true", help="under ringrun, with hosts that come and go")
    parser.add_argument("--seed", type=int, default=0, help="of the first storm (default: %(default)s)")
    parser.add_argument("--longest", type=float, default=15.0, metavar="S", help="storm (default: %(default)s s)")
    arguments = parser.parse_args()
    generations.SILENCE_S = generations.SILENCE_IN_INIT_S = SILENCE_S
    with tempfile.TemporaryDirectory() as folder:
        expected = undisturbed(Path(folder), STEPS_OF_STORM)
    counts: Counter[str] = Counter()
    failures = 0
    for seed in itertools.count(arguments.seed):
        memory = ["auto", "off"][seed % 2]
        of_storm: dict[str, int] = {}
        with tempfile.TemporaryDirectory() as name:
            try:
                if arguments.hosts:
                    of_storm = storm_of_hosts(Path(name), seed, arguments.longest)
                else:
                    of_storm = storm(Path(name), seed, memory, arguments.longest, arguments.only)
                require_same_weights(Path(name), expected)
            except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                failures += 1
                print(f"seed {seed}: {error}", file=sys.stderr, flush=True)
        counts.update(of_storm)
        print(f"seed {seed}, shared memory {memory}: {of_storm}; {counts.total()} in all", flush=True)
        if counts.total() >= arguments.faults:
            break
    print(f"{dict(counts)} in {seed - arguments.seed + 1} storms, {failures} of which did not end as they must")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
