"""How the ranks of torch's default group become those of a ringtrain job, and its other groups process sets."""

from __future__ import annotations

import functools
import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import ringtrain._core as _core
from ringtrain import failure
from ringtrain.engine.process_sets import close_among, open_among
from ringtrain.engine.submission import submit_barrier
from ringtrain.errors import RingtrainError, StalledError
from ringtrain.job import elastic_client, launched_by, network, session
from ringtrain.job.host import addresses_of, usual_address
from ringtrain.job.rendezvous.columns import in_columns, of_columns
from ringtrain.job.rendezvous.protocol import MOST_BYTES, Frames, packed
from ringtrain.ops.objects import broadcast_object
from ringtrain.options import table
from ringtrain.torch.distributed.work import is_done_by

SCHEME = "ringtrain"
# How long a rank that leaves waits for the others, which need it to make groups, also those that it does not belong to:
# after destroy_process_group(), and where the script ends without that.
_LONGEST_FAREWELL_S, _FAREWELL_AT_END_S = 300.0, 5.0
_LONGEST_LEAVE_S = 2.0  # where nobody is needed any more
# Of the option stall_shutdown_time_s.
_USUAL_STALL_S, _LONGEST_STALL_S = 600.0, 86_400.0

_WORLD = 0  # the process set of all ranks of the job

_lock = threading.Lock()
_is_world_used = False  # the current job has had a group on the set of all its ranks
_is_ours = False  # the job was joined here, so it ends with the last group
_open_groups = 0
_jobs = itertools.count(1)
_job = 0  # the number of the current one in this process; 0 for none


def current_job() -> int:
    """A number that differs from job to job in this process; 0 outside of one."""
    return _job if _core.is_initialized() else 0


