"""Run a command on the first of several simulated hosts with links of a given rate and delay: anyone can measure there.

In test/:

    python -m measure.hosts --hosts 4 --ranks 1 --rate 1gbit -- \\
        python -m ringtrain.bench allreduce -np 4 -H {hosts} --link-gbit 1 --min-bytes 1M

{hosts} becomes the names of the hosts with the ranks of each, as ringrun and ringtrain.bench take them. Needs root; see
test/harness/hosts.py.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.hosts import HostsUnavailable, SimulatedHosts, simulated_hosts

RATE_HELP = (
    "what a host sends, as tc writes it, such as 1gbit; or a rate for each host, for both directions of its link"
)


def result_of_ranks(hosts: SimulatedHosts, ranks_of_host: int, what: str, command: Sequence[str]) -> Any:
    """Run a command of Python as ranks on all hosts, with one thread in each, and return what one prints as RESULT."""
    slots = ",".join(f"{name}:{ranks_of_host}" for name in hosts.names)
    ringrun = [sys.executable, "-m", "ringtrain.run", "-np", str(ranks_of_host * len(hosts.names)), "-H", slots]
    environment = {**os.environ, **hosts.environment, "OMP_NUM_THREADS": "1"}
    whole = hosts.command_on(0, [*ringrun, sys.executable, *command])
    done = subprocess.run(whole, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    found = re.search(r"RESULT ([\[{].*[\]}])", done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"{what} has failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of each host (default: %(default)s)")
    parser.add_argument("--rate", metavar="RATE[,RATE...]", help=RATE_HELP)
    parser.add_argument("--delay-ms", type=float, default=0, metavar="X", help="of each message, one way")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="behind --")
    arguments = parser.parse_args()
    try:
        with contextlib.ExitStack() as stack:
            rate = arguments.rate.split(",") if arguments.rate and "," in arguments.rate else arguments.rate
            hosts = stack.enter_context(simulated_hosts(arguments.hosts, rate))
            if arguments.delay_ms:
                stack.enter_context(hosts.bad_cable(arguments.delay_ms / 1000))
            slots = ",".join(f"{name}:{arguments.ranks}" for name in hosts.names)
            command = [word.replace("{hosts}", slots) for word in arguments.command]
            environment = {**os.environ, **hosts.environment}
            return subprocess.run(hosts.command_on(0, command), env=environment, check=False).returncode
    except HostsUnavailable as reason:
        print(reason, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
