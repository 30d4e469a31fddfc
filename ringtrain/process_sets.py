"""Subsets of the ranks that run operations among themselves. Mirrors `horovod.common.process_sets`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringtrain import _core


class ProcessSet:
    """Some ranks of the job. It can be used once it is registered: by `add_process_set` or by `init(process_sets=...)`.

    Args:
        ranks: ranks of the job, in any order, or an mpi4py communicator whose ranks are ranks of the job.

    Attributes:
        ranks: the ranks, ascending; None for the global process set before init().
        process_set_id: its number, or None before it is registered. The same on all ranks.
    """

    def __init__(self, ranks: Sequence[int] | Any):
        if hasattr(ranks, "Get_group"):
            ranks = _ranks_in_world(ranks)
        if len(set(ranks)) != len(ranks) or any(rank < 0 for rank in ranks):
            raise ValueError(f"a process set needs different ranks from 0 on, not {list(ranks)}")
        if not ranks:
            raise ValueError("a process set needs at least one rank")
        self.ranks: list[int] | None = sorted(ranks)
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """How many ranks it has, or None before it is registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This rank's place in it, or None if this rank does not belong to it or it is not registered."""
        if self.process_set_id is None or self.ranks is None or not self.included():
            return None
        return self.ranks.index(_own_rank())

    def included(self) -> bool:
        """Whether this rank belongs to it. Raises NotInitializedError before init()."""
        return _own_rank() in (self.ranks or [])

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        """The copy of a model whose layers have a process set has the same one."""
        return self

    def __reduce__(self) -> Any:
        """What is saved in one job and loaded in another is not registered there, but for the global one."""
        return "global_process_set" if self is global_process_set else (ProcessSet, (self.ranks,))


def _global() -> ProcessSet:
    process_set = ProcessSet([0])
    process_set.ranks = None
    process_set.process_set_id = 0
    return process_set


global_process_set = _global()
_registered: dict[int, ProcessSet] = {0: global_process_set}
_rank: int | None = None


def _own_rank() -> int:
    _core.require_initialized()
    assert _rank is not None
    return _rank


def _ranks_in_world(comm: Any) -> list[int]:
    """The ranks of the job that form an mpi4py communicator; only if the job is all of MPI.COMM_WORLD."""
    from mpi4py import MPI

    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    return [int(rank) for rank in MPI.Group.Translate_ranks(group, None, world)]


def set_world(rank: int, size: int) -> None:
    """Called by init()."""
    global _rank
    _rank = rank
    global_process_set.ranks = list(range(size))


def forget_process_sets() -> None:
    """Called by shutdown(): all but the global one have to be registered anew."""
    global _rank
    _rank = None
    global_process_set.ranks = None
    for process_set in _registered.values():
        if process_set is not global_process_set:
            process_set.process_set_id = None
    _registered.clear()
    _registered[0] = global_process_set


def _wait(handle: _core.Handle) -> int:
    while not _core.wait(handle, 0.2):
        pass
    return handle.number()


def register_at_init(process_sets: Sequence[ProcessSet | Sequence[int]]) -> None:
    """Called by init() on all ranks: refuses lists that differ before it registers them one by one."""
    sets = [_as_process_set(one) for one in process_sets]
    numbers = [number for one in sets for number in (len(one.ranks or []), *(one.ranks or []))]
    _wait(_core.submit(_core.OpKind.BARRIER, [], [], "<init(process_sets)>", numbers=numbers))
    for one in sets:
        add_process_set(one)


def _as_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    return process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; all ranks of the job call this with the same ranks, in the same order.

    Args:
        process_set: a ProcessSet, or a list of ranks.

    Raises:
        MismatchError: not all ranks gave the same ranks.
        ValueError: registered already, the same ranks are, or a rank that the job does not have.
    """
    added = _as_process_set(process_set)
    _own_rank()
    ranks, size = added.ranks or [], len(global_process_set.ranks or [])
    if added.process_set_id is not None:
        raise ValueError(f"{added} is registered already")
    if ranks[-1] >= size:
        raise ValueError(f"process set {ranks} has rank {ranks[-1]}, but the job has only {size} ranks")
    if any(ranks == other.ranks for other in _registered.values()):
        raise ValueError(f"a process set with the ranks {ranks} is registered already")
    handle = _core.submit(_core.OpKind.ADD_PROCESS_SET, [], [], "<add_process_set>", numbers=ranks)
    added.process_set_id = _wait(handle)
    _registered[added.process_set_id] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; all ranks of the job call this. What is pending for it fails.

    Returns:
        False for one that is not registered and for the global one, which stays.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    _wait(_core.submit(_core.OpKind.REMOVE_PROCESS_SET, [], [], "<remove_process_set>", numbers=[number]))
    del _registered[number]
    process_set.process_set_id = None
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Number and ranks of every registered process set."""
    _own_rank()
    return {number: list(one.ranks or []) for number, one in _registered.items()}
