"""The MPI library that is mapped into this process, and whether it tells of dead ranks."""

from __future__ import annotations

import re
from typing import Any

# IBM's has a name of its own, Cray's is called after the compiler. Not libmpi_cxx and the like, which lie beside them.
_LIBRARY = re.compile(r"/libmpi(ch|_(abi|ibm|(cray|gnu|intel|nvidia|amd|aocc)\w*))?\.so[.\d]*$")


def loaded_library() -> str | None:
    """Path of the libmpi that is mapped into this process, or None."""
    with open("/proc/self/maps") as maps:
        paths = [line.split(maxsplit=5)[-1].strip() for line in maps]
    return next((path for path in paths if _LIBRARY.search(path)), None)


def ulfm_error_classes(MPI: Any) -> tuple[int, int]:
    """The classes of a failed process and of a revoked communicator; ERR_UNKNOWN where there are none.

    mpi4py has names for them since 4.0, and gives them that value where its MPI library has no ULFM.
    """
    return getattr(MPI, "ERR_PROC_FAILED", MPI.ERR_UNKNOWN), getattr(MPI, "ERR_REVOKED", MPI.ERR_UNKNOWN)


def knows_ulfm(MPI: Any) -> bool:
    """Whether mpi4py and its library can tell a dead rank from any other trouble."""
    return bool(ulfm_error_classes(MPI)[0] != MPI.ERR_UNKNOWN)
