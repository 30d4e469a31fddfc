"""monitored_barrier() for groups of ringtrain.

Replaces `torch.distributed.monitored_barrier`, which torch itself has for gloo alone: without this patch it raises a
ValueError for any other group.

Since PyTorch 2.1, the oldest that ringtrain takes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ringtrain.torch.distributed.group import ProcessGroup

_barrier_of_torch = distributed_c10d.monitored_barrier


def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """`torch.distributed.monitored_barrier`, for groups of ringtrain and of gloo.

    Args:
        group: by default that of all ranks.
        timeout: by default that of the group.
        wait_all_ranks: the error names every rank that is missing, not the first one alone.

    Raises:
        StalledError: ranks did not come within the timeout.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    group = group or distributed_c10d._get_default_group()
    if isinstance(group, ProcessGroup):
        if isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        group.monitored_barrier(timeout, wait_all_ranks)
    else:
        _barrier_of_torch(group, timeout, wait_all_ranks)


def take_groups_of_ringtrain() -> None:
    """Replaces the function in both modules that have it."""
    modules: list[Any] = [distributed_c10d, dist]
    for module in modules:
        module.monitored_barrier = monitored_barrier
