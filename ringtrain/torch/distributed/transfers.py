"""Messages between two ranks that are under way."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import ringtrain._core as _core
from ringtrain._core import OpKind
from ringtrain.errors import RingtrainError, StalledError
from ringtrain.handles import report_failure
from ringtrain.torch.distributed.streams import order_of
from ringtrain.torch.distributed.views import Tensor, view_of
from ringtrain.torch.distributed.work import Work, end_of_python, is_done_by, submitted

if TYPE_CHECKING:
    from ringtrain.torch.distributed.group import ProcessGroup

_PAUSE_S = 1e-3  # between two looks for a message from any rank, where a Future waits for it


class Transfer(Work):
    """A message between two ranks."""

    peer = -1

    def source_rank(self) -> int:
        """The rank of the group that this is a message from, or to."""
        return self.peer

    _source_rank = source_rank


class AnySource(Transfer):
    """A message from any rank: first the question who sends one, and then that message.

    Questions of one rank are asked one after the other. Else two of them would have the same answer.
    """

    def __init__(self, group: ProcessGroup, tensors: list[Tensor], tag: int) -> None:
        title = f"recv (from any rank, tag {tag}, of {group._title})"
        super().__init__(title, (), tensors, tensors, None, group._timeout_s, order_of(view_of(tensors[0], "recv")))
        self._group, self._tag = group, tag
        self._received: Work | None = None
        self._turn = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        end = time.monotonic() + seconds if seconds > 0 else self._deadline
        while not self._advance(end):
            pass
        self._tell_end()
        if self._error is not None:
            raise self._error
        self._follow()
        return True

    def _follow(self) -> None:
        if self._received is not None:
            self._received._follow()

    def is_completed(self) -> bool:
        if not self._is_done and self._advance(0.0):
            self._tell_end()
        return self._is_done and (self._received is None or self._received.is_completed())

    def _watch(self) -> None:
        threading.Thread(target=_wait_for_future, args=([self],), name="ringtrain-futures", daemon=True).start()

    def _is_settled(self) -> bool:
        """Whether it is done. Completes its Future then."""
        with self._beside():
            is_done = self._advance(0.0 if time.monotonic() < self._deadline else self._deadline)
        if is_done:
            self._tell_end()
        return is_done

    def _advance(self, end: float) -> bool:
        """Whether it is done; comes back after a moment if not. `end` 0: only looks."""
        with self._turn:
            if self._is_done:
                return True
            try:
                if self._received is None:
                    self._received = self._ask(end)
                if self._received is not None:
                    if end > 0:
                        self._received._wait_until(end, self._timeout_s)
                    else:
                        self._received.is_completed()
                    if self._received._is_done:
                        self._error, self._is_done, self._arrays = self._received._error, True, None
                if end > 0 and not self._is_done and time.monotonic() >= end:
                    raise StalledError(f"{self._title}: not complete within the timeout")
            except RingtrainError as error:
                self._error, self._is_done = error, True
                report_failure(error)
            return self._is_done

    def _ask(self, end: float) -> Work | None:
        """The message of the rank that sends one, or None if there is none yet."""
        group = self._group
        with group._lock:
            group._require_open("recv")
            handle = group._open_questions.get(self._tag)
            if handle is None:
                group._questions += 1
                name = f"{group._names.group} any->{group._ranks[group._rank]} tag {self._tag} #{group._questions}"
                numbers = [group._ranks[group._rank], self._tag]
                operation = _core.Operation(OpKind.FIND_SENDER, name, group._set, numbers=numbers)
                handle = group._open_questions[self._tag] = submitted(operation, [], [], (), False, self._title)
        try:
            if not (is_done_by(handle, end) if end > 0 else _core.wait(handle, 0)):
                return None
        except Exception:
            with group._lock:
                if group._open_questions.get(self._tag) is handle:
                    del group._open_questions[self._tag]
            raise
        with group._lock:
            if group._open_questions.get(self._tag) is not handle:
                return None  # another thread has the answer
            del group._open_questions[self._tag]
            source, destination = handle.number(), group._ranks[group._rank]
            self.peer = group._ranks.index(source)
            return group._transfer("recv", self._results, source, destination, self._tag, self.peer)


def _wait_for_future(only: list[AnySource]) -> None:
    """Runs in a thread of its own. The list has its only reference: this frees the Work before Python may end."""
    work = only.pop()
    while end_of_python.begin():
        if work._is_settled():
            del work
            end_of_python.end()
            return
        end_of_python.end()
        time.sleep(_PAUSE_S)
    end_of_python.kept.append(work)
