"""Messages between two ranks of a group."""

from __future__ import annotations

import functools
import threading

import ringtrain._core as _core
from ringtrain._core import ANY_SOURCE, OpKind
from ringtrain.torch.distributed.streams import order_of
from ringtrain.torch.distributed.views import Tensor, bytes_view_of, copies_back, host_copy
from ringtrain.torch.distributed.work import Work, submitted


class Transfer(Work):
    """A message between two ranks."""

    peer = -1

    def source_rank(self) -> int:
        """The rank of the group that this is a message from, or to."""
        return self.peer

    _source_rank = source_rank


class AnySource(Transfer):
    """A message from any rank."""

    ranks: list[int]  # of the group, in the job

    def source_rank(self) -> int:
        """The rank of the group that has sent it, after wait()."""
        return self.ranks.index(self._handles[0].number()) if self.is_success() else -1

    _source_rank = source_rank

    def _end_with(self, error: Exception) -> None:
        self._handles[0].give_up()  # the message is for the next one that asks
        super()._end_with(error)


class Transfers:
    """Submits the messages of one group. Any thread may call it.

    Args:
        process_set: the group's.
        ranks: of the job, in the order of the group.
        own: this rank, in the job.
    """

    def __init__(self, process_set: int, ranks: list[int], own: int) -> None:
        self._set, self._ranks, self._own = process_set, ranks, own
        self._lock = threading.Lock()  # numbers and submissions are in one order
        self._counts: dict[tuple[int, int, int], int] = {}  # by source, destination and tag: how many there were

    def send(self, tensor: Tensor, to: int, tag: int, group: str, timeout_s: float, is_awaited: bool) -> Transfer:
        """A message to this rank of the job. group: its title, of messages for users."""
        return self._submit("send", tensor, self._own, to, tag, group, timeout_s, is_awaited)

    def receive(
        self, tensor: Tensor, source: int, tag: int, group: str, timeout_s: float, is_awaited: bool
    ) -> Transfer:
        """A message from this rank of the job, or from ANY_SOURCE."""
        return self._submit("recv", tensor, source, self._own, tag, group, timeout_s, is_awaited)

    def _submit(
        self,
        kind: str,
        tensor: Tensor,
        source: int,
        destination: int,
        tag: int,
        group: str,
        timeout_s: float,
        is_awaited: bool,
    ) -> Transfer:
        if source == destination:
            place = self._ranks.index(source)
            raise ValueError(f"{kind} of {group}: rank {place} is this one; a rank cannot send to itself")
        is_from_any = source == ANY_SOURCE
        memory = host_copy(tensor, kind, kind == "send")
        view = bytes_view_of(memory, kind)
        copies = None if kind == "send" else copies_back([tensor], [memory])
        operation = _core.Operation(OpKind.TRANSFER, "", self._set, numbers=[source, destination, tag])
        with self._lock:
            key = (source, destination, tag)
            number = self._counts[key] = self._counts.get(key, 0) + 1
            way = "from any rank" if is_from_any else f"from rank {source} to {destination}"
            title = f"{kind} ({way}, tag {tag}, #{number} of {group})"
            handle = submitted(operation, [view], [] if kind == "send" else [view], (), is_awaited, title)
        finish = None if copies is None else functools.partial(copies, handle)
        order = None if tensor.is_cpu or finish is None else order_of(bytes_view_of(tensor, kind))
        made = AnySource if is_from_any else Transfer
        transfer = made(title, (handle,), memory, [tensor], finish, timeout_s, order)
        if isinstance(transfer, AnySource):
            transfer.ranks = self._ranks
        else:
            transfer.peer = self._ranks.index(destination if kind == "send" else source)
        if finish is not None and not is_awaited:
            transfer.settle_alone()
        return transfer
