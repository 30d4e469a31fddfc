"""Operations of a group that are under way, as torch expects them.

`wait()` waits for the engine's handle in the thread of the caller, which so takes part in the work. A thread of its own
completes Futures, where torch asks for them, as DistributedDataParallel does, and copies results that the engine cannot
write where they belong, so that they arrive without `wait()`, too.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._autograd import (
    _enable_record_function as show_operators,
    _profiler_enabled,
    _record_function_with_args_enter as begin_event,
    _record_function_with_args_exit as end_event,
)

import ringtrain._core as _core
from ringtrain.arrays.adapter import View
from ringtrain.engine.handles import keep_until_free, report_failure
from ringtrain.errors import RingtrainError, StalledError
from ringtrain.failure import call_site, waiting
from ringtrain.torch.distributed import backward
from ringtrain.torch.distributed.streams import StreamOrder

LOOK_S = 0.2  # how often a wait comes back to Python, for signals
_NO_TIMEOUT = timedelta(0)
_settling = threading.RLock()
_ending_events = threading.Lock()
# Returns the name that a script has given by torch.distributed.record_comm(), which only new versions have.
_name_given = getattr(torch._C._distributed_c10d, "_get_comm_profiling_name", lambda: "")
_Operation = TypeVar("_Operation", bound=Callable[..., "Work"])


def is_done_by(handle: _core.Handle, deadline: float, give_up: float = math.inf) -> bool:
    """Waits for what the engine does until a time of time.monotonic(). Raises the error with which it failed.

    In the middle of an operation nobody can leave. One that makes no progress fails on all ranks after `give_up`.
    """
    now = time.monotonic()
    if _core.wait(handle, min(LOOK_S, max(0.0, deadline - now)), give_up - now):
        return True
    with waiting(handle):
        while (now := time.monotonic()) < deadline:
            if _core.wait(handle, min(LOOK_S, deadline - now), give_up - now):
                return True
            _core.require_initialized()  # a forked child would wait for ever
    return False


def shown_in_profiles(title: str, place: int) -> Callable[[_Operation], _Operation]:
    """Decorates an operation of a group, so that torch.profiler shows it as one of gloo: `ringtrain:all_reduce`.

    Args:
        title: as gloo has it.
        place: of the argument whose tensors have the shapes, -1 for none.
    """

    def decorate(operation: _Operation) -> _Operation:
        @functools.wraps(operation)
        def shown(group: Any, *given: Any, **named: Any) -> Work:
            if not _profiler_enabled():
                return operation(group, *given, **named)
            tensors = _tensors_in(given[place]) if 0 <= place < len(given) else []
            event = begin_event(_name_given() or f"{group.event_prefix}:{title}", *tensors)
            try:
                work = operation(group, *given, **named)
            except BaseException:
                end_event(event)
                raise
            work.let_end(event)
            return work

        return shown  # type: ignore[return-value]

    return decorate


def _tensors_in(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for one in given for tensor in _tensors_in(one)]


def submitted(
    operation: _core.Operation,
    inputs: Sequence[View],
    outputs: Sequence[View],
    splits: Sequence[int],
    awaited: bool,
    title: str,
) -> _core.Handle:
    """Submits an operation at the line of the script. Raises what the core raises."""
    try:
        return _core.submit(
            operation,
            list(inputs),
            list(outputs),
            list(splits),
            is_awaited=awaited,
            site=call_site(),
            waits_for_name=True,
            title=title,
        )
    except Exception as error:
        report_failure(error)
        raise


class Work(dist.Work):
    """One operation, or several that belong together.

    Args:
        title: for messages: `all_reduce #17 of group "0" (default_pg)`.
        handles: those of the core.
        arrays: kept until the engine is through with them.
        results: the tensors that have the result.
        finish: called once when all handles are done, before the results are used.
        timeout_s: how long it may take from now on.
        order: of the operation and torch's streams; None for tensors in host memory.
    """

    _handles: Sequence[_core.Handle] = ()
    _arrays: Any = None
    _finish: Callable[[], None] | None = None
    _is_done = False
    _error: Exception | None = None
    _future: torch.futures.Future[Any] | None = None
    _ended: torch.futures.Future[None] | None = None
    _is_future_complete = False
    _event: torch.futures.Future[None] | None = None  # ends the event of torch.profiler
    _order: StreamOrder | None = None

    def __init__(
        self,
        title: str,
        handles: Sequence[_core.Handle],
        arrays: Any,
        results: Any,
        finish: Callable[[], None] | None,
        timeout_s: float,
        order: StreamOrder | None = None,
    ) -> None:
        super().__init__()
        self._title = title
        self._handles = handles
        self._arrays = arrays
        self._results = results
        self._finish = finish
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        if order is not None:
            self._order = order

    @classmethod
    def done(cls, results: Any) -> Work:
        """Returns the Work of an operation that is done."""
        work: Work = cls.__new__(cls)
        dist.Work.__init__(work)
        work._results = results
        work._is_done = True
        return work

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the result. Returns True.

        On a GPU the current stream waits, and the host does not: what the stream is given from now on sees the result.

        Raises:
            RingtrainError: the operation failed; see ringtrain.errors. StalledError after the timeout: that of this
                wait, after which the operation goes on and may be waited for again, or that of the operation.
        """
        if not self._is_done:
            seconds = timeout.total_seconds()
            if seconds <= 0:
                self._ends_by(self._deadline, self._timeout_s)
            elif not self._ends_by(time.monotonic() + seconds, seconds):
                raise self._overdue(seconds)
        if self._event is not None:
            self._end_event()
        if self._error is not None:
            raise self._error
        if self._order is not None:
            try:
                self._follow()
            except RingtrainError as error:  # the GPU has failed
                report_failure(error)
                raise
        return True

    def _follow(self) -> None:
        """Makes the current stream wait for the result of an operation that has ended well."""
        if self._order is not None:
            self._order.follow(self._handles)

    def _beside(self) -> AbstractContextManager[Any]:
        """For a thread that does not wait for the result: its current stream must not, either."""
        return nullcontext() if self._order is None else self._order.beside()

    def _ends_by(self, deadline: float, timeout_s: float) -> bool:
        """Waits for the end. False if it is still under way at `deadline`, when only this wait is over.

        The time of the operation itself may be over by then, too: it ends with an error.
        """
        try:
            for handle in self._handles:
                if not is_done_by(handle, deadline, self._deadline):
                    if time.monotonic() < self._deadline:
                        return False
                    raise self._overdue(timeout_s)
        except RingtrainError as error:
            self._end_with(error)
        else:
            self._settle()
        return True

    def _overdue(self, timeout_s: float) -> StalledError:
        return StalledError(
            f"{self._title}: not complete within the timeout of {timeout_s:g} s. Do all ranks of the group call "
            "it, or is one stuck in something else?"
        )

    def _settle(self) -> None:
        """All handles are done: makes the results, once."""
        with _settling:
            if self._is_done:
                return
            try:
                for handle in self._handles:
                    _core.wait(handle, 0)  # raises if it failed
                self._make_results()
            except Exception as error:
                self._end_with(error)
                return
            self._finish = self._arrays = None
            self._is_done = True
        self._tell_end()

    def _make_results(self) -> None:
        order = self._order
        if order is not None:
            order.follow(self._handles)
        if self._finish is not None:
            self._finish()
            if order is not None:
                order.note_made()
        if order is not None:
            order.keep(self._handles, (self._arrays, self._results))

    def _end_with(self, error: Exception) -> None:
        with _settling:
            if self._is_done:
                return
            self._error = error
            self._finish = None
            self._is_done = True
        report_failure(self._error)
        backward.note(self._error)
        self._tell_end()

    def _tell_end(self) -> None:
        if self._event is not None:
            self._end_event()
        if self._future is not None:
            complete(self)

    def let_end(self, shown: Any) -> None:
        """Ends an event of torch.profiler, which this thread has begun, with the operation."""
        event: torch.futures.Future[None] = torch.futures.Future()
        show_operators(False)
        try:  # the only way by which another thread ends it in the profiler of this one
            torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(shown, event)
        finally:
            show_operators(True)
        with _settling:
            self._event = event
        self.get_future()  # so that the operation ends without wait(), too
        if self._is_done:
            self._end_event()

    def _end_event(self) -> None:
        with _ending_events:  # waits for a thread that ends the event, since the profiler may stop after wait()
            if self._event is None:
                return
            # torch takes an event for asynchronous if it ends in another thread than it began in.
            thread = threading.Thread(target=self._event.set_result, args=(None,), name="ringtrain-profile")
            thread.start()
            thread.join()
            self._event = None

    def is_completed(self) -> bool:
        """Whether it has ended, well or not; on the GPU, too."""
        if not self._is_done and all(handle.is_done() for handle in self._handles):
            self._settle()
        if self._order is None or self._error is not None:
            return self._is_done
        return self._is_done and self._order.is_over(self._handles)

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Returns the error that wait() raises, or None."""
        return self._error if self.is_completed() else None

    def result(self) -> Any:
        """The tensors with the result, after wait()."""
        return self._results

    def synchronize(self) -> None:
        """As wait()."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A Future of the results, which completes without wait().

        Where Python waits for it, an error is a RuntimeError that has class and text of what wait() raises: torch
        keeps no other. Out of backward() of DistributedDataParallel it comes as wait() raises it.
        """
        with _settling:
            if self._future is not None:
                return self._future
            self._ended = torch.futures.Future(devices=[] if self._order is None else [self._order.device])
            future = self._future = self._ended.then(lambda _: self._outcome())
            is_done = self._is_done
        if is_done:
            complete(self)
        elif end_of_python.is_over():
            with suppress(Exception):  # the Future has it
                self.wait()
        else:
            self._watch()
        return future

    def settle_alone(self) -> None:
        """Has the results made when the engine is done, whether or not anybody waits or keeps this Work."""
        if not end_of_python.is_over():
            _completer.watch(self)

    def _watch(self) -> None:
        """Has the Future completed when this is, or when its time is over."""
        _completer.watch(self)

    def _is_over(self) -> bool:
        """Whether the engine is done, or the time of an operation that a Future waits for is over."""
        is_overdue = self._future is not None and time.monotonic() >= self._deadline
        return is_overdue or all(handle.is_done() for handle in self._handles)

    def _end_alone(self) -> None:
        """Called by the thread that watches it, when it is over."""
        if all(handle.is_done() for handle in self._handles):
            self._settle()
        else:
            self._end_with(self._overdue(self._timeout_s))

    def _outcome(self) -> Any:
        """Called by the Future when the operation has ended, in streams of its own, which wait for the result here.

        The Future notes where these are for the tensors that it gets. That of the end has none, and notes nothing.
        """
        if self._error is None:
            try:
                self._follow()
            except RingtrainError as error:  # the GPU has failed
                self._error = error
        if self._error is not None:
            raise self._error
        return self._results

    def __del__(self) -> None:
        if self._arrays is not None:
            for handle in self._handles:
                keep_until_free(handle, self._arrays)


def complete(work: Work) -> None:
    """Once for each Work that has ended."""
    with _settling:
        if work._is_future_complete:
            return
        work._is_future_complete = True
    assert work._ended is not None
    work._ended.set_result(None)


class _EndOfPython:
    """Waits at the end of Python for threads that complete Futures.

    Python ends other threads where they ask for the GIL. Where torch's C++ asks for it, as it does when a Future is
    complete, values are copied or a Work is freed, that aborts the process.
    """

    _LONGEST_S = 5.0  # callbacks of Futures may wait for something that never happens

    def __init__(self) -> None:
        self._has_changed = threading.Condition()
        self.kept: list[Work] = []  # of threads that may not free them any more
        self._busy = 0
        self._is_near = False

    def begin(self) -> bool:
        """Called by a thread before it completes Futures. False where Python ends, and the thread must not."""
        with self._has_changed:
            if self.is_over():
                return False
            self._busy += 1
            return True

    def end(self) -> None:
        """Called by the thread when it has completed them."""
        with self._has_changed:
            self._busy -= 1
            self._has_changed.notify_all()

    def is_over(self) -> bool:
        """Whether no thread may complete Futures any more. One that is busy may need those of others."""
        return self._is_near and self._busy == 0

    def wait(self) -> None:
        with self._has_changed:
            self._is_near = True
            self._has_changed.wait_for(self.is_over, self._LONGEST_S)


end_of_python = _EndOfPython()
# Registered early, so that almost everything else that runs at exit runs before.
atexit.register(end_of_python.wait)
os.register_at_fork(after_in_child=end_of_python.__init__)  # type: ignore[misc]


class _Completer:
    """Threads that complete Futures, in the order in which their operations end.

    They also make results that need a copy. The engine must not wait for Python, so it only counts up a semaphore:
    `sem_post` takes one pointer, as what a handle calls when it is done. The callbacks of a Future run in the thread
    that completes it, and may wait for another Future, as PowerSGD's hook does. So one thread is always left to
    complete that one.
    """

    _MOST_IDLE = 2
    _LOOK_S = 0.5  # for Futures that are overdue

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[Work] = []
        self._semaphore: Any = None
        self._idle = 0

    def watch(self, work: Work) -> None:
        with self._lock:
            self._watched.append(work)
            if self._semaphore is None:
                self._start()
        for handle in work._handles:
            handle.on_done(self._post, self._semaphore)

    def _start(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._memory = ctypes.create_string_buffer(64)  # more than any sem_t; never freed
        self._semaphore = ctypes.addressof(self._memory)
        libc.sem_init(ctypes.c_void_p(self._semaphore), 0, 0)
        self._post = ctypes.cast(libc.sem_post, ctypes.c_void_p).value or 0
        self._wait, self._try_wait = libc.sem_timedwait, libc.sem_trywait
        self._start_thread()

    def _pause(self) -> None:
        """Waits until something may have ended, or for a moment, since a Future may be overdue then."""
        semaphore = ctypes.c_void_p(self._semaphore)
        seconds = time.time() + self._LOOK_S
        self._wait(semaphore, (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9)))
        while self._try_wait(semaphore) == 0:  # one look finds all that have ended
            pass

    def _start_thread(self) -> None:
        self._idle += 1
        threading.Thread(target=self._run, name="ringtrain-futures", daemon=True).start()

    def _take_ended(self) -> list[Work]:
        """Returns those that are over, and watches the others."""
        ended: list[Work] = []
        under_way: list[Work] = []
        for work in self._watched:
            (ended if work._is_over() else under_way).append(work)
        self._watched = under_way
        return ended

    def _run(self) -> None:
        while True:
            self._pause()
            with self._lock:
                ended = self._take_ended()
                if not ended:
                    continue
                self._idle -= 1
                if self._idle == 0:
                    self._start_thread()
            if not end_of_python.begin():
                end_of_python.kept += ended
                return
            for work in ended:
                with work._beside():
                    work._end_alone()
            del ended, work
            end_of_python.end()
            with self._lock:
                if self._idle == self._MOST_IDLE:
                    return
                self._idle += 1


_completer = _Completer()
