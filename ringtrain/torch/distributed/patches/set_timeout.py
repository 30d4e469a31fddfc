"""_set_pg_timeout() for groups of ringtrain.

Replaces `torch.distributed.distributed_c10d._set_pg_timeout`, which torch itself has for gloo and NCCL alone: without
this patch it warns, and the group keeps its timeout.

Since PyTorch 2.3, which has that function.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from ringtrain.torch.distributed.group import ProcessGroup


def take_groups_of_ringtrain() -> None:
    """Replaces the function."""
    module: Any = distributed_c10d
    set_of_torch = module._set_pg_timeout

    @functools.wraps(set_of_torch)
    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        chosen = distributed_c10d._get_default_group() if group is None else group
        if isinstance(chosen, ProcessGroup):
            chosen.set_timeout(timeout)
        else:
            set_of_torch(timeout, group)

    module._set_pg_timeout = set_timeout
