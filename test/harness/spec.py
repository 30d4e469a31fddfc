"""Which tests share a job, and what starts it."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import NamedTuple

from harness.hosts import SimulatedHosts
from harness.rooms import TEST_FOLDER
from ringtrain.runner.hosts import Host
from ringtrain.runner.job import Job, environment_of_ranks
from ringtrain.runner.launchers import Launcher, OwnStarter, launcher_of_mpi
from ringtrain.runner.mpi_library import probe

# More ranks than cores run here: a pool of threads in each would only be in the way.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class JobSpec(NamedTuple):
    """Tests of equal spec run in the same job, one after another, whatever file they are from.

    `hosts` is the number of ranks of each simulated host, empty for this host; `rate` the limit of what each of these
    sends, empty for none; `library` one that takes long to import, which ranks that do not need it are spared;
    `own_test` the id of a test that wants a job of its own, else empty.
    """

    size: int
    hosts: tuple[int, ...] = ()
    rate: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    library: str = ""
    own_test: str = ""


class Command(NamedTuple):
    """Returns the command that starts a job."""

    line: list[str]
    environment: dict[str, str]


# Open MPI's prterun has its files in a folder that is named after its process id. One that is killed leaves them, and
# the next process of that number, some ten thousand later, then says that its listener has failed.
FOLDER_OF_LAUNCHERS = "PRTE_MCA_prte_tmpdir_base"


def command(spec: JobSpec, folder: Path, hosts: SimulatedHosts | None) -> Command:
    """Returns the command that starts the job with its files in `folder`, as ringrun would. One rank is plain Python.

    Raises MpiNotFound.
    """
    worker = [sys.executable, "-m", "harness.worker", str(folder)]
    environment = {**_environment(spec, hosts), FOLDER_OF_LAUNCHERS: str(folder)}
    if spec.size == 1 and hosts is None:
        return Command(worker, environment)
    slots = [Host(*one) for one in zip(hosts.names, spec.hosts, strict=True)] if hosts is not None else []
    job = Job(worker, spec.size, slots, environment_of_ranks(environment))
    line = _launcher().arguments(job)
    return Command(hosts.command_on(0, line) if hosts is not None else line, _launcher().environment(job))


@functools.cache
def _launcher() -> Launcher:
    """Looked for once: ringrun takes half a second to find it. Without mpi4py it is that of ringrun itself."""
    if importlib.util.find_spec("mpi4py") is None:
        return OwnStarter()
    mpi = probe()
    return launcher_of_mpi("auto", mpi["library"], mpi["path"], os.environ)


def _environment(spec: JobSpec, hosts: SimulatedHosts | None) -> dict[str, str]:
    """This process's environment, what the spec adds, and the modules that pytest sees."""
    return {
        **os.environ,
        **_ONE_THREAD,
        "PYTHONPATH": os.pathsep.join([str(TEST_FOLDER), *(os.path.abspath(path) for path in sys.path)]),
        **(hosts.environment if hosts is not None else {}),
        **dict(spec.environment),
    }
