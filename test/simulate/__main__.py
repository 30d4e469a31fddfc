"""`python -m simulate WORLD`, in test/: tells the stories of some seeds and says in which of them a rule was broken."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from simulate.programs import NAMES, SEEDS_AT_A_TIME, Finding, Program, Total, program

_MOST_SHOWN = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 without a finding, 1 with one, 2 where the command line is wrong."""
    parser = argparse.ArgumentParser(prog="python -m simulate", description=__doc__)
    parser.add_argument("world", choices=NAMES)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, metavar="N", help="one story")
    which.add_argument("--seeds", type=_range, metavar="A:B", help="the stories of the seeds A to B - 1")
    which.add_argument("--seconds", type=float, metavar="S", help="stories for so long, from a random seed on")
    parser.add_argument("--trace", action="store_true", help="with --seed: print one line for each event")
    parser.add_argument(
        "--without", type=_numbers, default=[], metavar="N,N", help="with --seed: without these of its faults"
    )
    parser.add_argument(
        "--all-faults", action="store_true", help="with --seed: do not look for the faults that the finding needs"
    )
    arguments = parser.parse_args(argv)
    if arguments.seed is None and (arguments.trace or arguments.without or arguments.all_faults):
        parser.error("--trace, --without and --all-faults are about one story: give --seed")
    world = program(arguments.world)
    if arguments.seed is not None:
        return tell(world, arguments.seed, arguments)
    if arguments.seconds is not None:
        first = secrets.randbelow(1 << 40)
        return search(world, arguments.world, range(first, first + (1 << 40)), arguments.seconds)
    return search(world, arguments.world, arguments.seeds)


def tell(world: Program, seed: int, arguments: argparse.Namespace) -> int:
    """One story; if it has a finding, with the faults that this needs."""
    without = arguments.without
    findings, total = world.run(range(seed, seed + 1), without=without)
    faults = world.faults(seed)
    if findings and not without and not arguments.all_faults:
        needed = world.needed_faults(seed)
        without = [number for number in range(len(faults)) if number not in needed]
    for number, fault in enumerate(faults):
        print(f"fault {number}: {fault}{', left out' if number in without else ''}", flush=True)
    if arguments.trace:
        world.trace(seed, without)
    for finding in findings:
        print(f"finding: {finding.text}")
    print(f"seed {seed}: {total.events} events, hash {total.hash}")
    return int(bool(findings))


def search(world: Program, name: str, seeds: range, seconds: float | None = None) -> int:
    """The stories of these seeds on all cores, until the time is over."""
    begin, stories, events, shown, found = time.monotonic(), 0, 0, 0, 0
    for findings, total in _runs(world, seeds, seconds):
        stories, events, found = stories + total.stories, events + total.events, found + total.findings
        for finding in findings[: _MOST_SHOWN - shown]:
            shown += 1
            print(f"seed {finding.seed}: {finding.text}", flush=True)
    lasted = time.monotonic() - begin
    print(
        f"{name}: {stories} stories from seed {seeds.start} on, {events} events in {lasted:.1f} s, "
        f"{events / lasted / 1000:.0f} thousand events/s, {found} findings"
    )
    if found:
        print(f"Tell one again with its trace: python -m simulate {name} --seed N --trace")
    return int(found > 0)


def _runs(world: Program, seeds: range, seconds: float | None) -> Iterator[tuple[list[Finding], Total]]:
    end = None if seconds is None else time.monotonic() + seconds

    def run(part: range) -> tuple[list[Finding], Total] | None:
        left = None if end is None else end - time.monotonic()
        return world.run(part, seconds=left) if left is None or left > 0 else None

    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:
        first = seeds.start
        while first < seeds.stop:
            parts = []
            for _ in range(2 * cores):
                parts.append(range(first, min(first + SEEDS_AT_A_TIME, seeds.stop)))
                first = parts[-1].stop
            results = [one for one in pool.map(run, parts) if one is not None]
            yield from results
            if len(results) < len(parts):
                return


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end))


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


if __name__ == "__main__":
    sys.exit(main())
