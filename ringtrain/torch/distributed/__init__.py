"""torch.distributed on ringtrain's engine: import this and ask for the backend "ringtrain".

import ringtrain.torch.distributed
torch.distributed.init_process_group("ringtrain")

All that torch builds on process groups runs unchanged: DistributedDataParallel, fully_shard, DTensor, checkpoints. See
docs/torch-distributed.md.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import register_rendezvous_handler

from ringtrain.torch.compiled import keep_out_of_graphs
from ringtrain.torch.distributed import backward, bucket_memory, builtin_hooks, meeting
from ringtrain.torch.distributed.backend import DEVICES, HAS_HOOKS, Backend as Backend
from ringtrain.torch.distributed.group import ProcessGroup as ProcessGroup
from ringtrain.torch.distributed.reconfigure import ReconfigurableGroup
from ringtrain.torch.distributed.transfers import AnySource, Transfer
from ringtrain.torch.distributed.work import Work as Work, keep_for_reducers

_BACKEND = "ringtrain"
_torch: Any = distributed_c10d  # some of its names are given other values
_AS_GLOO_VARIABLE = "RINGTRAIN_AS_GLOO"

__all__ = ["Backend", "ProcessGroup", "Work", "monitored_barrier", "replace_gloo"]


def _create(options: Any, _: Any = None) -> Any:
    """Called by torch in the ranks of a new group. Returns a Backend where torch has another one for other devices."""
    store, rank, timeout = options.store, options.group_rank, options.timeout
    if getattr(options, "enable_reconfigure", False):
        return ReconfigurableGroup(store, rank, options.group_size, timeout, options.group_id)
    ranks = _ranks_in_job(store, list(options.global_ranks_in_group), rank, options.group_size, timeout)
    group: Any = ProcessGroup(store, ranks, rank, timeout, options.group_id)
    return group.get_backend("cpu") if HAS_HOOKS and _are_devices_divided() else group


def _are_devices_divided() -> bool:
    """Whether torch, which calls _create(), was asked for several backends, as in "cpu:ringtrain,cuda:nccl"."""
    frame: FrameType | None = sys._getframe(2)
    config = frame.f_locals.get("backend_config") if frame is not None else None
    return config is not None and len(set(config.get_device_backend_map().values())) > 1


def _ranks_in_job(store: Any, ranks: list[int], rank: int, size: int, timeout: timedelta) -> list[int]:
    """Returns the ranks of a new group, none for the default one, once the job has been joined."""
    if not ranks:
        meeting.join_world(store, rank, size, timeout)
        return list(range(size))
    if not meeting.current_job():
        if len(ranks) != dist.get_world_size():
            raise ValueError(
                f"new_group: the ranks {ranks} are some of torch's default group, which is none of ringtrain's; call "
                'init_process_group("ringtrain"), or make a ringtrain group of all ranks first'
            )
        meeting.join_world(store, rank, size, timeout)
    return ranks


def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """`torch.distributed.monitored_barrier`, which torch itself has for gloo alone.

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


def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
    """`torch.distributed.distributed_c10d._set_pg_timeout`, which torch itself has for gloo and NCCL alone."""
    chosen = distributed_c10d._get_default_group() if group is None else group
    if isinstance(chosen, ProcessGroup):
        chosen.set_timeout(timeout)
    else:
        _set_timeout_of_torch(timeout, group)


class _InPlaceOfGloo(ProcessGroup):
    """Made where torch makes a group of gloo, which is told its ranks and its name after that."""

    event_prefix = "gloo"

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False) -> None:
        if enable_reconfigure:
            raise ValueError('enable_reconfigure=True: ask for the backend "ringtrain" instead of "gloo"')
        self._begin(store, list(range(size)), rank, timeout, "")
        self.options.global_ranks_in_group = []

    def _set_sequence_number_for_group(self) -> None:
        """The last that torch calls before it uses the group."""
        ranks = list(self.options.global_ranks_in_group)
        self._name_it(self.options.group_name)
        ranks = _ranks_in_job(self._store, ranks, self._rank, self._size, self.options._timeout)
        self._open(self._store, ranks, self._rank)


def replace_gloo() -> None:
    """Have torch make groups of ringtrain wherever a program asks for "gloo".

    For programs that insist on that name; `get_backend()` goes on saying "gloo". To be called before
    init_process_group(). With the environment variable RINGTRAIN_AS_GLOO=1 the import of this module does it.
    """
    _torch.ProcessGroupGloo = _InPlaceOfGloo


def _register() -> None:
    keep_out_of_graphs(ProcessGroup, _InPlaceOfGloo, Work, Transfer, AnySource)
    backward.restore_classes()
    keep_for_reducers()
    builtin_hooks.take_hooks_of_python()
    bucket_memory.share_buckets()
    if _BACKEND not in dist.Backend.backend_list:
        register_rendezvous_handler(meeting.SCHEME, meeting.rendezvous)
    dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=DEVICES)
    _torch.monitored_barrier = dist.monitored_barrier = monitored_barrier
    _torch._set_pg_timeout = _set_pg_timeout
    if os.environ.get(_AS_GLOO_VARIABLE, "0") not in ("", "0"):
        replace_gloo()


_barrier_of_torch = distributed_c10d.monitored_barrier
_set_timeout_of_torch = distributed_c10d._set_pg_timeout
_register()
