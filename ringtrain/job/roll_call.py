"""The ranks come together in init(), within a time: most of MPI's calls for it block and take no deadline."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ringtrain.errors import PeerLostError, RingtrainError, StalledError
from ringtrain.failure.ranks_in_words import list_of_ranks
from ringtrain.job import ulfm

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
    call = RollCall(MPI, comm, ranks)

    communicators: list[Any] = []

    def work_and_end() -> T:
        communicators.append(_own_communicator(comm, ranks))
        result = work(communicators[0])
        call.end()
        return result

    launcher = os.getppid()
    working = _Working(work_and_end)
    deadline = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
    try:
        while not working.has_ended(_PAUSE_S):
            call.hear_verdict()
            if os.getppid() != launcher:
                raise PeerLostError(
                    "the launcher has ended while this rank was in init(): another rank has failed; see its output"
                )
            if time.monotonic() > deadline:
                raise StalledError(call.verdict(timeout_s))
        return working.result()
    except MPI.Exception as error:
        if error.Get_error_class() not in ulfm.error_classes(MPI):
            call.take_messages()
            raise
        lost = PeerLostError(f"{_failed_text(comm)} died while the others were in init(): {error}")
        call.tell_all(lost)
        raise lost from None
    finally:
        if not working.has_ended(0):
            _revoke(MPI, communicators, working)


def _own_communicator(parent: Any, ranks: Sequence[int]) -> Any:
    if isinstance(ranks, range):  # all of them
        return parent.Dup()
    return parent.Create_group(parent.Get_group().Incl(ranks))


def _revoke(MPI: Any, communicators: Sequence[Any], working: _Working[Any]) -> None:
    """End what still waits on them, where MPI can do that: a call of mpi4py that fails after Python's end crashes."""
    if communicators and ulfm.is_known(MPI):
        with contextlib.suppress(MPI.Exception, NotImplementedError):
            communicators[0].Revoke()
            working.has_ended(_MOMENT_S)


class RollCall:
    """The first of the ranks knows who has come. If some stay away it tells the others who.

    Whoever hears from MPI that a rank has died tells all others: they may wait for this one, which has given up.
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
        """Of those who come within a moment. After a failure, as MPICH waits in MPI_Finalize for what nobody takes."""
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

    def tell_all(self, error: RingtrainError) -> None:
        self._tell([rank for rank in self._numbers if rank != self._rank], error)

    def verdict(self, timeout_s: float) -> str:
        """What to say when the time is over; the first rank also says it to those who have come."""
        waited = f"init() has waited {timeout_s:g} s (start_timeout_s) for all ranks"
        if not self._is_first:
            time.sleep(_MOMENT_S)
            self.hear_verdict()
            return f"{waited}: some rank has not come, has died or is stopped; rank 0 may say which"
        missing = [rank for rank in self._others if not self._has_come(rank, _HERE_TAG)]
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


def _failed_text(comm: Any) -> str:
    """Who has died, in the numbers of `comm`, where MPI tells it."""
    try:
        ranks = comm.Get_failed().Translate_ranks(group=comm.Get_group())
    except Exception:
        ranks = []
    return list_of_ranks(ranks) if ranks else "a rank"
