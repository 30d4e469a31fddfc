"""Checks of a job in which one rank was struck: see test/measure/faults/injection.py.

outcome = run(kill(rank=1).during("reduce"), ranks=3)
require_error(outcome, hvd.PeerLostError, "is gone")
require_clean_end(outcome)
"""

import functools
import os
import re
import subprocess
import sys

import pytest
from measure.faults import trial
from measure.faults.trial import Outcome, Place, processes_of

from harness.hosts import hosts_or_skip
from ringtrain.runner.hosts import Host
from ringtrain.runner.mpi_library import probe

__all__ = ["describe", "processes_of", "require_clean_end", "require_error", "run", "start", "victim"]

# The time in which the others must notice: on one host, and across hosts.
LIMIT_S = {1: 2.0, 2: 5.0}


def run(injection, ranks=3, hosts=(), rate=None, **options):
    """Run a job of so many ranks, or of hosts with so many each and links of that rate; options as for init()."""
    if not hosts:
        return trial.run(injection, Place(ranks), options)
    if library() != "Open MPI":
        pytest.skip("across hosts only Open MPI is started here so that the other ranks live on")
    with hosts_or_skip(len(hosts), rate) as simulated:
        slots = [Host(*one) for one in zip(simulated.names, hosts, strict=True)]
        place = Place(sum(hosts), slots, simulated.command_on(0, []), simulated.environment)
        return trial.run(injection, place, options)


def start(program, ranks, folder, *arguments):
    """ringrun with a program that gets `folder` as its first argument, so that its processes can be found by it."""
    python = [sys.executable, "-c", program, str(folder), *arguments]
    command = [sys.executable, "-m", "ringtrain.run", "-np", str(ranks), *python]
    environment = trial.marked(os.environ, str(folder))
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def require_error(outcome: Outcome, error, *texts, limit_s=None):
    """All others got this error, in time and again for the next operation, and its text has what is searched for."""
    assert outcome.struck_at is not None, describe(outcome)
    assert outcome.silent() == [] or trial.ends_all(outcome.injection.kind), describe(outcome)
    for report in outcome.reports.values():
        assert report.error == error.__name__, describe(outcome)
        assert report.again in (error.__name__, "NotInitializedError"), describe(outcome)
        for text in texts:
            assert re.search(text, report.text), describe(outcome)
    hosts = min(2, len(outcome.place.hosts) or 1)
    if outcome.reports:
        assert outcome.slowest_s() < (limit_s or LIMIT_S[hosts]), describe(outcome)


def require_clean_end(outcome: Outcome):
    """The launcher ended by itself and told of the failure; no process and no shared memory is left."""
    assert outcome.returncode not in (None, 0), describe(outcome)
    assert outcome.orphans == [] and outcome.leftovers == [], describe(outcome)


def victim(outcome: Outcome):
    """How an error names the rank that was struck, as a regular expression."""
    return rf"rank {outcome.injection.rank} \(host [\w-]+, pid \d+\)"


def describe(outcome: Outcome):
    reports = "\n".join(f"rank {rank}: {report}" for rank, report in outcome.reports.items())
    seen = f"status {outcome.returncode}, hung {outcome.silent()}, left {outcome.orphans} {outcome.leftovers}"
    return f"{outcome.injection}: {seen}, struck at {outcome.struck_at}\n{reports}\n{outcome.output[-4000:]}"


@functools.cache
def library():
    return probe()["library"]
