"""Which store a name makes."""

from __future__ import annotations

from typing import Any

from ringtrain.job import session
from ringtrain.kvstore.base import KVStoreBase
from ringtrain.kvstore.collective import CollectiveStore
from ringtrain.kvstore.kinds import KINDS
from ringtrain.kvstore.local import LocalStore
from ringtrain.process_sets import ProcessSet, global_process_set

_OF_SERVERS = ("dist_async", "dist_async_device", "dist_device_async")


def create(name: str = "local", *, average: bool = False, process_set: ProcessSet = global_process_set) -> Any:
    """Make a store. Mirrors `mxnet.kvstore.create`.

    Args:
        name: its type, in letters of any size. local, local_update_cpu and local_allreduce_cpu add up the values of one
            process in the host's memory; device, local_allreduce_device and nccl where they lie. dist and dist_sync add
            up those of all workers in the host's memory, dist_sync_device and dist_device_sync where they lie; horovod
            and ringtrain do, too, and update nothing. Or the name of a class that is registered.
        average: of horovod and ringtrain: whether sums are divided by the number of workers.
        process_set: of distributed stores: the ranks that are its workers.

    Returns:
        A KVStore; of a class that is registered, what that makes of no arguments. A distributed one calls
        `ringtrain.init()` if nobody has. All workers make their distributed stores in the same order.

    Raises:
        ValueError: an unknown name, one that needs servers, or an argument that this type does not take.
        TypeError: the name is no str.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a store is a str, not {name!r}")
    name = name.lower()
    if name in KVStoreBase.kv_registry:
        return KVStoreBase.kv_registry[name]()
    if name in _OF_SERVERS:
        raise ValueError(f'a "{name}" store needs servers, which ringtrain does not have; use "dist_sync"')
    kind = KINDS.get(name)
    if kind is None:
        known = ", ".join([*KINDS, *KVStoreBase.kv_registry])
        raise ValueError(f'there is no type "{name}" of store; there are {known}')
    if average and kind.can_update:
        raise ValueError(f'a "{name}" store adds up; average=True is for "horovod" and "ringtrain"')
    if not kind.is_distributed:
        if process_set is not global_process_set:
            raise ValueError(f'a "{name}" store has one worker; a process set is for the distributed ones')
        return LocalStore(kind)
    if not session.is_initialized():
        session.init()
    return CollectiveStore(kind, process_set, average)
