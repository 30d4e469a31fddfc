"""The same parameters, optimizer state and Python objects on all ranks; parameters also before their shapes are known.

After Horovod's function of the same name (horovod/mxnet/__init__.py).
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import mxnet
from mxnet import gluon
from mxnet.gluon.parameter import DeferredInitializationError

from ringtrain import ops
from ringtrain.arrays.mxnet import dtype_name
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.job import session
from ringtrain.mxnet.operations import broadcast_
from ringtrain.ops import objects


def broadcast_parameters(
    params: Any, root_rank: int = 0, prefix: str | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite the parameters of every rank with those of one rank. Mirrors `horovod.mxnet.broadcast_parameters`.

    A parameter whose shape is not known yet is overwritten when its first batch has told it, which may be at another
    time on each rank.

    Args:
        params: `Block.collect_params()`, or a dict of parameters or NDArrays, such as each of `Module.get_params()`,
            which `Module.set_params` takes back.
        root_rank: the rank of the world that has the right values.
        prefix: put before all names: two calls at the same time need two of them.
        process_set: the ranks that take part.

    Raises:
        ValueError: params is neither; root_rank is not in the process set.
        TypeError: something in it is not a dense NDArray.
    """
    if not isinstance(params, (Mapping, gluon.ParameterDict)):
        raise ValueError(f"broadcast_parameters takes a dict or a ParameterDict, not a {type(params).__qualname__}")
    for key, value in sorted(params.items()):
        name = f"{prefix or 'parameters.'}{key}"
        if not isinstance(value, gluon.Parameter):
            broadcast_(value, root_rank, name=name, process_set=process_set)
            continue
        try:
            copies = value.list_data()
        except DeferredInitializationError:
            _broadcast_when_initialised(value, root_rank, name, process_set)
            continue
        _broadcast_copies(copies, root_rank, name, process_set)


def _broadcast_copies(copies: list[Any], root_rank: int, name: str, process_set: ProcessSet) -> None:
    """Broadcasts the copies of one parameter, one for each context."""
    broadcast_(copies[0], root_rank, name=name, process_set=process_set)
    for copy in copies[1:]:
        copies[0].copyto(copy)


def _broadcast_when_initialised(parameter: Any, root_rank: int, name: str, process_set: ProcessSet) -> None:
    initialise = parameter._init_impl

    def initialise_and_broadcast(self: Any, *args: Any, **keywords: Any) -> None:
        initialise(*args, **keywords)
        self._init_impl = initialise  # once: what is initialised again is not a parameter of all ranks
        _broadcast_copies(self.list_data(), root_rank, name, process_set)

    parameter._init_impl = types.MethodType(initialise_and_broadcast, parameter)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """As `ringtrain.broadcast_object`, with the arguments of `horovod.mxnet.broadcast_object`."""
    return objects.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """As `ringtrain.allgather_object`, with the arguments of `horovod.mxnet.allgather_object`."""
    return objects.allgather_object(obj, name=name, process_set=process_set)


class _Kind(NamedTuple):
    """The description of an array that the others need before its elements come."""

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
