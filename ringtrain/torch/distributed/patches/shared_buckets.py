"""Buckets of DistributedDataParallel in memory that the ranks of a node share, where an all_reduce copies nothing.

Replaces `DistributedDataParallel._ddp_init_helper` and `dist.Reducer._rebuild_buckets`, in which torch's Reducer
allocates the buckets with `at::empty`: in its constructor, and once more when it has seen in which order the gradients
are ready. Without this patch each all_reduce copies. Ranks may differ in where their buckets are: then the all_reduce
copies on all of them.

Since PyTorch 2.1, the oldest that ringtrain takes.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import ringtrain._core as _core
from ringtrain.errors import RingtrainError
from ringtrain.job import session
from ringtrain.torch.distributed.group import ProcessGroup
from ringtrain.torch.distributed.views import Tensor

_LEAST_BYTES = 64 << 10  # smaller buckets are reduced as fast elsewhere
_FOLDER = "/dev/shm"
_reducers: weakref.WeakSet[Any] = weakref.WeakSet()  # that will allocate their buckets once more


class _InSharedMemory(TorchDispatchMode):
    """Within `with` the buckets that a Reducer allocates in host memory are in memory that ranks share."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        options = options or {}
        shared = None
        if function is torch.ops.aten.empty.memory_format and _is_bucket(*args, **options):
            shared = _allocate(args[0][0], options["dtype"])
        return function(*args, **options) if shared is None else shared


def _is_bucket(shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> bool:
    """Returns whether it is a large bucket of gradients in host memory, and not what a Reducer counts in."""
    is_on_host = device is None or device.type == "cpu"
    is_of_gradients = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
    return is_on_host and is_of_gradients and len(shape) == 1 and shape[0] * dtype.itemsize >= _LEAST_BYTES


def _allocate(count: int, dtype: torch.dtype) -> Tensor | None:
    """Returns None where the ranks of the job do not all share memory, or too little is free."""
    try:
        is_one_node = session.local_size() == session.size()
        if not is_one_node or not _has_room(count * dtype.itemsize * session.size()):
            return None
        memory = _core.empty_bytes(count * dtype.itemsize)
    except RingtrainError:  # the job has ended, or another process was faster
        return None
    return None if memory is None else torch.from_numpy(memory).view(dtype)


def _has_room(bytes_: int) -> bool:
    """Returns whether half of the file system is left then for others, such as the workers of a DataLoader."""
    try:
        room = os.statvfs(_FOLDER)
    except OSError:
        return False
    return (room.f_bavail - room.f_blocks // 2) * room.f_frsize >= bytes_


def share_buckets() -> None:
    """Replaces the two methods, for modules whose group is one of ringtrain's."""
    module: Any = DistributedDataParallel
    reducer: Any = dist.Reducer
    make, rebuild = module._ddp_init_helper, reducer._rebuild_buckets

    @functools.wraps(make)
    def make_shared(self: Any, *arguments: Any, **options: Any) -> None:
        if not isinstance(self.process_group, ProcessGroup):
            make(self, *arguments, **options)
            return
        with _InSharedMemory():
            make(self, *arguments, **options)
        _reducers.add(self.reducer)

    @functools.wraps(rebuild)
    def rebuild_shared(self: Any) -> bool:
        if self not in _reducers:
            return bool(rebuild(self))
        with _InSharedMemory():
            is_rebuilt = bool(rebuild(self))
        if is_rebuilt:
            _reducers.discard(self)
        return is_rebuilt

    module._ddp_init_helper = make_shared
    reducer._rebuild_buckets = rebuild_shared
