"""What `srun --mpi` has prepared for a rank, and whether its MPI library gets on with that. Known before the library is
initialised, which may abort the process or print pages about it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, MutableMapping

from ringtrain.job.launched_by import Launch, SlurmStep

# Slurm's library for what `--mpi=pmi2` speaks, as distributions call it; beside Slurm's own libraries it is libpmi2.so.
_PMI2_LIBRARIES = ("libpmi2.so.0", "libpmi2.so")
_INTEL = "I_MPI_PMI_LIBRARY"
_SECURITY = "PMIX_SECURITY_MODE"


def prepare(
    launch: Launch,
    library: str,
    knows_pmix: Callable[[], bool],
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Set what the library needs under srun, or refuse what cannot work.

    Args:
        launch: what `launched_by.detect` returned.
        library: as mpi4py's `MPI.get_vendor()` names it.
        knows_pmix: whether the library was built with PMIx.
        environ: of this process, changed in place.

    Raises:
        RuntimeError: this library cannot start so; the message says which --mpi it wants.
    """
    if launch.launcher != SlurmStep.NAME:
        return
    if "PMIX_NAMESPACE" in environ:
        if library not in ("Open MPI", "Intel MPI") and not knows_pmix():
            raise RuntimeError(
                f"Slurm started {launch.size} ranks with --mpi=pmix, which this {library} was built without: "
                f"{_way_out('pmi2', launch)}"
            )
        # Slurm offers munge as well, and a PMIx without it complains at length before it takes the other.
        if "native" in environ.get(_SECURITY, "").split(","):
            environ[_SECURITY] = "native"
    elif library == "Intel MPI" and "PMI_FD" in environ and _INTEL not in environ:
        found = next(filter(_can_be_loaded, _PMI2_LIBRARIES), None)
        if found is not None:
            environ[_INTEL] = found
        elif environ.get("SLURM_STEP_NUM_NODES", "1") != "1":
            raise RuntimeError(
                f"Slurm started {launch.size} ranks with --mpi=pmi2, with which Intel MPI wants libpmi2.so of Slurm on "
                f"several hosts, and finds none: set {_INTEL} to its path, or {_way_out('pmix', launch)}"
            )


def _way_out(kind: str, launch: Launch) -> str:
    return (
        f"start with `srun --mpi={kind}`, or with `ringrun --launcher srun -np {launch.size} python ...`, which picks "
        "the right one by itself."
    )


def _can_be_loaded(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
