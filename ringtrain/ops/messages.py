"""Messages from one rank to another. See `ringtrain.ops`, too."""

from __future__ import annotations

import operator
import threading
from typing import Any, TypeVar

import ringtrain._core as _core
from ringtrain._core import OpKind
from ringtrain.arrays.adapter import View, adapter_for
from ringtrain.engine.handles import Handle, report_failure
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.requirements import require_usable
from ringtrain.errors import ranges_of
from ringtrain.failure import call_site

Array = TypeVar("Array")

_TAGS = 2**31
_lock = threading.Lock()  # numbers and submissions are in one order


def send(tensor: Any, dest: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Send a tensor to another rank, and wait until that rank receives it. Mirrors `Send` of mpi4py.

    Messages of two ranks with the same tag arrive in the order in which they were sent. Two ranks that both send first
    and receive later wait for each other: one of them uses `send_async`.

    Args:
        tensor: in host memory. The receiver's has the same shape and dtype.
        dest: the rank that receives it; a rank of the job, also for a process set.
        tag: a number from 0 on that tells messages of the same two ranks apart.
        process_set: both ranks belong to it. The other ranks take no part.

    Raises:
        NotInitializedError: before init().
        ValueError: `dest` is this rank or not in the process set, this rank is not in it, or the tensor is on a GPU.
        TypeError: an unsupported object or dtype.
        RingtrainError: the receiver has another shape or dtype (MismatchError), or is lost, fails or does not arrive.

    Examples:
        >>> values = np.full(2, hvd.rank())
        >>> if hvd.rank() == 0:
        ...     hvd.send(values, dest=1)
        ... elif hvd.rank() == 1:
        ...     values = hvd.recv(values, source=0)
        >>> values
        array([0, 0])
    """
    _start_send(tensor, dest, tag, process_set, is_awaited=True).wait()


def send_async(tensor: Any, dest: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> Handle[None]:
    """As `send`, at once: give the Handle to `synchronize`, and leave the tensor unchanged until then."""
    return _start_send(tensor, dest, tag, process_set)


def recv(tensor: Array, source: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> Array:
    """Receive a tensor from another rank in place. Mirrors `Recv` of mpi4py.

    Args:
        tensor: in host memory; its values are replaced. The sender's has the same shape and dtype.
        source: the rank that sends it; a rank of the job, also for a process set.
        tag: that of the message.
        process_set: both ranks belong to it. The other ranks take no part.

    Returns:
        The tensor, with the values of the sender.

    Raises:
        NotInitializedError: before init().
        ValueError: `source` is this rank or not in the process set, this rank is not in it, or the tensor is on a GPU
            or read-only.
        TypeError: an unsupported object or dtype, or one that cannot be changed, such as a number or an array of JAX.
        RingtrainError: the sender has another shape or dtype (MismatchError), or is lost, fails or does not arrive.

    Examples:
        >>> values = np.full(2, hvd.rank())
        >>> if hvd.rank() == 1:
        ...     hvd.send(values, dest=0, tag=7)
        ... elif hvd.rank() == 0:
        ...     values = hvd.recv(values, source=1, tag=7)
        >>> values
        array([1, 1])
    """
    return _start_recv(tensor, source, tag, process_set, is_awaited=True).wait()


def recv_async(tensor: Array, source: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> Handle[Array]:
    """As `recv`, at once: give the Handle to `synchronize`, and leave the tensor alone until then."""
    return _start_recv(tensor, source, tag, process_set)


def _start_send(tensor: Any, dest: int, tag: int, process_set: ProcessSet, is_awaited: bool = False) -> Handle[None]:
    adapter = adapter_for(tensor)
    memory = adapter.prepare(tensor)
    core = _submit("send", "dest", dest, tag, process_set, adapter.view(memory), is_awaited)
    return Handle(core, memory, lambda _: None)


def _start_recv(tensor: Any, source: int, tag: int, process_set: ProcessSet, is_awaited: bool = False) -> Handle[Any]:
    adapter = adapter_for(tensor)
    may_write_there = adapter.is_in_place(tensor)
    memory = adapter.prepare(tensor)
    if memory is tensor and not may_write_there:
        memory = adapter.empty_like(memory)
    core = _submit("recv", "source", source, tag, process_set, adapter.view(memory), is_awaited)

    def finish(_: _core.Handle) -> Any:
        if memory is tensor:
            adapter.note_change(tensor)
        else:
            adapter.assign(tensor, memory)
        return tensor

    return Handle(core, (tensor, memory), finish)


def _submit(
    kind: str, argument: str, peer: int, tag: int, process_set: ProcessSet, view: View, is_awaited: bool
) -> _core.Handle:
    own = require_member(process_set, kind)
    peer = require_peer(peer, process_set, kind, argument)
    if peer == own:
        raise ValueError(f"{kind}: {argument} {peer} is this rank; a rank cannot send to itself")
    tag = require_tag(tag, kind)
    number = process_set.process_set_id or 0
    if len(view) == 5:
        raise ValueError(f"{kind}: the tensor is on GPU {view[3]}; copy it to host memory")
    sends = kind == "send"
    numbers = [own, peer, tag] if sends else [peer, own, tag]
    with _lock:
        count = process_set.next_message((numbers[0], numbers[1], tag))
        way = f"from rank {numbers[0]} to {numbers[1]}, tag {tag}"
        operation = _core.Operation(OpKind.TRANSFER, "", number, numbers=numbers)
        try:
            return _core.submit(
                operation,
                [view],
                [] if sends else [view],
                is_awaited=is_awaited,
                site=call_site(),
                title=f'transfer "message {count} {way}"',
            )
        except Exception as error:
            report_failure(error)
            raise


def require_member(process_set: ProcessSet, kind: str) -> int:
    """Returns this rank of the job. Raises as `send` if it does not belong to the process set."""
    _core.require_initialized()
    require_usable(process_set, None, kind)
    return (process_set.ranks or [])[process_set.rank() or 0]


def require_peer(peer: Any, process_set: ProcessSet, kind: str, argument: str) -> int:
    ranks = process_set.ranks or []
    peer = _integer(kind, argument, peer)
    if peer not in ranks:
        raise ValueError(f"{kind}: {argument} {peer} is not one of the ranks {ranges_of(ranks)}")
    return peer


def require_tag(tag: Any, kind: str, argument: str = "tag") -> int:
    tag = _integer(kind, argument, tag)
    if not 0 <= tag < _TAGS:
        raise ValueError(f"{kind}: {argument} must be at least 0 and less than 2**31, not {tag}")
    return tag


def _integer(kind: str, argument: str, given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(f"{kind}: {argument} must be an integer, not {given!r}") from None
