"""torch.distributed on ringtrain's engine: import this and ask for the backend "ringtrain".

import ringtrain.torch.distributed
torch.distributed.init_process_group("ringtrain")

All that torch builds on process groups runs unchanged: DistributedDataParallel, fully_shard, DTensor, checkpoints. See
docs/torch-distributed.md.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from ringtrain.torch.compiled import keep_out_of_graphs
from ringtrain.torch.distributed import meeting, patches
from ringtrain.torch.distributed.backend import DEVICES, HAS_HOOKS, Backend as Backend
from ringtrain.torch.distributed.group import ProcessGroup as ProcessGroup
from ringtrain.torch.distributed.patches.gloo import InPlaceOfGloo, replace_gloo as replace_gloo
from ringtrain.torch.distributed.patches.monitored_barrier import monitored_barrier as monitored_barrier
from ringtrain.torch.distributed.reconfigure import ReconfigurableGroup
from ringtrain.torch.distributed.transfers import AnySource, Transfer
from ringtrain.torch.distributed.work import Work as Work

_BACKEND = "ringtrain"

__all__ = ["Backend", "ProcessGroup", "Work", "monitored_barrier", "replace_gloo"]


def _create(options: Any, _: Any = None) -> Any:
    """Called by torch in the ranks of a new group. Returns a Backend where torch has another one for other devices."""
    store, rank, timeout = options.store, options.group_rank, options.timeout
    if getattr(options, "enable_reconfigure", False):
        return ReconfigurableGroup(store, rank, options.group_size, timeout, options.group_id)
    ranks = meeting.ranks_in_job(store, list(options.global_ranks_in_group), rank, options.group_size, timeout)
    group: Any = ProcessGroup(store, ranks, rank, timeout, options.group_id)
    return group.get_backend("cpu") if HAS_HOOKS and _are_devices_divided() else group


def _are_devices_divided() -> bool:
    """Whether torch, which calls _create(), was asked for several backends, as in "cpu:ringtrain,cuda:nccl"."""
    frame: FrameType | None = sys._getframe(2)
    config = frame.f_locals.get("backend_config") if frame is not None else None
    return config is not None and len(set(config.get_device_backend_map().values())) > 1


def _register() -> None:
    keep_out_of_graphs(ProcessGroup, InPlaceOfGloo, Work, Transfer, AnySource)
    patches.apply()
    if _BACKEND not in dist.Backend.backend_list:
        register_rendezvous_handler(meeting.SCHEME, meeting.rendezvous)
    dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=DEVICES)


_register()
