"""Operations that are under way: what the `_async` forms return."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ringtrain import _core, blocked_threads
from ringtrain.errors import PeerLostError, RemoteError, StalledError

# Operations that nobody waits for any more: the engine still reads and writes their arrays, so these must stay.
_abandoned: deque[tuple[_core.Handle, Any]] = deque()
# Arrays of operations that ended while another rank was lost: an MPI library may still write to them.
_given_up: list[Any] = []
_finishing = threading.Lock()
# Told of failures that end the job, by whoever waits; see `report_failures_to`.
_report: Callable[[BaseException], None] | None = None


def report_failures_to(report: Callable[[BaseException], None] | None) -> None:
    """Who is to be told when an operation fails because a rank is lost or has stalled; None for nobody."""
    global _report
    _report = report


class Handle:
    """One operation under way. Give it to `synchronize` or `poll`.

    It keeps the arrays alive that the engine reads and writes. `finish` makes the user's result of the completed
    operation; without it `arrays` is the result.
    """

    __slots__ = ("_arrays", "_core", "_finish", "_result")

    def __init__(self, core: _core.Handle, arrays: Any, finish: Callable[[_core.Handle], Any] | None = None):
        self._core = core
        self._arrays = self._result = arrays
        self._finish = finish
        if _abandoned:
            _forget_done()

    def poll(self) -> bool:
        """Whether the operation is complete, so that `wait` returns at once."""
        return self._core.is_done()

    def wait(self) -> Any:
        """Wait for the operation and return its result; the same every time. Ctrl-C interrupts the wait.

        Raises:
            RingtrainError: the operation failed; see ringtrain.errors.
        """
        try:
            if not _core.wait(self._core, 0.2):
                self._wait_long()
        except (PeerLostError, RemoteError, StalledError) as error:
            _given_up.append(self._arrays)
            if _report is not None:
                _report(error)
            raise
        if self._finish is not None:
            self._make_result()
        return self._result

    def _wait_long(self) -> None:
        """Come back to Python now and then, which looks for signals."""
        with blocked_threads.waiting():
            while not _core.wait(self._core, 0.2):
                _core.require_initialized()  # a forked child would wait for ever

    def _make_result(self) -> None:
        with _finishing:  # by one thread only
            if self._finish is not None:
                self._result = self._finish(self._core)
                self._finish = self._arrays = None

    def __del__(self) -> None:
        if not self._core.is_done():
            _abandoned.append((self._core, self._arrays))


def _forget_done() -> None:
    """Other threads, and the garbage collector at any moment, may append meanwhile."""
    for _ in range(len(_abandoned)):
        try:
            entry = _abandoned.popleft()
        except IndexError:  # another thread was faster
            return
        if not entry[0].is_done():
            _abandoned.append(entry)


def poll(handle: Handle) -> bool:
    """Whether the operation is complete, so that `synchronize` returns at once. Mirrors `horovod.poll`."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result. Mirrors `horovod.synchronize`.

    Raises:
        RingtrainError: the operation failed; see ringtrain.errors.
    """
    return handle.wait()
