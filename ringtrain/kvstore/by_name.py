"""Which store a name makes."""

from __future__ import annotations

from typing import Any

from ringtrain.job import session
from ringtrain.kvstore.base import KVStoreBase
from ringtrain.kvstore.collective import CollectiveStore
from ringtrain.kvstore.entries import KINDS
from ringtrain.kvstore.local import LocalStore
from ringtrain.kvstore.served import ServedStore
from ringtrain.kvstore.servers.server_ranks import has_plan
from ringtrain.kvstore.servers.worker import is_worker_by_environment, worker_by_environment, worker_of
from ringtrain.process_sets import ProcessSet, global_process_set


def create(
    name: str = "local",
    *,
    average: bool = False,
    process_set: ProcessSet = global_process_set,
    max_staleness: int | None = None,
    elastic: bool = False,
    atomic: bool = False,
) -> Any:
    """Make a store. Mirrors `mxnet.kvstore.create`.

    Args:
        name: its type, in letters of any size. local, local_update_cpu and local_allreduce_cpu add up the values of one
            process in the host's memory; device, local_allreduce_device and nccl where they lie. dist and dist_sync add
            up those of all workers in the host's memory, dist_sync_device and dist_device_sync where they lie; horovod
            and ringtrain do, too, and update nothing. dist_async and dist_async_device update with each worker's push
            at once, on servers. Or the name of a class that is registered.
        average: of horovod and ringtrain: whether sums are divided by the number of workers.
        process_set: of distributed stores: the ranks that are its workers.
        max_staleness: of asynchronous stores: a pull waits while the slowest worker is that many pushes of the key
            behind this one; 0 keeps all in step, None never waits.
        elastic: of asynchronous stores: workers may come and go, and `num_workers` is how many there are.
        atomic: of asynchronous stores: a push to a key is applied as a whole or, if its worker dies, not at all, and a
            pull reads a key as a whole. Such a key is on one server and has at most 256 MiB.

    Returns:
        A KVStore; of a class that is registered, what that makes of no arguments. A distributed one calls
        `ringtrain.init()` if nobody has. All workers make their distributed stores in the same order.

    Raises:
        ValueError: an unknown name, or an argument that this type does not take.
        StalledError: of stores with servers: not all processes of the job came in time.
        PeerLostError: of stores with servers: the scheduler or a server is gone.
        TypeError: the name is no str.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a store is a str, not {name!r}")
    name = name.lower()
    if name in KVStoreBase.kv_registry:
        return KVStoreBase.kv_registry[name]()
    kind = KINDS.get(name)
    if kind is None:
        known = ", ".join([*KINDS, *KVStoreBase.kv_registry])
        raise ValueError(f'there is no type "{name}" of store; there are {known}')
    if average and kind.can_update:
        raise ValueError(f'a "{name}" store adds up; average=True is for "horovod" and "ringtrain"')
    if not kind.is_asynchronous and (max_staleness is not None or elastic or atomic):
        raise ValueError(f'max_staleness, elastic and atomic are for "dist_async" stores, not for a "{name}" one')
    if max_staleness is not None and max_staleness < 0:
        raise ValueError(f"max_staleness is a number of pushes from 0 on, or None, not {max_staleness}")
    if not kind.is_distributed:
        if process_set is not global_process_set:
            raise ValueError(f'a "{name}" store has one worker; a process set is for the distributed ones')
        return LocalStore(kind)
    if kind.can_update and process_set is global_process_set and is_worker_by_environment():
        return ServedStore(kind, worker_by_environment(), max_staleness, elastic, atomic)
    if not session.is_initialized():
        session.init()
    has_servers = process_set is global_process_set and has_plan()
    if kind.is_asynchronous or (kind.can_update and has_servers):
        return ServedStore(kind, worker_of(process_set), max_staleness, elastic, atomic)
    return CollectiveStore(kind, process_set, average)
