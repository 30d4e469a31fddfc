"""Handles of operations in flight, which the `_async` forms return."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import ringtrain._core as _core
from ringtrain.arrays.adapter import Adapter, View
from ringtrain.errors import PeerLostError, RemoteError, StalledError
from ringtrain.failure import waiting

# Arrays that the user has dropped, but that the engine, the GPU or, after a failure, MPI still reads or writes: they
# are kept until that is over.
_abandoned: deque[tuple[Callable[[], bool], Any]] = deque()
_finishing = threading.Lock()
# The stream of a library that does not tell; see `adapter.Adapter.stream`.
_UNKNOWN = -1
_LEGACY_STREAM = 1
# Called for failures that end the job, by the thread that waits or submits; see `report_failures_to`.
_report: Callable[[BaseException], None] | None = None


def report_failures_to(report: Callable[[BaseException], None] | None) -> None:
    """Sets the function to call when an operation fails because a rank is lost or has stalled, or None."""
    global _report
    _report = report


def report_failure(error: BaseException) -> None:
    """Reports that an operation has failed or could not begin, if that ends the job."""
    if _report is not None and isinstance(error, (PeerLostError, RemoteError, StalledError)):
        _report(error)


Result = TypeVar("Result")
ResultOut = TypeVar("ResultOut", covariant=True)


class OnGpu(NamedTuple):
    """The GPU of an operation, and the library that has streams there."""

    device: int
    stream: Callable[[], int | None]  # returns the library's current one there, or what `adapter.Adapter.stream` does


def on_gpu_of(adapter: Adapter, array: Any, view: View) -> OnGpu | None:
    """Returns the GPU of an operation on an array with this view; None in the memory of the host."""
    return OnGpu(view[3], functools.partial(adapter.stream, array)) if len(view) == 5 else None


_LOOK_S = 0.2


class _Limit(threading.local):
    """How long this thread waits at most, for whatever it waits for."""

    look_s = _LOOK_S
    end_s = math.inf
    timeout_s = math.inf

    def error(self) -> StalledError:
        return StalledError(
            f"the operation has not ended within {self.timeout_s:g} s (timeout_s). It goes on, and its arrays are in "
            "use: wait for its Handle again, or call shutdown()"
        )


_limit = _Limit()


@contextmanager
def time_limit(timeout_s: float | None, title: str = "time_limit") -> Iterator[None]:
    """Let operations of this thread within it raise StalledError after so many seconds together. None: no limit.

    An operation goes on after that, and uses its arrays: this rank still takes part in it. A function of several
    operations, such as broadcast_object, ends between two. Programs of JAX and steps of optimizers have no such limit.

    Raises:
        ValueError: timeout_s is not above 0.

    Examples:
        >>> with hvd.time_limit(60):
        ...     total = hvd.allreduce(np.ones(2), op=hvd.Sum)
        >>> total
        array([2., 2.])
    """
    if timeout_s is None:
        yield
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise ValueError(f"{title}: timeout_s must be a number of seconds above 0, not {timeout_s!r}")
    before = _limit.look_s, _limit.end_s, _limit.timeout_s
    _limit.timeout_s = float(timeout_s)
    _limit.look_s, _limit.end_s = min(_LOOK_S, timeout_s), time.monotonic() + timeout_s
    try:
        yield
    finally:
        _limit.look_s, _limit.end_s, _limit.timeout_s = before


class Pending(Protocol[ResultOut]):
    """Something to wait for: a Handle, or many of them."""

    def poll(self) -> bool:
        """Whether it is complete."""

    def wait(self) -> ResultOut:
        """Wait until it is complete and return its result."""


class Handle(Generic[Result]):
    """One operation under way. Give it to `synchronize` or `poll`.

    It keeps the arrays alive that the engine reads and writes. `finish` makes the user's result of the completed
    operation; without it `arrays` is the result. `on_gpu` is None for arrays in the host's memory.
    """

    __slots__ = ("_arrays", "_core", "_finish", "_is_ordered", "_on_gpu", "_result")

    def __init__(
        self,
        core: _core.Handle,
        arrays: Any,
        finish: Callable[[_core.Handle], Any] | None = None,
        on_gpu: OnGpu | None = None,
    ):
        self._core = core
        self._arrays = self._result = arrays
        self._finish = finish
        self._on_gpu = on_gpu
        self._is_ordered = False
        if _abandoned:
            _forget_done()

    def poll(self) -> bool:
        """Whether the operation is complete, on a GPU, too."""
        return self._core.is_over()

    def wait(self) -> Result:
        """Wait for the operation and return its result; the same every time. Ctrl-C interrupts the wait.

        On a GPU the current stream waits, and the host does not: what is put into it from then on sees the result.

        Raises:
            RingtrainError: the operation failed; see ringtrain.errors.
        """
        try:
            is_done = _core.wait(self._core, _limit.look_s) or self._wait_long()
            if is_done and self._on_gpu is not None:
                self._let_stream_wait(self._on_gpu)
        except BaseException as error:
            report_failure(error)
            raise
        if not is_done:
            raise _limit.error()  # which is not a failure of the job
        if self._finish is not None:
            self._make_result()
        result: Result = self._result
        return result

    def _wait_long(self) -> bool:
        """Come back to Python now and then, which looks for signals. Returns whether it is done within the limit."""
        will_go_on = _limit.end_s < math.inf  # so it is not a part of a deadlock
        with nullcontext() if will_go_on else waiting(self._core):
            while (left_s := _limit.end_s - time.monotonic()) > 0:
                if _core.wait(self._core, min(_LOOK_S, left_s)):
                    return True
                _core.require_initialized()  # a forked child would wait for ever
        return False

    def _let_stream_wait(self, on_gpu: OnGpu) -> None:
        stream = on_gpu.stream()
        if stream is None or stream == _UNKNOWN:
            _keep_host_waiting(self._core)
            return
        # Freed memory is used again in the stream that it came from, which may not wait for this operation.
        self._is_ordered = self._core.follow(stream)

    def _make_result(self) -> None:
        with _finishing:  # by one thread only
            if self._finish is not None:
                self._result = self._finish(self._core)
                # Copies that were made for the operation go back to the stream that they came from, as in __del__;
                # `finish` has just put what reads them into another one.
                if self._on_gpu is not None and not self._is_ordered:
                    self._keep_for_stream(self._on_gpu)
                self._finish = self._arrays = None

    def _keep_for_stream(self, on_gpu: OnGpu) -> None:
        point = _point_in(on_gpu.stream(), on_gpu.device)
        if point is not None:  # else the host has waited
            _abandoned.append((point.is_over, self._arrays))

    def __del__(self) -> None:
        if not self._is_ordered:
            keep_until_free(self._core, self._arrays)


def keep_until_free(core: _core.Handle | _core.StoreHandle, arrays: Any) -> None:
    """Keep the arrays of an operation that no caller waits for any more as long as they may be read or written."""
    keep_until(core.is_memory_free, arrays)


def keep_until(is_over: Callable[[], bool], arrays: Any) -> None:
    """Keep arrays until a function says that nothing uses them any more."""
    if not is_over():
        _abandoned.append((is_over, arrays))
    if len(_abandoned) > 1:
        _forget_done()


def current_point(adapter: Adapter, array: Any) -> _core.GpuPoint | None:
    """Returns the point of the library's current stream on the array's GPU.

    None for an array in the host's memory, or where the stream is unknown.
    """
    return _point_in(adapter.stream(array), adapter.device(array))


def _point_in(stream: int | None, device: int) -> _core.GpuPoint | None:
    return None if stream is None or stream == _UNKNOWN else _core.gpu_point(device, stream)


def _keep_host_waiting(core: _core.Handle) -> None:
    """Until the GPU has the result. The engine ends what takes too long."""
    pause_s = 20e-6
    while not core.is_over():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1e-3)
    core.follow(_LEGACY_STREAM)  # raises where there is no result


def _forget_done() -> None:
    """The oldest ones. Other threads, and the garbage collector at any moment, may append meanwhile."""
    for _ in range(min(len(_abandoned), 8)):
        try:
            entry = _abandoned.popleft()
        except IndexError:  # another thread was faster
            return
        is_over = entry[0]
        if not is_over():
            _abandoned.append(entry)


def poll(handle: Pending[Any]) -> bool:
    """Whether the operation is complete, on a GPU, too. Mirrors `horovod.poll`.

    Examples:
        >>> handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum)
        >>> while not hvd.poll(handle):
        ...     time.sleep(0.001)  # compute something
        >>> hvd.synchronize(handle) / hvd.size()
        array([1., 1.])
    """
    try:
        ask = handle.poll
    except AttributeError:
        raise _not_a_handle("poll", handle) from None
    return ask()


def synchronize(handle: Pending[Result], *, timeout_s: float | None = None) -> Result:
    """Wait for an operation and return its result. Mirrors `horovod.synchronize`.

    On a GPU the current stream waits instead of the host, as in Horovod and PyTorch's DDP: what is put into it from
    then on sees the result.

    Args:
        handle: what an `_async` operation returned.
        timeout_s: how long to wait. After that the operation goes on, and `handle` may be waited for again.

    Raises:
        RingtrainError: the operation failed; see ringtrain.errors. StalledError: it has not ended within timeout_s.
        TypeError: `handle` is not what an `_async` operation returned.
        ValueError: timeout_s is not above 0.
    """
    try:
        wait = handle.wait
    except AttributeError:
        raise _not_a_handle("synchronize", handle) from None
    if timeout_s is None:
        return wait()
    with time_limit(timeout_s, "synchronize"):
        return wait()


def wait_for_all(handles: Iterable[Pending[Any]]) -> list[Any]:
    """The results of all. Raises the first error, after all have ended, so that their names are free again."""
    results, first_error = [], None
    for handle in handles:
        try:
            results.append(handle.wait())
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
    return results


def _not_a_handle(title: str, given: object) -> TypeError:
    return TypeError(f"{title} needs the Handle that an operation such as allreduce_async returned, not {given!r}")
