"""The error classes by which MPI tells of dead ranks (User-Level Failure Mitigation), which not every mpi4py knows."""

from __future__ import annotations

from typing import Any


def error_classes(MPI: Any) -> tuple[int, int]:
    """The classes of a failed process and of a revoked communicator; ERR_UNKNOWN where there are none.

    mpi4py has names for them since 4.0, and gives them that value where its MPI library has no ULFM.
    """
    return getattr(MPI, "ERR_PROC_FAILED", MPI.ERR_UNKNOWN), getattr(MPI, "ERR_REVOKED", MPI.ERR_UNKNOWN)


def is_known(MPI: Any) -> bool:
    """Whether mpi4py and its library can tell a dead rank from any other trouble."""
    return bool(error_classes(MPI)[0] != MPI.ERR_UNKNOWN)
