"""Messages between two ranks of a group: their names, those that are under way, and who sends to this rank."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import ringtrain._core as _core
from ringtrain._core import OpKind
from ringtrain.engine.handles import report_failure
from ringtrain.errors import RingtrainError
from ringtrain.torch.distributed.naming import TURNS
from ringtrain.torch.distributed.streams import order_of
from ringtrain.torch.distributed.views import Tensor, bytes_view_of, copies_back, host_copy, view_of
from ringtrain.torch.distributed.work import Work, end_of_python, is_done_by, submitted

_PAUSE_S = 1e-3  # between two looks for a message from any rank, where a Future waits for it


class Transfer(Work):
    """A message between two ranks."""

    peer = -1

    def source_rank(self) -> int:
        """The rank of the group that this is a message from, or to."""
        return self.peer

    _source_rank = source_rank


class Transfers:
    """Submits the messages of one group. Any thread may call it.

    Args:
        prefix: of the names of the group's operations.
        process_set: the group's.
        ranks: of the job, ascending.
        own: this rank, in the job.
    """

    def __init__(self, prefix: str, process_set: int, ranks: list[int], own: int) -> None:
        self._prefix, self._set, self._ranks, self._own = prefix, process_set, ranks, own
        self._lock = threading.RLock()  # names and submissions are in one order
        self._counts: dict[tuple[int, int, int], int] = {}  # by source, destination and tag: how many there were
        self._questions = 0
        self._open_questions: dict[int, _core.Handle] = {}  # by tag: who sends to this rank
        self._expected: dict[int, deque[AnySource]] = {}  # by tag: messages from any rank, in the order of their calls

    def send(self, tensor: Tensor, to: int, tag: int, group: str, timeout_s: float, is_awaited: bool) -> Transfer:
        """A message to this rank of the job. group: its title, of messages for users."""
        return self._submit("send", tensor, self._own, to, to, tag, group, timeout_s, is_awaited)

    def receive(
        self, tensor: Tensor, source: int, tag: int, group: str, timeout_s: float, is_awaited: bool = False
    ) -> Transfer:
        """A message from this rank of the job."""
        return self._submit("recv", tensor, source, self._own, source, tag, group, timeout_s, is_awaited)

    def _submit(
        self,
        kind: str,
        tensor: Tensor,
        source: int,
        destination: int,
        other: int,
        tag: int,
        group: str,
        timeout_s: float,
        is_awaited: bool,
    ) -> Transfer:
        peer = self._ranks.index(other)
        if source == destination:
            raise ValueError(f"{kind} of {group}: rank {peer} is this one; a rank cannot send to itself")
        memory = host_copy(tensor, kind, kind == "send")
        view = bytes_view_of(memory, kind)
        copies = None if kind == "send" else copies_back([tensor], [memory])
        with self._lock:
            key = (source, destination, tag)
            number = self._counts[key] = self._counts.get(key, 0) + 1
            title = f"{kind} (from rank {source} to {destination}, tag {tag}, #{number} of {group})"
            name = f"{self._prefix} {source}->{destination} tag {tag} #{number % TURNS}"
            operation = _core.Operation(OpKind.TRANSFER, name, self._set, numbers=[source, destination, tag])
            handle = submitted(operation, [view], [] if kind == "send" else [view], (), is_awaited, title)
        finish = None if copies is None else functools.partial(copies, handle)
        order = None if tensor.is_cpu or finish is None else order_of(bytes_view_of(tensor, kind))
        transfer = Transfer(title, (handle,), memory, [tensor], finish, timeout_s, order)
        transfer.peer = peer
        if finish is not None and not is_awaited:
            transfer.settle_alone()
        return transfer

    def expect(self, one: AnySource) -> None:
        """Notes a message from any rank. Those of one tag get their messages in the order of these calls."""
        with self._lock:
            self._expected.setdefault(one.tag, deque()).append(one)

    def forget(self, one: AnySource) -> None:
        """Called when it has failed."""
        with self._lock, suppress(KeyError, ValueError):
            self._expected[one.tag].remove(one)

    def receive_from_any(self, tag: int, title: str, end: float) -> None:
        """Asks until `end` which rank sends a message to this one, and receives it for the first that expects one.

        With `end` 0 it only looks. Afterwards no rank may have sent one yet, or another thread has got the answer.
        Questions with one tag are asked one after the other, each when the message of the last one is received. Else
        two would have the same answer.
        """
        with self._lock:
            handle = self._open_questions.get(tag)
            if handle is None:
                self._questions += 1
                name = f"{self._prefix} any->{self._own} tag {tag} #{self._questions}"
                operation = _core.Operation(OpKind.FIND_SENDER, name, self._set, numbers=[self._own, tag])
                handle = self._open_questions[tag] = submitted(operation, [], [], (), False, title)
        try:
            if not (is_done_by(handle, end) if end > 0 else _core.wait(handle, 0)):
                return
        except Exception:
            with self._lock:
                self._close(tag, handle)
            raise
        with self._lock:
            if self._close(tag, handle):
                self._expected[tag].popleft().receive(handle.number())

    def _close(self, tag: int, handle: _core.Handle) -> bool:
        """Whether the question was open, so that the answer is the caller's."""
        is_open = self._open_questions.get(tag) is handle
        if is_open:
            del self._open_questions[tag]
        return is_open


class AnySource(Transfer):
    """A message from any rank: first the question who sends one, and then that message.

    Args:
        transfers: the group's.
        tensors: one.
        group: its title, of messages for users.
        require_open: raises if the group is gone.
    """

    def __init__(
        self,
        transfers: Transfers,
        tensors: list[Tensor],
        tag: int,
        group: str,
        timeout_s: float,
        require_open: Callable[[str], None],
    ) -> None:
        title = f"recv (from any rank, tag {tag}, of {group})"
        super().__init__(title, (), tensors, tensors, None, timeout_s, order_of(view_of(tensors[0], "recv")))
        self._transfers, self.tag, self._of_group, self._require_open = transfers, tag, group, require_open
        self._received: Transfer | None = None
        self._turn = threading.Lock()
        transfers.expect(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds()
        end = time.monotonic() + seconds if seconds > 0 else self._deadline
        while not self._advance(end):
            if end <= time.monotonic() < self._deadline:
                raise self._overdue(seconds)
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
                    self._require_open("recv")
                    self._transfers.receive_from_any(self.tag, self._title, end)
                if self._received is not None:
                    if end > 0:
                        self._received._ends_by(end, self._timeout_s)
                    else:
                        self._received.is_completed()
                    if self._received._is_done:
                        self._error, self._is_done, self._arrays = self._received._error, True, None
                if end > 0 and not self._is_done and time.monotonic() >= self._deadline:
                    raise self._overdue(self._timeout_s)
            except RingtrainError as error:
                self._transfers.forget(self)
                self._error, self._is_done = error, True
                report_failure(error)
            return self._is_done

    def receive(self, source: int) -> None:
        """Called when this rank of the job sends the message that is due to this one."""
        received = self._transfers.receive(self._results[0], source, self.tag, self._of_group, self._timeout_s)
        self.peer, self._received = received.peer, received


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
