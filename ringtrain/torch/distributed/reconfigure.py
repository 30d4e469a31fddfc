"""A default group whose ranks change: `init_process_group("ringtrain", enable_reconfigure=True)`, from torch 2.14 on.

Each reconfigure() makes a job of the processes whose handles it is given, over sockets. They meet at the process of the
first handle, in a store of torch's.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringtrain.errors import MismatchError, RingtrainError, ShutDownError, StalledError
from ringtrain.job.host import addresses_of, usual_address
from ringtrain.options import table
from ringtrain.torch.distributed import meeting
from ringtrain.torch.distributed.group import ProcessGroup
from ringtrain.torch.distributed.views import seconds_of
from ringtrain.torch.distributed.work import Work

_SCHEME = "ringtrain"


class ReconfigurableGroup(ProcessGroup):
    """It has ranks from its first reconfigure() on; an operation before that raises ShutDownError.

    Args:
        store: torch's, for the group alone.
        rank: that torch has given this process.
        size: the number of processes then.
        timeout: of each operation, and of a reconfigure() without one of its own.
        name: of the group.
    """

    supports_reconfigure = True

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, name: str) -> None:
        self._begin(store, list(range(size)), rank, timeout, name)
        self._used: set[int] = set()  # uuids
        host = (addresses_of(table.resolve({})["socket_interfaces"]) or [usual_address()])[0]
        self._meeting_place = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._handle = f"{_SCHEME}:{secrets.token_hex(8)}:{self._meeting_place.port}:{host}"

    def get_reconfigure_handle(self) -> str:
        """Returns what stands for this process in reconfigure(), as long as the group lives."""
        return self._handle

    def reconfigure(self, opts: Any) -> Work:
        """Leave the job that this group had, and make one of the processes with these handles. They call it together.

        Operations that are pending then fail with a ShutDownError, also on ranks that are left out. Until all have come
        with the same handles nothing ends: after an error the group is as before, and another call may follow.

        Args:
            opts: torch's. `uuid`: another one in each call. `handles`: in a list the ranks are in its order, in a set
                in an order that all find. `timeout`: by default that of the group.

        Raises:
            ValueError: a handle that is none or comes twice; this process is not among them; the script has joined the
                job with hvd.init().
            RuntimeError: the uuid was used before.
            MismatchError: other processes were given other handles, or another order.
            StalledError: not all came within the timeout.
        """
        given = opts.handles
        handles = sorted(given) if isinstance(given, (set, frozenset)) else list(given)
        place = self._place_in(handles)
        meeting.require_own_job()
        if opts.uuid in self._used:
            raise RuntimeError(f"reconfigure: uuid {opts.uuid} was already used; each call needs another one")
        self._used.add(opts.uuid)
        timeout = opts.timeout if opts.timeout is not None and seconds_of(opts.timeout) > 0 else self.options._timeout
        store = self._meet(handles, place, opts.uuid, timeout)
        self._is_open = False
        meeting.leave()
        meeting.join_by_store(store, place, len(handles), timeout)
        self._open(store, list(range(len(handles))), place)
        return Work.done([])

    def _place_in(self, handles: list[str]) -> int:
        for handle in handles:
            if len(handle.split(":", 3)) != 4 or not handle.startswith(f"{_SCHEME}:"):
                raise ValueError(f"reconfigure: {handle!r} is no handle of a group of ringtrain")
        if len(set(handles)) != len(handles):
            raise ValueError(f"reconfigure: {next(one for one in handles if handles.count(one) > 1)} comes twice")
        if self._handle not in handles:
            raise ValueError("reconfigure: the handle of this process is not among those that it was given")
        return handles.index(self._handle)

    def _meet(self, handles: list[str], place: int, uuid: int, timeout: timedelta) -> Any:
        """Returns a store of these processes alone, when all have come to it with the same handles."""
        _, _, port, host = handles[0].split(":", 3)
        digest = hashlib.sha256("\n".join(handles).encode()).hexdigest()
        found: Any = self._meeting_place
        awaited, end = 0, time.monotonic() + timeout.total_seconds()
        try:
            if place != 0:
                found = dist.TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False)
            store = dist.PrefixStore(f"{_SCHEME}/{uuid}", found)
            store.set(self._handle, digest)
            for rank, handle in enumerate(handles):
                awaited = rank
                store.wait([handle], timedelta(seconds=max(0.001, end - time.monotonic())))
            told = [store.get(handle).decode() for handle in handles]
        except dist.DistError as error:
            raise StalledError(
                f"reconfigure {uuid}: rank {awaited} did not come within the timeout of {timeout.total_seconds():g} s; "
                f"were all processes given the same handles? ({str(error).splitlines()[0]})"
            ) from None
        others = [rank for rank, one in enumerate(told) if one != digest]
        if others:
            raise MismatchError(f"reconfigure {uuid}: rank {others[0]} was given other handles, or another order")
        return store

    def _require_open(self, kind: str) -> None:
        if not self._used:
            raise ShutDownError(f"{kind} of {self._title}: the group has no ranks yet; call reconfigure() first")
        super()._require_open(kind)

    def abort(self) -> None:
        """Ends all that is pending, after the hooks for that. Another reconfigure() may follow."""
        self._call_abort_hooks()
        self._is_open = False
        with suppress(RingtrainError):
            meeting.leave()
