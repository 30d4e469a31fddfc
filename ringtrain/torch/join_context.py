"""`Join`: a context for epochs in which the ranks have different numbers of batches."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ringtrain import ops
from ringtrain.job import session
from ringtrain.torch.optimizer import Distributed, count_on_from
from ringtrain.torch.state import broadcast_optimizer_state, broadcast_parameters


class Join:
    """A context in which each rank trains until its own data end: `with hvd.Join(optimizer): for batch in loader: ...`

    A rank that leaves it early waits at its end and contributes nothing to the reductions of the others, whose averages
    are over the ranks that still train. At the end all ranks have the parameters and the state of the one that trained
    longest. Mirrors torch.distributed.algorithms.Join on `hvd.join`.

    Within it, the other operations of the ranks that still train may be allreduces with Sum and Average, to which the
    others contribute zeros, and barriers. SyncBatchNorm and nan_check work; sparse gradients need sparse_as_dense=True.

    Args:
        optimizers: distributed, over all ranks of the job, with op=Average or Sum.

    Attributes:
        last_rank: after the context, the rank that trained longest; the one to broadcast the buffers of a model from,
            such as running statistics.

    Raises:
        TypeError: an optimizer that is not distributed, or one with op=Adasum.
    """

    def __init__(self, *optimizers: Any):
        for optimizer in optimizers:
            if not isinstance(optimizer, Distributed):
                raise TypeError(f"Join takes what DistributedOptimizer returned, not {type(optimizer).__name__}")
        self._optimizers = optimizers
        self.last_rank: int | None = None

    def __enter__(self) -> Join:
        for optimizer in self._optimizers:
            optimizer._gradient_hooks.counts_contributors = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for optimizer in self._optimizers:
            optimizer._gradient_hooks.counts_contributors = False
        if error is not None:
            return  # the others learn it when this rank ends; waiting for them would only hide it
        self.last_rank = last = ops.join()
        if session.size() == 1:
            return
        count_on_from(last, self._optimizers)
        for optimizer in self._optimizers:
            broadcast_parameters([group["params"] for group in optimizer.param_groups], last)
            broadcast_optimizer_state(optimizer, last)
