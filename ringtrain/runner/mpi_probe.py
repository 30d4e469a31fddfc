"""Asks mpi4py about its MPI. Also runs as a process of its own, because loading an MPI library may abort the process
and initialising one inside a launcher's parent breaks the launch."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from ringtrain.job.libmpi import knows_ulfm, loaded_library


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
