"""Subsets of the ranks that run operations among themselves. Mirrors `horovod.common.process_sets`."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import ringtrain._core as _core
from ringtrain.arrays import numpy as numpy_adapter
from ringtrain.engine.handles import Handle
from ringtrain.errors import list_of_ranks
from ringtrain.failure import call_site


class RefusedSetError(ValueError):
    """A process set cannot be registered, for a reason that all ranks of the job see alike."""


class ProcessSet:
    """Some ranks of the job. It can be used once it is registered: by `add_process_set` or by `init(process_sets=...)`.

    Args:
        ranks_or_comm: ranks of the job, in any order, or an mpi4py communicator. Each rank gives the communicator that
            it belongs to, so that one ProcessSet of what MPI_Comm_split has made is a set for each part.

    Attributes:
        ranks: the ranks, ascending; of a communicator None until it is registered.
        process_set_id: its number, or None before it is registered. The same on all ranks.
        mpi_comm: the communicator, or None.

    Raises:
        ValueError: neither; a rank that is not a number from 0 on, or comes twice.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any):
        self.process_set_id: int | None = None
        self.mpi_comm: Any = ranks_or_comm if hasattr(ranks_or_comm, "Get_group") else None
        self.ranks: list[int] | None = None if self.mpi_comm is not None else _sorted_ranks(ranks_or_comm)
        # Registered together with it, and removed: those of all ranks' communicators.
        self._parts: list[ProcessSet] = [self]
        self._is_of_members = False  # opened by its members alone
        self._messages: Counter[tuple[int, int, int]] = Counter()  # by source, destination and tag

    def next_message(self, way: tuple[int, int, int]) -> int:
        """Counts a message between two ranks. `way`: source, destination and tag."""
        self._messages[way] += 1
        return self._messages[way]

    def size(self) -> int | None:
        """How many ranks it has, or None before it is registered."""
        return len(self.ranks) if self._is_registered() and self.ranks is not None else None

    def rank(self) -> int | None:
        """This rank's place in it, or None before it is registered.

        Raises:
            ValueError: this rank does not belong to it, as in Horovod.
        """
        if not self._is_registered() or self.ranks is None:
            return None
        own = _own_rank()
        if own not in self.ranks:
            raise ValueError(f"rank {own} does not belong to {self}; ask included() first")
        return self.ranks.index(own)

    def included(self) -> bool | None:
        """Whether this rank belongs to it; of a communicator None before it is registered.

        Raises:
            NotInitializedError: before init().
        """
        return None if self.ranks is None else _own_rank() in self.ranks

    def _is_registered(self) -> bool:
        return self.process_set_id is not None and _rank is not None

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    __repr__ = __str__

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        """The copy of a model whose layers have a process set has the same one."""
        return self

    def __reduce__(self) -> Any:
        """A set that is saved in one job and loaded in another is not registered there, except the global one."""
        if self is global_process_set:
            return "global_process_set"
        return ProcessSet, (self.mpi_comm if self.ranks is None else self.ranks,)


def _sorted_ranks(given: Iterable[int]) -> list[int]:
    try:
        ranks = sorted(operator.index(rank) for rank in given)
    except TypeError:
        raise ValueError(f"a process set takes ranks or an mpi4py communicator, not {given!r}") from None
    if len(set(ranks)) != len(ranks) or any(rank < 0 for rank in ranks):
        raise ValueError(f"a process set needs different ranks from 0 on, not {ranks}")
    return ranks


global_process_set = ProcessSet([])  # init() knows the ranks
global_process_set.process_set_id = 0
_registered: dict[int, ProcessSet] = {0: global_process_set}
_rank: int | None = None
_communicator: Any = None  # mpi4py's, of the whole job; None for a job of one rank


def _own_rank() -> int:
    _core.require_initialized()
    assert _rank is not None
    return _rank


def set_world(rank: int, size: int, communicator: Any, given: Any = None) -> None:
    """Called by init(), with the communicator of the job and the one that the script gave, or None."""
    global _rank, _communicator
    _rank, _communicator = rank, communicator
    global_process_set.ranks = list(range(size))
    global_process_set.mpi_comm = given


