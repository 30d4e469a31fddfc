"""The types of stores."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """What the name of a type says."""

    name: str
    is_distributed: bool = False
    on_device: bool = False  # sums are made, and values kept, where the arrays lie
    can_update: bool = True
    updates_by_default: bool = True  # what trainers do unless they are told
    is_asynchronous: bool = False  # each push is an update of its own


KINDS = {
    kind.name: kind
    for kind in (
        Kind("local"),
        Kind("local_update_cpu"),
        Kind("local_allreduce_cpu", updates_by_default=False),
        Kind("device", on_device=True),
        Kind("local_allreduce_device", on_device=True),
        Kind("nccl", on_device=True),
        Kind("dist", is_distributed=True),
        Kind("dist_sync", is_distributed=True),
        Kind("dist_sync_device", is_distributed=True, on_device=True),
        Kind("dist_device_sync", is_distributed=True, on_device=True),
        Kind("dist_async", is_distributed=True, is_asynchronous=True),
        Kind("dist_async_device", is_distributed=True, on_device=True, is_asynchronous=True),
        Kind("dist_device_async", is_distributed=True, on_device=True, is_asynchronous=True),
        Kind("horovod", is_distributed=True, on_device=True, can_update=False),
        Kind("ringtrain", is_distributed=True, on_device=True, can_update=False),
    )
}
