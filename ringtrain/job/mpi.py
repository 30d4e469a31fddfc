"""What the core must know of MPI, taken from mpi4py, which owns it: finds the library, initialises and finalises it.

Nothing here is imported or called in a job of one rank.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ringtrain._core as _core
from ringtrain.job import launched_by, sockets, srun_mpi, ulfm
from ringtrain.job.libmpi import loaded_library
from ringtrain.job.roll_call import meet
from ringtrain.job.world import Library, World, introduce, single_world

_is_finalised_here = False


def is_communicator(value: Any) -> bool:
    """Whether it is one of mpi4py, which nobody has who has not imported it."""
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and isinstance(value, MPI.Comm)


def connect(
    comm: Any, settings: dict[str, str], read_tuned: Callable[[], dict[str, str]], over_sockets: bool
) -> tuple[World, dict[str, str]]:
    """The world of `comm`: an mpi4py communicator, a list of ranks of COMM_WORLD, or None for all of COMM_WORLD.

    All its ranks call this together; `settings` must be the same on all of them. Returns also what `read_tuned` returns
    on rank 0, or raises what it raises there.

    Args:
        over_sockets: MPI brings the ranks together and then carries nothing more.

    Raises:
        RuntimeError: started by the launcher of another MPI, or MPI lacks MPI_THREAD_MULTIPLE.
        ValueError: a list of ranks that is not one, or without this rank; settings that differ between ranks.
    """
    timeout_s = float(settings["start_timeout_s"])
    MPI = _import_mpi(timeout_s)
    parent, ranks = _ranks_to_meet(MPI, comm)
    if len(ranks) == 1:
        return single_world(), read_tuned()
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "ringtrain calls MPI from a thread of its own, but MPI was initialised without MPI_THREAD_MULTIPLE; "
            'set mpi4py.rc.thread_level = "multiple" before mpi4py.MPI is imported'
        )

    def work(own: Any) -> tuple[World, dict[str, str]]:
        if over_sockets:
            world, tuned = sockets.connect_over(own.allgather, own.Get_rank(), settings, read_tuned)
        else:
            node = str(_leader_of_node(own))
            world, tuned, _ = introduce(own.allgather, own.Get_rank(), node, settings, read_tuned)
            world = world._replace(network=_describe(MPI, own))
        return world._replace(communicator=own), tuned

    return meet(MPI, parent, ranks, timeout_s, work)


def tell_all(value: Any, settings: dict[str, str]) -> list[Any]:
    """What all ranks of MPI.COMM_WORLD say, by rank. Raises as `connect`."""
    timeout_s = float(settings["start_timeout_s"])
    MPI = _import_mpi(timeout_s)
    everybody = range(MPI.COMM_WORLD.Get_size())

    def work(own: Any) -> list[Any]:
        said: list[Any] = own.allgather(value)
        return said

    return meet(MPI, MPI.COMM_WORLD, everybody, timeout_s, work)


def _import_mpi(timeout_s: float) -> Any:
    """mpi4py's MPI, initialised, after it is certain that the launcher fits."""
    if "mpi4py.MPI" not in sys.modules:
        _import_uninitialised()
        _finalise_at_exit()
    elif not _is_finalised_here:
        _core.expect_finalizing_by_mpi4py()
    from mpi4py import MPI, rc

    if not MPI.Is_initialized():
        _initialise(MPI, timeout_s)
        if rc.finalize is None:  # the script has imported it with rc.initialize = False, so it leaves both to us
            atexit.register(_finalise, MPI)
    launched_by.require_world(launched_by.detect(), MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    return MPI


def _import_uninitialised() -> None:
    """The wrong launcher may make MPI_Init abort, so the library is loaded and looked at first."""
    import mpi4py

    wanted, mpi4py.rc.initialize = mpi4py.rc.initialize, False
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI  # noqa: F401
    finally:
        mpi4py.rc.initialize = wanted


def _finalise_at_exit() -> None:
    """Not left to mpi4py, which would call MPI_Finalize in a forked child, too, where it waits for ever."""
    global _is_finalised_here
    library = ctypes.CDLL(loaded_library())
    functions = library.MPI_Finalized, library.MPI_Finalize
    _core.finalize_mpi_at_exit(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions))
    _is_finalised_here = True


