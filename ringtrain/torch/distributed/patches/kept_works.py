"""A Work that DistributedDataParallel gives its reducer is kept by Python.

Replaces `dist.Reducer._set_forward_pass_work_handle`. join(divide_by_initial_world_size=False) gives the reducer a Work
that it waits for during backward(). C++ alone does not keep a class of Python, and would wait for ever without this
patch.

Since PyTorch 2.1, the oldest that ringtrain takes.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch.distributed as dist

_of_reducers: weakref.WeakKeyDictionary[Any, dist.Work] = weakref.WeakKeyDictionary()  # the last one of each


def keep_works() -> None:
    """Replaces the method, for reducers of all backends."""
    kind: Any = dist.Reducer
    give = kind._set_forward_pass_work_handle

    @functools.wraps(give)
    def give_and_keep(reducer: Any, work: dist.Work, *options: Any, **named: Any) -> None:
        _of_reducers[reducer] = work
        give(reducer, work, *options, **named)

    kind._set_forward_pass_work_handle = give_and_keep
