"""Which network a job gets, and which launcher goes with it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import NamedTuple

from ringtrain.job.choice import Choice
from ringtrain.options import table
from ringtrain.runner.allocation.hosts import UsageError
from ringtrain.runner.job import Job
from ringtrain.runner.launchers.command_lines import (
    Launcher,
    OwnStarter,
    Srun,
    choose_launcher,
    find_srun,
    require_srun,
)
from ringtrain.runner.launchers.mpi_library import probe


class Chosen(NamedTuple):
    """A launcher; `why` says in words which network the job has and why, and which MPI starts it, if one does."""

    launcher: Launcher
    why: list[str]


def choose(launcher: str, environ: Mapping[str, str] = os.environ) -> Chosen:
    """The launcher for a job with the options of `environ`.

    Args:
        launcher: "auto", "mpirun" (that of the MPI that mpi4py uses), "srun", or without MPI "ssh" (ringrun itself)
            and "yarn".

    Raises:
        UsageError: the launcher and the network exclude each other, or the option network is none.
        MpiNotFound: as `probe` and `choose_launcher`.
    """
    network = choose_network(launcher, environ)
    why = f"network {network.network}: {network.reason}"
    if network.network == "sockets" and launcher != "mpirun":
        return Chosen(_without_mpi(launcher, environ), [why])
    mpi = probe()
    found = choose_launcher(launcher, mpi["library"], mpi["path"], environ)
    return Chosen(found, [why, f"{mpi['library']} {mpi['version']} at {mpi['path']}"])


def choose_elastic(launcher: str, job: Job) -> Chosen:
    """Who starts the keepers of an elastic job: srun on the hosts of an allocation, else ssh, or as `launcher` says.

    Raises UsageError and, for "mpirun", MpiNotFound.
    """
    why = "network sockets: an elastic job needs no MPI"
    if launcher == "yarn":
        return Chosen(_yarn(), [why])
    if launcher == "mpirun":
        mpi = probe()
        found = choose_launcher(launcher, mpi["library"], mpi["path"], job.environment)
        return Chosen(OwnStarter(found), [why, f"{mpi['library']} {mpi['version']} starts what starts the ranks"])
    srun = find_srun(job.environment)
    if launcher == "srun":
        srun = require_srun(srun)
    is_by_srun = launcher == "srun" or (launcher == "auto" and job.hosts_are_allotted)
    return Chosen(OwnStarter(Srun(srun, "none") if srun is not None and is_by_srun else None), [why])


def choose_network(launcher: str, environ: Mapping[str, str] = os.environ) -> Choice:
    """What the option network of `environ` means for a job that is yet to be started. Raises UsageError."""
    try:
        wanted = table.resolve({}, environ)["network"]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if launcher == "ssh" and wanted == "mpi":
        raise UsageError("--launcher ssh starts ranks without an MPI; leave it out, or say --network sockets")
    if launcher == "yarn" and wanted == "mpi":
        raise UsageError("--launcher yarn starts ranks without an MPI; leave --network mpi out")
    if wanted != "auto":
        return Choice(wanted, f"network={wanted}")
    if launcher in ("ssh", "yarn"):
        return Choice("sockets", f"--launcher {launcher} needs no MPI")
    if launcher != "mpirun" and importlib.util.find_spec("mpi4py") is None:
        return Choice("sockets", "mpi4py is not installed")
    return Choice("mpi", "mpi4py is installed")


def _without_mpi(launcher: str, environ: Mapping[str, str]) -> Launcher:
    if launcher == "yarn":
        return _yarn()
    srun = find_srun(environ)
    if launcher == "srun":
        return Srun(require_srun(srun), "none")
    return OwnStarter() if srun is None or launcher == "ssh" else Srun(srun, "none")


def _yarn() -> Launcher:
    from ringtrain.runner.launchers.yarn import Yarn  # whose client of HTTP other jobs do not wait for

    return Yarn()
