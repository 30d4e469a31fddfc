"""Groups that a group makes of its ranks, or of its own and others: torch's split_group() and merge_remote_group()."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ringtrain.errors import StalledError
from ringtrain.job import session
from ringtrain.torch.distributed import meeting


class Splittable:
    """Methods of a group by which another one comes. As with gloo, the script destroys what these return itself."""

    supports_splitting = True
    options: Any
    _ranks: list[int]
    _rank: int

    def _require_open(self, kind: str) -> None:
        raise NotImplementedError

    def get_group_store(self) -> Any:
        raise NotImplementedError

    def _another(self, store: Any, ranks: list[int], rank: int, timeout: timedelta, name: str, desc: str) -> Any:
        """Returns a group of these ranks of the job, in this order."""
        raise NotImplementedError

    _splits = 0

    def comm_split_count(self) -> int:
        """Returns how many groups split_group() has made of this one."""
        return self._splits

    def perform_nocolor_split(self, device: Any) -> None:
        """The ranks outside of a new group take no part."""

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Any:
        """Return a group of some ranks of this one, in this order; None on ranks that are not among them.

        Args:
            new_ranks: of this group. They call it together; others may.
            timeout: of each operation, and of this call. By default that of this group.
            opts: not used.
            group_name: the same on all of them.
            device_types: not used: a group takes tensors on all devices that this one takes.

        Raises:
            ShutDownError: after destroy_process_group().
            ValueError: a rank comes twice, or this group does not have it.
            StalledError: not all of them came within the timeout.
        """
        self._require_open("split_group")
        if len(set(new_ranks)) != len(new_ranks):
            raise ValueError(f"split_group: a rank comes twice among {list(new_ranks)}")
        ranks = [meeting.place(self._ranks, rank) for rank in new_ranks]
        if self._rank not in new_ranks:
            return None
        self._splits += 1
        name = group_name or f"split of {','.join(map(str, ranks))}"
        store = dist.PrefixStore(f"{name}/", self.get_group_store())
        rank = list(new_ranks).index(self._rank)
        return self._another(store, ranks, rank, timeout or self.options._timeout, name, group_desc or "")

    def merge_remote_group(
        self,
        store: Any,
        size: int,
        timeout: timedelta,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> Any:
        """Return a group of all ranks that call this with one store, such as those of two groups.

        They are numbered as they come. All belong to one job; `reconfigure` makes a job of several.

        Args:
            store: torch's, that all of them reach and nothing else has used.
            size: how many they are.
            timeout: of each operation, and of this call.
            group_name: the same on all of them.

        Raises:
            ShutDownError: after destroy_process_group().
            ValueError: some are of another job, or more came than `size`.
            StalledError: not all of them came within the timeout.
        """
        self._require_open("merge_remote_group")
        job = session.token()
        place = int(store.add("ringtrain/merged", 1)) - 1
        if place >= size:
            raise ValueError(f"merge_remote_group: {size} ranks have come already; each call needs a store of its own")
        store.set(f"ringtrain/merged/{place}", json.dumps([job, self._ranks[self._rank]]))
        end, ranks = time.monotonic() + timeout.total_seconds(), []
        for other in range(size):
            try:
                store.wait([f"ringtrain/merged/{other}"], timedelta(seconds=max(0.001, end - time.monotonic())))
            except RuntimeError:  # of another class from store to store
                raise StalledError(f"merge_remote_group: {other} of {size} ranks came within the timeout") from None
            of_job, rank = json.loads(store.get(f"ringtrain/merged/{other}"))
            if of_job != job:
                raise ValueError("merge_remote_group: the ranks are of several jobs; reconfigure() makes one of them")
            ranks.append(rank)
        return self._another(store, ranks, place, timeout, group_name or "merged", group_desc or "")
