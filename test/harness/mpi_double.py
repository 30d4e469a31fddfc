"""A double of the MPI library, built from test/engine/mpi_double/ and linked with the real one.

double = mpi_double.install()
hvd.init()
...
double.write_late()
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from harness.compiling import filled, folder_of, run_compiler
from harness.rooms import TEST_FOLDER
from ringtrain.job import mpi
from ringtrain.job.libmpi import loaded_library
from ringtrain.job.world import Library

_SOURCE = TEST_FOLDER / "engine" / "mpi_double" / "mpi_double.cc"
_NAME = "libmpi_double.so"
_ANY_RANK, _NO_RANK = -1, -2


class MpiDouble:
    """Controls the fake in the process of a test."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.mpi_double_write_late.restype = ctypes.c_size_t

    def write_late(self) -> int:
        """Delivers all that MPI has not received yet. How many bytes there were."""
        return int(self._library.mpi_double_write_late())

    def refuse(self, *, to: int | None = None, from_bytes: int = 0, after: int = 0) -> None:
        """Makes sends of so many bytes or more fail, but for the next `after` of such calls.

        To a rank, or to any; then in collective calls, too.
        """
        from mpi4py import MPI

        rank = _ANY_RANK if to is None else to
        self._library.mpi_double_refuse(rank, ctypes.c_size_t(from_bytes), after, MPI.ERR_OTHER)

    def refuse_nothing(self) -> None:
        self._library.mpi_double_refuse(_NO_RANK, ctypes.c_size_t(0), 0, 0)

    def let_cancel(self) -> None:
        """Makes the real library cancel what it can from now on."""
        self._library.mpi_double_let_cancel(1)

    def communicators(self) -> int:
        """How many the core has made here and not freed yet."""
        return int(self._library.mpi_double_communicators())


def install() -> MpiDouble:
    """The next init() of this process gives it to the core.

    Raises DoubleUnavailable where there is no compiler.
    """
    from mpi4py import MPI

    real = loaded_library()
    assert real is not None
    path = _build(real, "int" if MPI._sizeof(MPI.Comm) == 4 else "void*")
    describe = mpi._describe

    def describe_double(*arguments: Any) -> Library:
        return describe(*arguments)._replace(library=str(path))

    mpi._describe = describe_double
    return MpiDouble(path)


def _build(real: str, handle: str) -> Path:
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", f"-DMPI_HANDLE={handle}", real]

    def compile_to(folder: Path) -> None:
        run_compiler([str(_SOURCE), *flags, "-ldl", "-o", str(folder / _NAME)])

    return filled(folder_of("mpi-double", flags, [_SOURCE]), compile_to) / _NAME
