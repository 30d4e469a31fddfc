"""The errors of operations over several ranks.

All derive from RingtrainError, which is a RuntimeError. A mistake that one rank can see alone (a name in flight, a
shape that cannot be split, an unsupported dtype) is a ValueError or TypeError, raised by the call.
"""

from __future__ import annotations

from collections.abc import Iterable

from ringtrain._core import (
    DeadlockError as DeadlockError,
    MismatchError as MismatchError,
    NotInitializedError as NotInitializedError,
    PeerLostError as PeerLostError,
    RemoteError as RemoteError,
    RingtrainError as RingtrainError,
    ShutDownError as ShutDownError,
    StalledError as StalledError,
)


class ReplicaError(RingtrainError):
    """The ranks do not have the same parameters; see check_replicas."""


class NonFiniteError(RingtrainError):
    """A gradient is NaN or infinite on some rank; see nan_check of DistributedOptimizer."""


class StepOrderError(RingtrainError, AssertionError):
    """backward(), step() and zero_grad() were called in an order that would lose gradients.

    Also an AssertionError, as in Horovod.
    """


class AdasumError(ValueError, RuntimeError):
    """Adasum was asked for arrays or operations that it does not support.

    Also a RuntimeError, as in Horovod.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """The ranks of an elastic job change, and the next generation begins. Not an error.

    Args:
        skip_sync: whether all ranks have the same state, so that it need not be sent.
    """

    def __init__(self, skip_sync: bool = False):
        super().__init__("the ranks of this elastic job change")
        self.skip_sync = skip_sync


# Tracebacks show this name, by which users import them as well.
for _error in (ReplicaError, NonFiniteError, StepOrderError):
    _error.__module__ = "ringtrain"

# The name under which Horovod's users catch the failure of a collective.
HorovodInternalError = RingtrainError


# --- lists of ranks, for messages -------------------------------------------------------------------------------------


def list_of_ranks(ranks: Iterable[int]) -> str:
    """`ranks 0, 2-5`, or `rank 1`."""
    given = list(ranks)
    return f"rank{'s' if len(given) > 1 else ''} {ranges_of(given)}"


def ranges_of(ranks: Iterable[int]) -> str:
    """`0, 2-5`."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    return ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in ranges)


# --- names of others, for messages ------------------------------------------------------------------------------------


_NAMES_OF_TORCH = {
    "all_gather": "allgather",
    "all_gather_object": "allgather_object",
    "all_reduce": "allreduce",
    "all_to_all": "alltoall",
    "broadcast_object_list": "broadcast_object",
    "DDP": "DistributedOptimizer",
    "destroy_process_group": "shutdown",
    "DistributedDataParallel": "DistributedOptimizer",
    "get_local_rank": "local_rank",
    "get_rank": "rank",
    "get_world_size": "size",
    "init_process_group": "init",
    "irecv": "recv_async",
    "isend": "send_async",
    "local_world_size": "local_size",
    "reduce_scatter": "reducescatter",
    "world_size": "size",
}


def missing(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Returns the error for a name that a module does not have; `known` are those that it has."""
    there = set(known)
    found = [_NAMES_OF_TORCH[name]] if _NAMES_OF_TORCH.get(name) in there else []
    if not name.startswith("_"):
        import difflib  # slow, and only a name that nobody knows needs it

        found = found or difflib.get_close_matches(name, there, n=1, cutoff=0.75)
    hint = f"; did you mean '{found[0]}'?" if found else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