def _initialise(MPI: Any, timeout_s: float) -> None:
    """MPI that mpi4py was told not to initialise, by us or by the script."""
    launch = launched_by.detect()
    if launch is not None and launched_by.is_of_another_mpi(launch, MPI.get_vendor()[0]):
        launched_by.require_world(launch, 1, MPI.Get_library_version())
    if launch is not None:
        srun_mpi.prepare(launch, MPI.get_vendor()[0], _was_built_with_pmix)
    with _end_of_process_after(timeout_s):
        MPI.Init_thread(MPI.THREAD_MULTIPLE)


def _was_built_with_pmix() -> bool:
    return hasattr(ctypes.CDLL(loaded_library()), "PMIx_Init")


def _finalise(MPI: Any) -> None:
    if not MPI.Is_finalized():
        MPI.Finalize()


@contextlib.contextmanager
def _end_of_process_after(timeout_s: float) -> Iterator[None]:
    """MPI_Init can neither be interrupted nor given up, so only the end of the process ends it; 0 s is never."""
    if timeout_s == 0:
        yield
        return
    text = f"ringtrain: MPI_Init has not ended in {timeout_s:g} s (start_timeout_s): some rank has not called init()\n"
    timer = _core.ExitTimer(timeout_s, text)
    try:
        yield
    finally:
        timer.cancel()


def _ranks_to_meet(MPI: Any, comm: Any) -> tuple[Any, Sequence[int]]:
    """The communicator that there is already, and those of its ranks that are to be the world."""
    if comm is None:
        return MPI.COMM_WORLD, range(MPI.COMM_WORLD.Get_size())
    if isinstance(comm, MPI.Comm):
        if comm == MPI.COMM_NULL:
            raise ValueError("init(comm=...) was given MPI.COMM_NULL: this rank does not belong to the communicator")
        return comm, range(comm.Get_size())
    ranks = _ranks_of(comm, MPI.COMM_WORLD.Get_size())
    if MPI.COMM_WORLD.Get_rank() not in ranks:
        raise ValueError(
            f"init(comm={list(ranks)}) was called on rank {MPI.COMM_WORLD.Get_rank()}, which is not in it: call init() "
            "only on the ranks of the list, or on all ranks without it and make a process set"
        )
    return MPI.COMM_WORLD, ranks


def _ranks_of(comm: Any, size: int) -> Sequence[int]:
    if not isinstance(comm, Sequence) or not all(isinstance(rank, int) for rank in comm):
        raise TypeError(f"init(comm=...) takes an mpi4py communicator or a list of ranks, not {comm!r}")
    if len(comm) == 0:
        return range(size)  # as in Horovod
    if len(set(comm)) != len(comm) or not all(0 <= rank < size for rank in comm):
        raise ValueError(f"init(comm={list(comm)}): ranks must be different and between 0 and {size - 1}")
    return comm


def _leader_of_node(own: Any) -> int:
    """The lowest rank on this rank's node."""
    from mpi4py import MPI

    node = own.Split_type(MPI.COMM_TYPE_SHARED, key=own.Get_rank())
    leader = int(node.bcast(own.Get_rank()))
    node.Free()
    return leader


def _describe(MPI: Any, own: Any) -> Library:
    datatypes = {
        "bool": MPI.UINT8_T,  # its bytes are 0 or 1
        "uint8": MPI.UINT8_T,
        "int8": MPI.INT8_T,
        "uint16": MPI.UINT16_T,
        "int16": MPI.INT16_T,
        "uint32": MPI.UINT32_T,
        "int32": MPI.INT32_T,
        "uint64": MPI.UINT64_T,
        "int64": MPI.INT64_T,
        "float32": MPI.FLOAT,
        "float64": MPI.DOUBLE,
        "byte": MPI.BYTE,
    }
    operations = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "product": MPI.PROD}
    handles = {**datatypes, **operations, "errors_return": MPI.ERRORS_RETURN}
    err_proc_failed, err_revoked = ulfm.error_classes(MPI)
    handle_bytes = MPI._sizeof(MPI.Comm)
    mask = (1 << (8 * handle_bytes)) - 1  # the handles of 4 bytes are signed
    return Library(
        library=_require_loaded_library(),
        handle_bytes=handle_bytes,
        communicator=MPI._handleof(own) & mask,
        handles={name: MPI._handleof(handle) & mask for name, handle in handles.items()},
        constants={
            "in_place": int(MPI.IN_PLACE),
            "any_source": MPI.ANY_SOURCE,
            "err_proc_failed": err_proc_failed,
            "err_revoked": err_revoked,
        },
    )


def _require_loaded_library() -> str:
    path = loaded_library()
    if path is None:
        raise RuntimeError("mpi4py is initialised, but no libmpi is mapped into this process")
    return path
