"""The names of `ringtrain.torch` in Horovod's module, `horovod.torch.mpi_ops`, such as `Sum`.

The operations of `ringtrain.torch` are differentiable themselves; the objects are for code that calls `apply` of those
that make them so in Horovod, with its arguments in its order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ringtrain.torch import ops


class _Function:
    """An operation with `apply`, whose arguments are those named; all tensors of a group come after them."""

    def __init__(self, operation: Callable[..., Any], names: str, is_grouped: bool = False):
        self._operation = operation
        self._names = names.split()
        self._is_grouped = is_grouped

    def apply(self, *arguments: Any) -> Any:
        if not self._is_grouped:
            return self._operation(**dict(zip(self._names, arguments, strict=True)))
        count = len(self._names)
        settings = dict(zip(self._names, arguments[:count], strict=True))
        return tuple(self._operation(arguments[count:], **settings))


_REDUCTION = "average name op prescale_factor postscale_factor process_set"
HorovodAllreduce = _Function(ops.allreduce, f"tensor {_REDUCTION}")
HorovodGroupedAllreduce = _Function(ops.grouped_allreduce, _REDUCTION, is_grouped=True)
HorovodAllgather = _Function(ops.allgather, "tensor name process_set")
HorovodGroupedAllgather = _Function(ops.grouped_allgather, "name process_set", is_grouped=True)
HorovodBroadcast = _Function(ops.broadcast, "tensor root_rank name process_set")
HorovodAlltoall = _Function(ops.alltoall, "tensor splits name process_set")
_SCATTER = "name op process_set prescale_factor postscale_factor"
HorovodReducescatter = _Function(ops.reducescatter, f"tensor {_SCATTER}")
HorovodGroupedReducescatter = _Function(ops.grouped_reducescatter, _SCATTER, is_grouped=True)


def __getattr__(name: str) -> Any:
    package = importlib.import_module("ringtrain.torch")
    if name == "__all__" or name in package.__all__:
        return getattr(package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
