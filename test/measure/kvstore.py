"""Storms and trials over jobs with servers, with one seed after the other.

    python -m measure.kvstore storms --minutes 10
    python -m measure.kvstore trials --count 300 --at-once 4

A storm kills workers, and servers that have snapshots, and starts them again: the training must learn, and no push may
count twice. A trial kills or stops one or two processes of any role, which may come back: nobody may hang, no
acknowledged push may be lost, and every process concerned must get an error in time.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kvstore_trials
from kvstore_storm import Storm, storm


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill processes of jobs with servers at random.")
    parser.add_argument("what", choices=("storms", "trials"))
    parser.add_argument("--count", type=int, default=200, help="trials (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=1, help="trials at a time (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of storms (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.what == "trials":
        return _trials(arguments.seed, arguments.count, arguments.at_once)
    return _storms(arguments)


def _trials(first: int, count: int, at_once: int) -> int:
    with ThreadPoolExecutor(at_once) as threads:
        failures = sum(threads.map(_failures_of_trial, range(first, first + count)))
    print(f"{count} trials, {failures} of which failed")
    return int(failures > 0)


def _failures_of_trial(seed: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(f"seed {seed}: {kvstore_trials.carry_out(Path(folder), seed)}", flush=True)
        except kvstore_trials.Failed as error:
            print(f"seed {seed}: FAILED: {error}", file=sys.stderr, flush=True)
            return 1
    return 0


def _storms(arguments: argparse.Namespace) -> int:
    kills: Counter[str] = Counter()
    failures, accuracy = 0, 1.0
    end = time.monotonic() + 60 * arguments.minutes
    for seed in itertools.count(arguments.seed):
        if time.monotonic() > end:
            break
        with tempfile.TemporaryDirectory() as folder:
            try:
                memory, servers_return = ["auto", "off"][seed % 2], seed % 4 > 1
                of_storm, least = storm(Path(folder), seed, memory, servers_return)
                kills += of_storm
                accuracy = min(accuracy, least)
                print(f"seed {seed}: {dict(of_storm)} killed, accuracy {least}", flush=True)
            except Storm as error:
                failures += 1
                print(f"seed {seed}: {error}", file=sys.stderr, flush=True)
    storms = seed - arguments.seed
    print(f"{dict(kills)} killed in {storms} storms, {failures} of which failed; the least accuracy was {accuracy}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
