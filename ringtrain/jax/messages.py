"""Messages of JAX arrays, and of pytrees of them, between two ranks, inside and outside of jit.

Only the two ranks take part, and their programs may be different. Messages of two ranks with the same tag arrive in
the order of the script, one for each array of a pytree. Messages of a program that do not need each other's results
are under way at the same time, so two ranks may both send first and receive later; a loop or condition with messages
begins when all operations before it have ended.

Gradients travel the other way. So the ranks differentiate the same messages: a rank that sends a value uses what `send`
returns in its loss, and what `recv` is given depends on what is differentiated.
"""

from __future__ import annotations

from typing import Any, TypeVar

from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.failure import call_place
from ringtrain.jax.transfers import Ends, exchange_p
from ringtrain.jax.trees import Carried, Tree, carried
from ringtrain.ops.messages import require_member, require_peer, require_tag

Arrays = TypeVar("Arrays")


def send(x: Arrays, dest: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> Arrays:
    """Send an array, or each array of a pytree, to another rank.

    Args:
        x: the receiver's has the same shapes and dtypes. Keys of random generators, too.
        dest: the rank that receives it; a rank of the job, also for a process set.
        tag: a number from 0 on that tells messages of the same two ranks apart.
        process_set: both ranks belong to it. The other ranks take no part.

    Returns:
        x itself, through which gradients come back from the receiver.

    Raises:
        NotInitializedError: before init().
        ValueError: `dest` is this rank or not in the process set, this rank is not in it, or the tag is out of range.
        TypeError: of an object or a dtype that cannot be sent, or a rank or tag that is not an integer.
        RingtrainError: outside of jit: the receiver has another shape or dtype (MismatchError), no rank can go on
            (DeadlockError), or the receiver is lost, fails or does not arrive.
    """
    return _moved("send", x, x, None, dest, tag, 0, process_set)


def recv(x: Arrays, source: int, tag: int = 0, process_set: ProcessSet = global_process_set) -> Arrays:
    """Receive arrays from another rank.

    Args:
        x: arrays of the shapes and dtypes that the sender's have. Their values do not matter.
        source: the rank that sends; a rank of the job, also for a process set.
        tag: that of the message.
        process_set: both ranks belong to it. The other ranks take no part.

    Returns:
        A pytree as x, with the values of the sender.

    Raises:
        RingtrainError: as `send`.
    """
    return _moved("recv", (), x, source, None, 0, tag, process_set)


def sendrecv(
    x: Any,
    like: Arrays,
    source: int | None,
    dest: int | None,
    sendtag: int = 0,
    recvtag: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Arrays:
    """Send arrays to a rank and receive some from a rank, as in an exchange of halos.

    Args:
        x: what is sent.
        like: arrays of the shapes and dtypes of what is received, such as x.
        source: the rank that sends, this rank, or None for none: then `like` is returned.
        dest: the rank that receives x, this rank, or None for none. A rank that sends to itself receives from itself.
        sendtag, recvtag: of the two messages.
        process_set: all of these ranks belong to it.

    Returns:
        A pytree as like. Its gradient goes back to `source`, and that of x comes back from `dest`.

    Raises:
        ValueError: only one of source and dest is this rank, or x and like differ where both are; and as `send`.
    """
    return _moved("sendrecv", x, like, source, dest, sendtag, recvtag, process_set)


def _moved(
    title: str,
    x: Any,
    like: Arrays,
    source: int | None,
    dest: int | None,
    sendtag: int,
    recvtag: int,
    process_set: ProcessSet,
) -> Arrays:
    own = require_member(process_set, title)
    tags = ("tag", "tag") if title != "sendrecv" else ("sendtag", "recvtag")
    sendtag, recvtag = require_tag(sendtag, title, tags[0]), require_tag(recvtag, title, tags[1])
    if source is not None or title == "recv":
        source = require_peer(source, process_set, title, "source")
    if dest is not None or title == "send":
        dest = require_peer(dest, process_set, title, "dest")
    tree = Tree.of(like)
    sent = [carried(leaf, title, True, is_moved=True) for leaf in Tree.of(x).leaves]
    received = [carried(leaf, title, True, is_moved=True) for leaf in tree.leaves]
    if own in (source, dest):
        _require_to_itself(title, sent, received, source, dest, (sendtag, recvtag))
        results = [one.array for one in sent]
    else:
        ends = Ends(process_set, dest, source, sendtag, recvtag, len(sent), call_place())
        results = exchange_p.bind(*(one.array for one in (*sent, *received)), ends=ends)
    whole: Arrays = tree.with_leaves([one.back(result) for one, result in zip(received, results, strict=True)])
    return whole


def _require_to_itself(
    title: str, sent: list[Carried], received: list[Carried], source: Any, dest: Any, tags: tuple[int, int]
) -> None:
    if source != dest:
        argument, own = ("source", source) if title == "recv" or dest is None else ("dest", dest)
        remedy = "; a rank cannot send to itself" if title != "sendrecv" else "; give it as source and as dest"
        raise ValueError(f"{title}: {argument} {own} is this rank{remedy}")
    shapes, others = ([f"{one.array.dtype}{list(one.array.shape)}" for one in some] for some in (sent, received))
    if shapes != others or tags[0] != tags[1]:
        raise ValueError(
            f"{title}: this rank sends itself {shapes}, tag {tags[0]}, and receives {others}, tag {tags[1]}"
        )
