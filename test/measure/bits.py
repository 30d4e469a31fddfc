"""Whether results follow from timing: pairs of stories with other delays (test/harness/stories.py), over all networks.

In test/: `python -m measure.bits --pairs 1000`. Simulated hosts with two ranks each are among them, which need root.
Prints what differs, and ends with 1 if something does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from harness.hosts import HostsUnavailable, simulated_hosts
from harness.stories import differences, process_sets

import ringtrain as hvd
from measure.hosts import result_of_ranks

NETWORKS: dict[str, dict[str, str]] = {
    "sockets": {"network": "sockets", "shared_memory": "off"},
    "mpi": {"network": "mpi", "shared_memory": "off"},
    "shared memory": {"network": "sockets"},
}
RANKS = range(2, 9)


def of_ranks(seeds: range) -> None:
    """Runs on each rank; rank 0 prints what differs."""
    hvd.init()
    with process_sets() as sets:
        found = [difference for seed in seeds for difference in differences(seed, sets)]
    all_found = hvd.allgather_object(found)
    if hvd.rank() == 0:
        print("RESULT", json.dumps([one for of_rank in all_found for one in of_rank]), flush=True)


def _run(ranks: int, options: dict[str, str], seeds: range) -> list[str]:
    environment = {**os.environ, **{f"RINGTRAIN_{name.upper()}": text for name, text in options.items()}}
    ringrun = [sys.executable, "-m", "ringtrain.run", "--no-prefix-output", "-np", str(ranks)]
    ringrun += ["--network", options.get("network", "sockets")]
    command = [*ringrun, sys.executable, "-m", "measure.bits", *_of_ranks(seeds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    result = re.search(r"RESULT (\[.*\])", done.stdout)
    if result is None:
        raise SystemExit(f"{ranks} ranks with {options} have failed:\n{done.stdout}\n{done.stderr}")
    found: list[str] = json.loads(result[1])
    return found


def _of_ranks(seeds: range) -> list[str]:
    return ["--of-ranks", str(seeds.start), str(seeds.stop)]


def jobs(options: dict[str, str]) -> Iterator[tuple[str, int, dict[str, str]]]:
    """Yields the name, the number of ranks and the options of each; 0 ranks are those of two hosts."""
    for (name, of_network), ranks in itertools.product(NETWORKS.items(), RANKS):
        yield name, ranks, {**of_network, **options}
    yield "2 hosts with 2 ranks each", 0, options
    yield "3 hosts with 2 ranks each", 0, options


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, metavar="N", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first one (default: %(default)s)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of ringtrain")
    parser.add_argument("--of-ranks", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.of_ranks:
        of_ranks(range(*arguments.of_ranks))
        return 0
    options = dict(option.split("=", 1) for option in arguments.option)
    all_jobs = list(jobs(options))
    found: list[str] = []
    for number, (name, ranks, of_job) in enumerate(all_jobs):
        begin, end = (arguments.seed + arguments.pairs * place // len(all_jobs) for place in (number, number + 1))
        if ranks:
            of_this = _run(ranks, of_job, range(begin, end))
        else:
            os.environ.update({f"RINGTRAIN_{option.upper()}": text for option, text in options.items()})
            try:
                with simulated_hosts(int(name[0])) as hosts:
                    of_this = result_of_ranks(hosts, 2, name, ["-m", "measure.bits", *_of_ranks(range(begin, end))])
            except HostsUnavailable as reason:
                print(f"{name}: left out, {reason}")
                continue
        print(f"{name}, {ranks or 2 * int(name[0])} ranks: {end - begin} pairs, {len(of_this)} differences", flush=True)
        found += of_this
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
