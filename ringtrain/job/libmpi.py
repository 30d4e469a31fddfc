"""The MPI library that mpi4py uses: which one is mapped into this process, and what it can do."""

from __future__ import annotations

import ctypes
import json
import re
import sys
from typing import Any

# IBM's has a name of its own, Cray's is called after the compiler. Not libmpi_cxx and the like, which are beside them.
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


# --- `python -m ringtrain.job.libmpi`: mpi4py and its MPI -------------------------------------------------------------

# It runs as a process of its own, because loading an MPI library may abort the process, and initialising one inside the
# parent of a launcher breaks the launch.


def describe(initialize: bool) -> dict[str, Any]:
    """Load MPI in this process and describe it.

    Its thread level, and whether it takes addresses of GPUs, are known only where it is initialised.

    Raises ImportError without mpi4py and RuntimeError where mpi4py finds no MPI library.
    """
    import mpi4py

    if not initialize:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    return {
        "library": vendor,
        "version": ".".join(map(str, version)),
        "path": loaded_library(),
        "standard": ".".join(map(str, MPI.Get_version())),
        "handle_bytes": MPI._sizeof(MPI.Comm),
        "thread_level": levels[MPI.Query_thread()] if MPI.Is_initialized() else None,
        "ulfm": knows_ulfm(MPI),
        "cuda_aware": _is_cuda_aware() if MPI.Is_initialized() else None,
        "mpi4py": mpi4py.__version__,
    }


def _is_cuda_aware() -> bool | None:
    """None where the library has no such question."""
    ask = getattr(ctypes.CDLL(loaded_library()), "MPIX_Query_cuda_support", None)
    return None if ask is None else bool(ask())


if __name__ == "__main__":
    print(json.dumps(describe(initialize="--initialize" in sys.argv)))
