"""Describes MPI to the core, by mpi4py, which owns it: finds the library, initialises and finalises it.

Nothing here is imported or called in a job of one rank.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import io
import os
import pickle
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Generic, TypeVar

import ringtrain._core as _core
from ringtrain.errors import PeerLostError, RingtrainError, StalledError, list_of_ranks
from ringtrain.job import launched_by, libmpi, sockets
from ringtrain.job.launched_by import Launch, SlurmStep
from ringtrain.job.libmpi import loaded_library
from ringtrain.job.rendezvous import server
from ringtrain.job.world import Exchange, Library, World, introduce, single_world

# --- the ranks come together in init(), within a time: most calls of MPI for it block and take no deadline ------------


T = TypeVar("T")

_PAUSE_S = 0.1
# How long messages get to leave before this rank goes.
_MOMENT_S = 1.0
# Of the caller's own communicator, as there is no other yet.
_HERE_TAG, _VERDICT_TAG = 31_415, 31_416
_NOTHING = bytearray(0)


def meet(MPI: Any, comm: Any, ranks: Sequence[int], timeout_s: float, work: Callable[[Any], T]) -> T:
    """The result of `work`, in which these ranks of `comm` call MPI together. Ctrl-C interrupts it.

    It runs on a thread of its own, which stays behind if it cannot end.

    Args:
        timeout_s: 0 waits for ever.
        work: gets a communicator of these ranks for ringtrain alone, which lives until MPI is finalised.

    Raises:
        StalledError: not all ranks came in time; says which, where the first of them knows.
        PeerLostError: MPI says that a rank has died, or the launcher has ended.
    """
    call = InitBarrier(MPI, comm, ranks)

    communicators: list[Any] = []

    def work_and_end() -> T:
        communicators.append(_own_communicator(comm, ranks))
        result = work(communicators[0])
        call.end()
        return result

    launcher = os.getppid()
    working = _Working(work_and_end)
    deadline = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
    warns_at = time.monotonic() + server.WARNS_AFTER_S
    try:
        while not working.has_ended(_PAUSE_S):
            call.hear_verdict()
            if time.monotonic() > warns_at:
                warns_at = float("inf")
                call.warn_of_missing(timeout_s)
            if os.getppid() != launcher:
                raise PeerLostError(
                    "the launcher has ended while this rank was in init(): another rank has failed; see its output"
                )
            if time.monotonic() > deadline:
                raise StalledError(call.verdict(timeout_s))
        return working.result()
    except MPI.Exception as error:
        if error.Get_error_class() not in libmpi.ulfm_error_classes(MPI):
            call.take_messages()
            raise
        raise call.told_of_death(_failed(comm), error) from None
    except _Incomplete as error:
        raise call.told_of_death(call.await_failed(), error) from None
    finally:
        if not working.has_ended(0):
            _revoke(MPI, communicators, working)


def _own_communicator(parent: Any, ranks: Sequence[int]) -> Any:
    if isinstance(ranks, range):  # all of them
        return parent.Dup()
    return parent.Create_group(parent.Get_group().Incl(ranks))


def _revoke(MPI: Any, communicators: Sequence[Any], working: _Working[Any]) -> None:
    """End what still waits on them, where MPI can do that: a call of mpi4py that fails after Python's end crashes."""
    if communicators and libmpi.knows_ulfm(MPI):
        with contextlib.suppress(MPI.Exception, NotImplementedError):
            communicators[0].Revoke()
            working.has_ended(_MOMENT_S)


