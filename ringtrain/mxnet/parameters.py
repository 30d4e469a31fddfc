"""The same parameters on all ranks, also where their shapes are not known yet.

After Horovod's function of the same name (horovod/mxnet/__init__.py).
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from mxnet import gluon
from mxnet.gluon.parameter import DeferredInitializationError

from ringtrain.mxnet.operations import broadcast_
from ringtrain.process_sets import ProcessSet, global_process_set


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
        TypeError: something in it is no dense NDArray.
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
    """Of one parameter, one for each context."""
    broadcast_(copies[0], root_rank, name=name, process_set=process_set)
    for copy in copies[1:]:
        copies[0].copyto(copy)


def _broadcast_when_initialised(parameter: Any, root_rank: int, name: str, process_set: ProcessSet) -> None:
    initialise = parameter._init_impl

    def initialise_and_broadcast(self: Any, *args: Any, **keywords: Any) -> None:
        initialise(*args, **keywords)
        self._init_impl = initialise  # once: what is initialised again is no parameter of all ranks
        _broadcast_copies(self.list_data(), root_rank, name, process_set)

    parameter._init_impl = types.MethodType(initialise_and_broadcast, parameter)
