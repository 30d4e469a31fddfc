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
