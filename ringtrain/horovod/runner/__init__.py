"""`horovod.runner`: starting jobs from Python, and small parts of the launcher of Horovod that other code imports.

The modules `launch` and `mpi_run` of it are here: `finder` finds this one under their names, too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ringtrain.runner.command import main_of_horovodrun
from ringtrain.runner.function import run as run
from ringtrain.runner.mpi_library import INTEL_MPI, MPICH, OPEN_MPI, Family, MpiNotFound, family_of, probe

# --- `horovod.runner.launch`: the command `horovodrun`, which is `ringrun --horovod` ----------------------------------


def run_commandline() -> None:
    """Runs horovodrun with the arguments of this process. Raises SystemExit with its exit code."""
    sys.exit(main_of_horovodrun())


# --- `horovod.runner.mpi_run`: which MPI there is. `ringrun` starts ranks with it -------------------------------------


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Whether mpi4py and an MPI are installed for this Python."""
    return _family() is not None


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether mpi4py uses Open MPI."""
    return _family() is OPEN_MPI


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    """Whether mpi4py uses MPICH."""
    return _family() is MPICH


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether mpi4py uses Intel MPI."""
    return _family() is INTEL_MPI


def _family() -> Family | None:
    try:
        return family_of(probe()["library"])
    except MpiNotFound:
        return None