def forget_process_sets() -> None:
    """Called by shutdown(): all but the global one have to be registered anew."""
    global _rank, _communicator
    _rank = _communicator = None
    global_process_set.ranks = []
    global_process_set.mpi_comm = None
    for process_set in _registered.values():
        process_set._messages.clear()
        if process_set is not global_process_set:
            process_set.process_set_id = None
            if process_set.mpi_comm is not None:
                process_set.ranks = None  # the next job may be another one
    _registered.clear()
    _registered[0] = global_process_set


def _carry_out(kind: _core.OpKind, name: str, numbers: list[int]) -> int:
    """An operation of all ranks that has numbers in place of tensors; waits for it."""
    operation = _core.Operation(kind, name, numbers=numbers)
    handle = _core.submit(operation, [], [], is_awaited=True, site=call_site())
    number: int = Handle(handle, (), _core.Handle.number).wait()
    return number


def register_at_init(process_sets: Sequence[ProcessSet | Iterable[int]]) -> None:
    """Called by init() on all ranks: refuses lists that differ before it registers them one by one.

    Raises:
        RefusedSetError: a set cannot be registered; those before it are.
        MismatchError: the ranks have other sets.
        ValueError: a set of this rank is none.
    """
    sets = [_as_process_set(one) for one in process_sets]
    of_communicator = [-1]  # each rank has another one
    numbers = [
        number
        for one in sets
        for number in ([len(one.ranks or []), *(one.ranks or [])] if one.mpi_comm is None else of_communicator)
    ]
    _carry_out(_core.OpKind.BARRIER, "<init(process_sets)>", numbers)
    for one in sets:
        add_process_set(one)


