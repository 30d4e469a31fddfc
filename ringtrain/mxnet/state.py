"""The same state on all ranks: of an optimizer, and Python objects."""

from __future__ import annotations

from typing import Any, NamedTuple

import mxnet

from ringtrain import objects, ops
from ringtrain.arrays.mxnet import dtype_name
from ringtrain.job import session
from ringtrain.process_sets import ProcessSet, global_process_set


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """As `ringtrain.broadcast_object`, with the arguments of `horovod.mxnet.broadcast_object`."""
    return objects.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """As `ringtrain.allgather_object`, with the arguments of `horovod.mxnet.allgather_object`."""
    return objects.allgather_object(obj, name=name, process_set=process_set)


class _Kind(NamedTuple):
    """What the others have to know of an array before its elements come."""

    dtype: str
    shape: tuple[int, ...]


def broadcast_optimizer_state(
    trainer: Any, root_rank: int = 0, *, process_set: ProcessSet = global_process_set
) -> None:
    """Give the optimizer of every rank what that of one rank remembers, such as momenta and numbers of updates.

    Also where some ranks have nothing yet. Arrays travel as such.

    Args:
        trainer: a gluon.Trainer, or an mx.optimizer.Updater, such as `_updater` of a Module.
        root_rank: the rank of the world that has the right state.
        process_set: the ranks that take part.

    Raises:
        TypeError: neither of these.
    """
    updater = _updater_of(trainer)
    optimizer = updater.optimizer
    counts = optimizer.num_update, dict(optimizer._index_update_count)
    arrays: list[Any] = []
    told = None
    if session.rank() == root_rank:
        told = counts, {index: _described(state, arrays) for index, state in updater.states.items()}
    (num_update, index_counts), described = objects.broadcast_object(told, root_rank, process_set=process_set)
    if session.rank() != root_rank:
        updater.states = {index: _made(one, arrays) for index, one in described.items()}
        updater.states_synced = dict.fromkeys(updater.states, False)
        optimizer.num_update = num_update
        optimizer._index_update_count.clear()
        optimizer._index_update_count.update(index_counts)
    for handle in [ops.broadcast_async_(array, root_rank, process_set=process_set) for array in arrays]:
        handle.wait()


def _updater_of(trainer: Any) -> Any:
    if isinstance(trainer, mxnet.gluon.Trainer):
        return trainer._updaters[0]
    if isinstance(trainer, mxnet.optimizer.Updater):
        return trainer
    raise TypeError(
        f"broadcast_optimizer_state takes a gluon.Trainer or an Updater, not a {type(trainer).__qualname__}"
    )


def _described(state: Any, arrays: list[Any]) -> Any:
    """The state with kinds for its arrays, which are collected in their order."""
    if isinstance(state, mxnet.nd.NDArray):
        arrays.append(state)
        return _Kind(dtype_name(state), state.shape)
    if isinstance(state, (tuple, list)):
        return type(state)(_described(one, arrays) for one in state)
    return state


def _made(described: Any, arrays: list[Any]) -> Any:
    if isinstance(described, _Kind):
        arrays.append(mxnet.nd.zeros(described.shape, dtype=described.dtype))
        return arrays[-1]
    if isinstance(described, (tuple, list)):
        return type(described)(_made(one, arrays) for one in described)
    return described
