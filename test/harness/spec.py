"""Which tests share a job, and the command that starts it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

from hosts import SimulatedHosts

# The folder of the tests: there `python -m harness.worker` finds this package.
TEST_FOLDER = Path(__file__).resolve().parent.parent

# More ranks than cores run here: a pool of threads in each would only be in the way.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class JobSpec(NamedTuple):
    """Tests of equal spec run in the same job, one after another.

    `hosts` is the number of ranks of each simulated host, empty for this host; `own_test` the id of a test that wants
    a job of its own, else empty.
    """

    path: Path
    size: int
    hosts: tuple[int, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    own_test: str = ""


def command(spec: JobSpec, folder: Path, hosts: SimulatedHosts | None) -> list[str]:
    """The command line of the job whose files lie in `folder`. One rank is plain Python, as a user may start it."""
    worker = [sys.executable, "-m", "harness.worker", str(folder)]
    launcher = [sys.executable, "-m", "ringtrain.run", "-np", str(spec.size)]
    if hosts is not None:
        slots = ",".join(f"{name}:{ranks}" for name, ranks in zip(hosts.names, spec.hosts, strict=True))
        return hosts.command_on(0, [*launcher, "-H", slots, *worker])
    return worker if spec.size == 1 else [*launcher, *worker]


def environment(spec: JobSpec, hosts: SimulatedHosts | None) -> dict[str, str]:
    """This process's environment, what the spec adds, and the modules that pytest sees."""
    return {
        **os.environ,
        **_ONE_THREAD,
        "PYTHONPATH": os.pathsep.join([str(TEST_FOLDER), *(os.path.abspath(path) for path in sys.path)]),
        **(hosts.environment if hosts is not None else {}),
        **dict(spec.environment),
    }