def _as_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    return process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set; all ranks of the job call this with the same ranks, in the same order.

    Args:
        process_set: a ProcessSet, or what one is made of: ranks, or the communicator of this rank's part.

    Raises:
        MismatchError: not all ranks gave the same ranks.
        ValueError: registered already, the same ranks are, no ranks, or a rank that the job does not have.

    Examples:
        >>> first = hvd.add_process_set([0])
        >>> float(hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=first)[0]) if first.included() else 1.0
        1.0
        >>> hvd.remove_process_set(first)
        True
    """
    added = _as_process_set(process_set)
    _own_rank()
    if added.process_set_id is not None:
        raise ValueError(f"{added} is registered already")
    if added.mpi_comm is not None:
        _register_parts(added)
    else:
        _register(added, added.ranks or [])
    return added


def _register(added: ProcessSet, ranks: list[int]) -> None:
    size = len(global_process_set.ranks or [])
    if not ranks:
        raise RefusedSetError("a process set needs at least one rank before it can be registered")
    if ranks[-1] >= size:
        raise RefusedSetError(f"process set {ranks} has rank {ranks[-1]}, but the job has only {size} ranks")
    if any(ranks == other.ranks and not other._is_of_members for other in _registered.values()):
        raise RefusedSetError(f"a process set with the ranks {ranks} is registered already")
    added.process_set_id = _carry_out(_core.OpKind.ADD_PROCESS_SET, "<add_process_set>", ranks)
    added.ranks = ranks
    _registered[added.process_set_id] = added


def new_group(ranks: Iterable[int]) -> ProcessSet:
    """Open a process set that only its members ask for; the other ranks of the job take no part.

    As `torch.distributed.new_group(ranks, use_local_synchronization=True)`, or `MPI_Comm_create_group`. The same ranks
    may open several groups, which are different sets. `remove_process_set` gives one up.

    Args:
        ranks: of the job, in any order, this one among them. All of them call it with the same ranks.

    Raises:
        NotInitializedError: before init().
        ValueError: this rank is not one of them, a rank comes twice, or the job does not have it.
        StalledError: a member does not call it within the option stall_shutdown_time_s.

    Examples:
        >>> if hvd.rank() in (0, 1):
        ...     pair = hvd.new_group([0, 1])
        ...     float(hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=pair)[0])
        ...     hvd.remove_process_set(pair)
        2.0
        True
    """
    group = ProcessSet(_sorted_ranks(ranks))
    own, size = _own_rank(), len(global_process_set.ranks or [])
    members = group.ranks or []
    if members and members[-1] >= size:
        raise ValueError(f"new_group: the ranks {members} have rank {members[-1]}, but the job has only {size} ranks")
    if own not in members:
        raise ValueError(
            f"new_group: rank {own} is not one of the ranks {members}; call it on these ranks alone, or "
            "add_process_set() on all ranks of the job"
        )
    open_for_members(group, members)
    return group


def open_for_members(group: ProcessSet, members: list[int]) -> None:
    """Open a set that is not registered with these ranks, ascending, this one among them; its members call this.

    The set may have been open in an earlier generation, with other ranks: objects that keep it find it open again.
    """
    number: int = Handle(open_among(members), (), _core.Handle.number).wait()
    group.process_set_id, group.ranks, group._is_of_members = number, members, True
    _registered[number] = group


def open_among(ranks: list[int]) -> Any:
    """Begin to open a process set that only its members ask for; ranks outside of it take no part.

    Args:
        ranks: of the job, this one among them, in the order of their places in the set. The same ranks may be opened
            again after that has ended: it is another set.

    Returns:
        The Handle of the core, whose number() is that of the set once it is done.
    """
    name = f"<open_process_set {','.join(map(str, sorted(ranks)))}>"  # another order is a mismatch
    operation = _core.Operation(_core.OpKind.OPEN_PROCESS_SET, name, numbers=ranks)
    title = f"new_group of {list_of_ranks(ranks)}"
    return _core.submit(operation, [], [], is_awaited=True, site=call_site(), title=title)


def close_among(number: int, ranks: list[int]) -> None:
    """Give up a set that `open_among` has opened. It ends once all its members have; this rank does not wait for them.

    Args:
        number: of the set.
        ranks: its members.
    """
    operation = _core.Operation(
        _core.OpKind.CLOSE_PROCESS_SET, f"<close_process_set {number}>", numbers=[number, *ranks]
    )
    _core.submit(operation, [], [], site=call_site())


def _register_parts(mine: ProcessSet) -> None:
    """Every rank has the communicator of its own part, and all register all parts."""
    own = _ranks_of(mine.mpi_comm)
    mine._parts = [mine if ranks == own else ProcessSet(ranks) for ranks in _different_lists(own)]
    for part in mine._parts:
        _register(part, own if part is mine else part.ranks or [])


def _ranks_of(comm: Any) -> list[int]:
    """The ranks of the job that form an mpi4py communicator."""
    from mpi4py import MPI

    part = comm.Get_group()
    job = (MPI.COMM_SELF if _communicator is None else _communicator).Get_group()
    ranks = [int(rank) for rank in MPI.Group.Translate_ranks(part, None, job)]
    part.Free()
    job.Free()
    if MPI.UNDEFINED in ranks:
        raise ValueError("the communicator of a process set has processes that are not ranks of this job")
    return sorted(ranks)


def _different_lists(own: list[int]) -> list[list[int]]:
    """The lists of ranks that the ranks of the job have, in an order that is the same everywhere."""
    flags = np.zeros((1, len(global_process_set.ranks or [])), np.uint8)
    flags[0, own] = 1
    view = numpy_adapter.view(flags)
    operation = _core.Operation(_core.OpKind.ALLGATHER, "<ranks of communicators>")
    handle = _core.submit(operation, [view], [], is_awaited=True, site=call_site())
    gathered: Handle[Any] = Handle(handle, flags, _core.Handle.tensors)
    ((of_all, _, shape),) = gathered.wait()
    return [list(ranks) for ranks in sorted({tuple(np.flatnonzero(row).tolist()) for row in of_all.reshape(shape)})]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; all ranks of the job call this. Operations pending for it fail.

    A set of `new_group` is given up by its members alone: this rank cannot use it any more, and it ends once all
    members have called this.

    Returns:
        False for one that is not registered and for the global one, which stays.

    Raises:
        TypeError: anything but a ProcessSet.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"remove_process_set needs the ProcessSet that add_process_set returned, not {process_set!r}")
    if process_set.process_set_id is None or process_set is global_process_set:
        return False
    for part in process_set._parts:
        number = part.process_set_id
        assert number is not None
        if part._is_of_members:
            close_among(number, part.ranks or [])
        else:
            _carry_out(_core.OpKind.REMOVE_PROCESS_SET, "<remove_process_set>", [number])
        del _registered[number]
        part.process_set_id = None
    return True


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Number and ranks of every registered process set."""
    _own_rank()
    return {number: list(one.ranks or []) for number, one in _registered.items()}