def join_world(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Join the job of these ranks, or use the one that the script has joined. All of them call it together.

    Raises:
        ValueError: the script has joined a job in which this process has another rank.
        StalledError: not all ranks came within the timeout.
    """
    global _is_ours, _job
    if _core.is_initialized():
        place = (session.rank(), session.size())
        if place != (rank, size):
            raise ValueError(
                f"torch says that this is rank {rank} of {size}, but in the job that hvd.init() has joined it is rank "
                f"{place[0]} of {place[1]}; start torch's default group with the same ranks, or leave out hvd.init()"
            )
        if _job == 0:
            _begin_job(is_ours=False)
        return
    if _is_launched_as(rank, size):
        _init(timeout)
        _begin_job(is_ours=True)
    else:
        join_by_store(store, rank, size, timeout)


def join_by_store(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Join the job of these ranks, which meet in the store, whatever has started them. All of them call it together.

    Raises:
        StalledError: not all ranks came within the timeout.
    """
    exchange = functools.partial(_exchange, store, rank, size, timeout, itertools.count(), _generation(store, size))
    with network.met_by(network.Exchanged(rank, size, exchange)):
        _init(timeout)
    _begin_job(is_ours=True)


def ranks_in_job(store: Any, ranks: list[int], rank: int, size: int, timeout: timedelta) -> list[int]:
    """Returns the ranks of a new group, none for the default one, once the job has been joined."""
    if not ranks:
        join_world(store, rank, size, timeout)
        return list(range(size))
    if not current_job():
        if len(ranks) != dist.get_world_size():
            raise ValueError(
                f"new_group: the ranks {ranks} are some of torch's default group, which is none of ringtrain's; call "
                'init_process_group("ringtrain"), or make a ringtrain group of all ranks first'
            )
        join_world(store, rank, size, timeout)
    return ranks


def leave() -> None:
    """Leave the job, if this process is in one. All that is pending fails, also what other ranks wait for.

    Ranks that do not take leave within a moment, since they are stopped, get a RemoteError.
    """
    global _open_groups
    with _lock:
        _open_groups = 0  # so nobody is waited for
    impatient = threading.Timer(_LONGEST_LEAVE_S, _core.give_up, ("its group was reconfigured or aborted", 0.0))
    impatient.start()
    try:
        session.shutdown()
    finally:
        impatient.cancel()
        impatient.join()  # or it would end the next job


def require_own_job() -> None:
    """Raises ValueError where not torch alone says which ranks the job has."""
    if elastic_client.is_elastic():
        raise ValueError("reconfigure: this process belongs to an elastic job, which changes its ranks by itself")
    if _core.is_initialized() and not _is_ours:
        raise ValueError(
            "reconfigure: the script has joined the job with hvd.init(); leave it out, or call hvd.shutdown()"
        )


def _init(timeout: timedelta) -> None:
    """Join the job, in which operations may wait for as long as the timeout, unless the user has set the option."""
    if "stall_shutdown_time_s" in table.set_by_user({}):
        session.init()
    else:
        session.init(stall_shutdown_time_s=min(max(timeout.total_seconds(), _USUAL_STALL_S), _LONGEST_STALL_S))


def _begin_job(is_ours: bool) -> None:
    global _is_world_used, _is_ours, _job, _open_groups
    _is_world_used = False
    _is_ours = is_ours
    _job = next(_jobs)
    _open_groups = 0


def _end_job() -> None:
    global _is_world_used, _is_ours, _job
    if _open_groups > 0:
        _bid_farewell(_FAREWELL_AT_END_S, submits_nothing_more=True)
    _is_world_used = False
    _is_ours = False
    _job = 0


session.at_shutdown(_end_job)


def _is_launched_as(rank: int, size: int) -> bool:
    """Whether a launcher other than torch's has given this process the same place: then its way to meet is used."""
    launch = launched_by.detect()
    if elastic_client.is_elastic():
        return True
    of_torch = (launched_by.Torchrun.NAME, launched_by.ByHand.NAME)
    return launch is not None and launch.launcher not in of_torch and (launch.rank, launch.size) == (rank, size)


def _generation(store: Any, size: int) -> int:
    """Numbers the job of this rank in the store: all ranks of a job arrive before any of the next one."""
    return (int(store.add("ringtrain/arrivals", 1)) - 1) // size


def _exchange(
    store: Any, rank: int, size: int, timeout: timedelta, steps: Iterator[int], generation: int, value: Any
) -> list[Any]:
    """Returns the values of all ranks, by rank. Rank 0 collects them: a key for each pair would be too many."""
    step = f"ringtrain/{generation}/{next(steps)}"
    store.set(f"{step}/{rank}", json.dumps(value))
    end = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        everybody = [json.loads(_get(store, f"{step}/{one}", end, one)) for one in range(size)]
        store.set(f"{step}/all", packed(in_columns(everybody)))
    (told,) = Frames(MOST_BYTES).take(_get(store, f"{step}/all", end, 0))
    return of_columns(told)


def _get(store: Any, key: str, end: float, rank: int) -> bytes:
    try:
        store.wait([key], timedelta(seconds=max(0.001, end - time.monotonic())))
        value: bytes = store.get(key)
    except Exception as error:
        raise StalledError(
            f"init_process_group: rank {rank} did not come within the timeout; has it failed to start? ({error})"
        ) from None
    return value


def open_set(ranks: list[int], timeout: timedelta) -> int:
    """Returns the number of a process set of these ranks, which no other group has or has had.

    The first group of a job that ends with its last group has the set of the job. Members of any other group open one,
    also where they are all ranks: when they close it, operations that some ranks alone have called end with it.

    Raises:
        StalledError: not all members came within the timeout.
    """
    global _is_world_used
    if _is_ours and not elastic_client.is_elastic() and not _is_world_used and ranks == list(range(session.size())):
        _is_world_used = True
        return _WORLD
    handle = open_among(ranks)
    if not is_done_by(handle, time.monotonic() + timeout.total_seconds()):
        raise StalledError(
            f"new_group: the ranks {ranks} did not all make this group within the timeout of "
            f"{timeout.total_seconds():g} s. new_group() is called by all ranks of it, in the same order"
        )
    number: int = handle.number()
    return number


def note_opened() -> None:
    """A group of the current job begins."""
    global _open_groups
    with _lock:
        _open_groups += 1


def note_closed(job: int, number: int, ranks: list[int], timeout_s: float) -> None:
    """A group has ended; with the last one of a job that was joined here, the job. `number`: of its process set."""
    global _open_groups
    if number != _WORLD and job == current_job():
        with suppress(RingtrainError):  # the job has ended
            close_among(number, ranks)
    if job != current_job():
        return
    with _lock:
        _open_groups -= 1
        is_last = _open_groups == 0
    if is_last and _is_ours and not elastic_client.is_elastic():
        _bid_farewell(min(timeout_s, _LONGEST_FAREWELL_S))
        session.shutdown()


def _bid_farewell(longest_s: float, submits_nothing_more: bool = False) -> None:
    """Wait until the other ranks leave the job, too. `submits_nothing_more`: what needs this rank fails on the others.

    Nothing is waited for where this rank leaves with an exception, or in a job that goes on without the group.
    """
    if not _is_ours or elastic_client.is_elastic() or failure.last_words():
        return
    with suppress(RingtrainError):  # the job has ended
        all_leave = submit_barrier("<destroy_process_group>")
        if submits_nothing_more:
            submit_barrier("<end>")
        is_done_by(all_leave, time.monotonic() + longest_s)


def rendezvous(url: str, timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[tuple[Any, int, int]]:
    """For init_method="ringtrain://": the ranks are those that mpirun, srun or ringrun has started."""
    if not _core.is_initialized():
        _init(timeout)
        _begin_job(is_ours=True)
    elif _job == 0:
        _begin_job(is_ours=False)
    rank, size = session.rank(), session.size()
    here = (addresses_of(session.settings()["socket_interfaces"]) or [usual_address()])[0]
    if size == 1:
        yield dist.HashStore(), 0, 1
        return
    store = None
    if rank == 0:
        store = dist.TCPStore(here, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    host, port = broadcast_object((here, store.port) if store is not None else None, 0)
    if store is None:
        store = dist.TCPStore(host, port, size, is_master=False, timeout=timeout, wait_for_workers=False)
    yield store, rank, size


def place(ranks: list[int], rank: int) -> int:
    """The rank of the job that has this rank in a group. Raises ValueError where there is none."""
    if not 0 <= rank < len(ranks):
        raise ValueError(f"the group has no rank {rank}: it has ranks 0 to {len(ranks) - 1}")
    return ranks[rank]