class InitBarrier:
    """The first of the ranks knows who has come. If some stay away it tells the others who.

    A rank that MPI tells of a death tells all others: they may wait for this one, which has given up.
    """

    def __init__(self, MPI: Any, comm: Any, ranks: Sequence[int]):
        self._byte = MPI.BYTE
        self._mpi_error = MPI.Exception
        self._comm = comm
        self._first, *self._others = ranks
        self._rank = comm.Get_rank()
        self._is_first = self._rank == self._first
        self._numbers = {rank: number for number, rank in enumerate(ranks)}
        self._here = None if self._is_first else comm.Isend([_NOTHING, self._byte], self._first, _HERE_TAG)

    def end(self) -> None:
        """All have come: take their messages out of the way."""
        if self._here is not None:
            self._here.Wait()
            return
        for rank in self._others:
            self._comm.Recv([_NOTHING, self._byte], rank, _HERE_TAG)

    def take_messages(self) -> None:
        """Receives the messages of a moment after a failure: MPICH waits in MPI_Finalize for those that remain."""
        missing = set(self._others) if self._is_first else set()
        deadline = time.monotonic() + _MOMENT_S
        while missing and time.monotonic() < deadline:
            for rank in [rank for rank in missing if self._has_come(rank, _HERE_TAG)]:
                missing.remove(rank)
                with contextlib.suppress(self._mpi_error):
                    self._comm.Recv([_NOTHING, self._byte], rank, _HERE_TAG)
            time.sleep(_PAUSE_S)

    def hear_verdict(self) -> None:
        """Raise StalledError if the first rank has said who stays away, PeerLostError if any has said who is dead."""
        for rank in self._numbers:
            if rank != self._rank and self._has_come(rank, _VERDICT_TAG):
                raise self._comm.recv(source=rank, tag=_VERDICT_TAG)

    def await_failed(self) -> list[int]:
        """Returns the ranks of the communicator that have died, which MPI may not know for a moment.

        Raises as `hear_verdict`.
        """
        deadline = time.monotonic() + _MOMENT_S
        while not (failed := _failed(self._comm)) and time.monotonic() < deadline:
            self.hear_verdict()
            time.sleep(_PAUSE_S)
        return failed

    def told_of_death(self, ranks: Sequence[int], why: Exception) -> PeerLostError:
        """Returns what all others have been told: these ranks of the communicator have died."""
        numbers = sorted(self._numbers[rank] for rank in ranks if rank in self._numbers)
        who = list_of_ranks(numbers) if numbers else "a rank"
        lost = PeerLostError(f"{who} died while the others were in init(): {why}")
        self._tell([rank for rank in self._numbers if rank != self._rank], lost)
        return lost

    def warn_of_missing(self, timeout_s: float) -> None:
        """On the first rank, if some have not come."""
        if self._is_first and (missing := self._missing()):
            server.warn_of_missing([self._numbers[rank] for rank in missing], timeout_s)

    def _missing(self) -> list[int]:
        return [rank for rank in self._others if not self._has_come(rank, _HERE_TAG)]

    def verdict(self, timeout_s: float) -> str:
        """Returns the message for when the time is over; the first rank also sends it to the ranks that have come."""
        waited = f"init() has waited {timeout_s:g} s (start_timeout_s) for all ranks"
        if not self._is_first:
            time.sleep(_MOMENT_S)
            self.hear_verdict()
            return f"{waited}: some rank has not come, has died or is stopped; rank 0 may say which"
        missing = self._missing()
        if missing:
            text = f"{waited}: {list_of_ranks(self._numbers[rank] for rank in missing)} did not come"
        else:
            text = f"{waited}: all have come, but some rank has died or is stopped since then"
        self._tell([rank for rank in self._others if rank not in missing], StalledError(text))
        return text

    def _tell(self, ranks: Sequence[int], error: RingtrainError) -> None:
        deadline = time.monotonic() + _MOMENT_S
        requests = []
        for rank in ranks:
            with contextlib.suppress(self._mpi_error):  # it is dead
                requests.append(self._comm.isend(error, dest=rank, tag=_VERDICT_TAG))
        while not all(map(self._is_over, requests)) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(2 * _PAUSE_S)  # they look for it now and then, and this rank's end may end the job

    def _is_over(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi_error:
            return True

    def _has_come(self, rank: int, tag: int) -> bool:
        try:
            return bool(self._comm.Iprobe(source=rank, tag=tag))
        except self._mpi_error:
            return False


class _Working(Generic[T]):
    """A call on a thread of its own."""

    def __init__(self, work: Callable[[], T]):
        self._work = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ringtrain init", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error

    def has_ended(self, within_s: float) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._results[0]


def _failed(comm: Any) -> list[int]:
    """Returns the ranks of `comm` that have died, where MPI tells it."""
    try:
        return list(comm.Get_failed().Translate_ranks(group=comm.Get_group()))
    except Exception:
        return []


# --- what ranks tell each other over MPI ------------------------------------------------------------------------------


class _Incomplete(Exception):
    """A collective has ended well without all that the ranks had to say."""


# How long a part is, its checksum, and the checksum of these.
_HEAD = struct.Struct("<QII")
_LENGTH_AND_CHECKSUM = struct.Struct("<QI")


def exchange_over(comm: Any) -> Exchange:
    """Returns comm.allgather, which raises `_Incomplete` where mpi4py would read what nobody has sent.

    Open MPI may end a collective well though a rank has died in it. The part of that rank is then whatever was in the
    memory, which mpi4py takes for a length of terabytes.
    """

    def exchange(value: Any) -> list[Any]:
        part = pickle.dumps(value)
        checked = _LENGTH_AND_CHECKSUM.pack(len(part), zlib.crc32(part))
        heads = bytearray(comm.Get_size() * _HEAD.size)
        comm.Allgather(checked + struct.pack("<I", zlib.crc32(checked)), heads)
        lengths, checksums, _ = zip(*_HEAD.iter_unpack(heads), strict=True)
        _require_all(zlib.crc32(_LENGTH_AND_CHECKSUM.pack(*head)) == check for *head, check in _HEAD.iter_unpack(heads))
        received = bytearray(sum(lengths))
        comm.Allgatherv(part, [received, list(lengths)])
        reader = io.BytesIO(received)
        parts = [reader.read(length) for length in lengths]
        _require_all(zlib.crc32(part) == checksum for part, checksum in zip(parts, checksums, strict=True))
        return [pickle.loads(part) for part in parts]

    return exchange


def _require_all(have_come: Iterable[bool]) -> None:
    if not all(have_come):
        raise _Incomplete("MPI has not delivered all that the ranks said")


def leader_of_node(comm: Any) -> int:
    """Returns the lowest rank of `comm` on this rank's node. Raises as `exchange_over`."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.Get_rank())
    leader: int = exchange_over(node)(comm.Get_rank())[0]
    node.Free()
    return leader


# --- what `srun --mpi` has prepared for a rank ------------------------------------------------------------------------


# Slurm's library for what `--mpi=pmi2` speaks, as distributions call it; beside Slurm's own libraries it is libpmi2.so.
_PMI2_LIBRARIES = ("libpmi2.so.0", "libpmi2.so")
_INTEL = "I_MPI_PMI_LIBRARY"
_SECURITY = "PMIX_SECURITY_MODE"


def prepare_srun(
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
        RuntimeError: this library cannot start so; the message says which --mpi it needs.
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
                f"Slurm started {launch.size} ranks with --mpi=pmi2, with which Intel MPI needs libpmi2.so of Slurm on "
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


# --- the world of MPI -------------------------------------------------------------------------------------------------


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
        return single_world(settings), read_tuned()
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "ringtrain calls MPI from a thread of its own, but MPI was initialised without MPI_THREAD_MULTIPLE; "
            'set mpi4py.rc.thread_level = "multiple" before mpi4py.MPI is imported'
        )

    def work(own: Any) -> tuple[World, dict[str, str]]:
        exchange = exchange_over(own)
        if over_sockets:
            world, tuned = sockets.connect_over(exchange, own.Get_rank(), settings, read_tuned)
        else:
            node = str(leader_of_node(own))
            world, tuned, _ = introduce(exchange, own.Get_rank(), node, settings, read_tuned)
            world = world._replace(network=_describe(MPI, own))
        return world._replace(communicator=own), tuned

    return meet(MPI, parent, ranks, timeout_s, work)


def tell_all(value: Any, settings: dict[str, str]) -> list[Any]:
    """Returns what all ranks of MPI.COMM_WORLD say, by rank. Raises as `connect`."""
    timeout_s = float(settings["start_timeout_s"])
    MPI = _import_mpi(timeout_s)
    everybody = range(MPI.COMM_WORLD.Get_size())

    return meet(MPI, MPI.COMM_WORLD, everybody, timeout_s, lambda own: exchange_over(own)(value))


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
    try:
        import mpi4py
    except ModuleNotFoundError as error:
        remedy = "a job over MPI needs mpi4py: pip install mpi4py, or start the ranks by ringrun, which needs no MPI"
        raise ModuleNotFoundError(f"{error}; {remedy}", name=error.name) from None

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
        prepare_srun(launch, MPI.get_vendor()[0], _was_built_with_pmix)
    with _end_of_process_after(timeout_s, launch is not None and launch.rank == 0):
        MPI.Init_thread(MPI.THREAD_MULTIPLE)


def _was_built_with_pmix() -> bool:
    return hasattr(ctypes.CDLL(loaded_library()), "PMIx_Init")


def _finalise(MPI: Any) -> None:
    if not MPI.Is_finalized():
        MPI.Finalize()


@contextlib.contextmanager
def _end_of_process_after(timeout_s: float, warns: bool) -> Iterator[None]:
    """MPI_Init can neither be interrupted nor given up, so only the end of the process ends it; 0 s is never."""
    if timeout_s == 0:
        yield
        return
    text = f"ringtrain: MPI_Init has not ended in {timeout_s:g} s (start_timeout_s): some rank has not called init()\n"
    waited = f"ringtrain: init() has waited {server.WARNS_AFTER_S:g} s in MPI_Init"
    warning = f"{waited} for all ranks to call it. Has the script ended on one, or does it call init() on some only?\n"
    timer = _core.ExitTimer(timeout_s, text, server.WARNS_AFTER_S, warning if warns else "")
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
    err_proc_failed, err_revoked = libmpi.ulfm_error_classes(MPI)
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
