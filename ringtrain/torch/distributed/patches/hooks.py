"""Hooks of torch that attach themselves in C++: FlightRecorderHook and NanCheckHook.

Replaces their `attach()`. Without this patch they attach themselves to a group of ringtrain, whose operations do not
go by torch's hooks until it is told of one (ringtrain/torch/distributed/backend.py), and see nothing.

Since PyTorch 2.14, which has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._C import _distributed_c10d as c10d

from ringtrain.torch.distributed.backend import Hookable


def attach_to_groups() -> None:
    """Has the hooks attach themselves where operations of a group of ringtrain go by."""
    module: Any = c10d
    for kind in (module.FlightRecorderHook, module.NanCheckHook):
        kind.attach = staticmethod(_attaching(kind.attach))


def _attaching(attach: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(attach)
    def attach_to(pg: Any) -> Any:
        return attach(pg.with_hooks() if isinstance(pg, Hookable) else pg)

    return attach_to
