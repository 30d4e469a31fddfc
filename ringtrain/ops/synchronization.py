"""barrier and join, which have no tensor. See `ringtrain.ops` for what all operations have in common."""

from __future__ import annotations

from collections.abc import Callable

from ringtrain._core import OpKind
from ringtrain.engine.submission import Operation, start
from ringtrain.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called it. Mirrors `horovod.barrier`.

    Args:
        process_set: the ranks that take part, all of which call it.

    Raises:
        NotInitializedError: before init().
        ValueError: this rank is not in the process set.
        RingtrainError: one of the ranks is lost, fails or does not arrive.
    """
    start(Operation(OpKind.BARRIER, [], None, process_set), is_awaited=True).wait()


def join(device: int = -1, *, process_set: ProcessSet = global_process_set) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so. Mirrors `horovod.join`.

    Until then this rank contributes zeros to the allreduces (Sum, Average and Adasum) of the others; any other
    operation of theirs but barrier fails there with MismatchError.

    Args:
        device: accepted for Horovod's sake.
        process_set: the ranks that take part, all of which call it in the end.

    Returns:
        The last rank to join.

    Raises:
        NotInitializedError: before init().
        ValueError: this rank is not in the process set.
        RingtrainError: one of the ranks is lost or fails.
    """
    last: int = start(Operation(OpKind.JOIN, [], None, process_set), is_awaited=True).wait()
    for begin in _after_join:
        begin(process_set)
    return last


_after_join: list[Callable[[ProcessSet], None]] = []


def after_join(begin: Callable[[ProcessSet], None]) -> None:
    """Registers a function of a higher floor, called at the end of join(), on all ranks of the process set."""
    _after_join.append(begin)
