"""Operations that MXNet's engine begins when their arrays are computed, while the script goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import mxnet

import ringtrain._core as _core
from ringtrain._core import OpKind, ReduceOp
from ringtrain.arrays.mxnet import is_on_host
from ringtrain.engine.handles import report_failure
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.requirements import require_predivide_factor, require_root, require_usable
from ringtrain.engine.submission import Reduction
from ringtrain.failure import call_site
from ringtrain.job import session
from ringtrain.mxnet.library import IS_NAIVE, raises_mxnet_errors
from ringtrain.ops.exchanges import after_join

# As the core's own names of what has none: a name that comes again is known to all ranks.
_NAMES_OF_UNNAMED = 240
_FEW_SECONDS = 10.0
# Asking an enumeration for a name costs more than anything else here.
_TITLES = {kind: kind.name.lower() for kind in (OpKind.ALLREDUCE, OpKind.BROADCAST)}
# To ask an array for its storage type is a call of libmxnet.so; its class tells, too.
_DENSE = (mxnet.nd.NDArray, mxnet.np.ndarray)

# Numbered where they are enqueued, on the thread of the script: engines begin what is ready in any order.
_unnamed: Counter[tuple[OpKind, int]] = Counter()


def takes(tensors: Sequence[Any]) -> bool:
    """Whether MXNet's engine can have an operation on these; else it has to wait. Raises as `require_dense`."""
    require_dense(tensors)
    return not IS_NAIVE and all(is_on_host(tensor) for tensor in tensors)


def require_dense(tensors: Sequence[Any]) -> None:
    """Raises TypeError for what is not a dense NDArray."""
    for tensor in tensors:
        if type(tensor) in _DENSE:
            continue
        if not isinstance(tensor, mxnet.nd.NDArray):
            raise TypeError(f"ringtrain.mxnet takes NDArrays, not a {type(tensor).__qualname__}")
        if tensor.stype != "default":
            raise TypeError(
                f"an NDArray of the storage type {tensor.stype} has no operation of its own: make it dense with "
                'tostype("default"), or give row_sparse gradients to DistributedTrainer'
            )


def push(
    kind: OpKind,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    priority: int,
    reduction: Reduction | None = None,
    root: int = 0,
) -> None:
    """Enqueue an operation. Without inputs it works in place.

    Raises:
        NotInitializedError: before init().
        ValueError: the process set is not registered or lacks this rank, or the name is one of ringtrain's own.
        RingtrainError: the engine has ended, as when another rank is lost.
    """
    raise_failure()
    title = _TITLES[kind]
    number = require_usable(process_set, name, title if name is None else f'{title} "{name}"')
    if process_set is not global_process_set:
        process_set.rank()  # raises where this rank does not belong to it
    if kind == OpKind.BROADCAST:
        root = require_root(root, process_set, title)
    if name is None:
        name = f"<MXNet's {title} {_unnamed[kind, number] % _NAMES_OF_UNNAMED}>"
        _unnamed[kind, number] += 1
    how = reduction or Reduction()
    operation = _core.Operation(
        kind, name, process_set=number, op=how.op, root=root, prescale=how.prescale, postscale=how.postscale
    )
    _core.mxnet_push(
        operation,
        [tensor.handle.value for tensor in inputs],
        [tensor.handle.value for tensor in outputs],
        priority,
        call_site(name),
        how.weight,
    )


@raises_mxnet_errors
def raise_failure() -> None:
    """Raises what the engine has ended with, if an operation has met it, and where it is not initialised."""
    try:
        _core.mxnet_raise_failure()
    except Exception as error:
        report_failure(error)
        raise
    _core.require_initialized()


def averaging(gradient_predivide_factor: float) -> Reduction:
    """An average over the ranks, which divides by the factor before the sum and by what is left after it.

    Raises as `require_predivide_factor`.
    """
    factor = require_predivide_factor(gradient_predivide_factor)
    return Reduction(ReduceOp.Average, 1.0 / factor, factor)


def _begin(_settings: dict[str, str]) -> None:
    _unnamed.clear()
    _core.mxnet_forget_failure()


def _begin_anew(process_set: ProcessSet) -> None:
    """Ranks that had joined have missed what the others have numbered meanwhile."""
    for kind, number in list(_unnamed):
        if number == process_set.process_set_id or process_set is global_process_set:
            del _unnamed[kind, number]


def _finish() -> None:
    """Waits for pending operations, as long as others may need to come. The core fails the rest."""
    deadline = time.monotonic() + _FEW_SECONDS
    while _core.mxnet_pending() and time.monotonic() < deadline:
        time.sleep(0.001)


session.at_init(_begin)
session.at_shutdown(_finish)
after_join(_begin_anew)
