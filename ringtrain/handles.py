"""Operations that are under way: what the `_async` forms return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringtrain import _core

# Operations that nobody waits for any more: the engine still reads and writes their arrays, so these must stay.
_abandoned: list[tuple[_core.Handle, Any]] = []


class Handle:
    """One operation under way. Give it to `synchronize` or `poll`.

    It keeps the arrays alive that the engine reads and writes. `finish` makes the user's result of the completed
    operation.
    """

    __slots__ = ("_arrays", "_core", "_finish", "_result")

    def __init__(self, core: _core.Handle, arrays: Any, finish: Callable[[_core.Handle], Any]):
        self._core = core
        self._arrays = arrays
        self._finish: Callable[[_core.Handle], Any] | None = finish
        self._result: Any = None
        if _abandoned:
            _abandoned[:] = [entry for entry in _abandoned if not entry[0].is_done()]

    def poll(self) -> bool:
        """Whether the operation is complete, so that `wait` returns at once."""
        return self._core.is_done()

    def wait(self) -> Any:
        """Wait for the operation and return its result; the same every time. Ctrl-C interrupts the wait.

        Raises:
            RingtrainError: the operation failed; see ringtrain.errors.
        """
        while not self._core.wait(0.2):  # now and then back to Python, which looks for signals
            pass
        self._core.check()
        if self._finish is not None:
            self._result = self._finish(self._core)
            self._finish = None
            self._arrays = None
        return self._result

    def __del__(self) -> None:
        if not self._core.is_done():
            _abandoned.append((self._core, self._arrays))


def poll(handle: Handle) -> bool:
    """Whether the operation is complete, so that `synchronize` returns at once. Mirrors `horovod.poll`."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result. Mirrors `horovod.synchronize`.

    Raises:
        RingtrainError: the operation failed; see ringtrain.errors.
    """
    return handle.wait()
