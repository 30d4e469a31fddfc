"""Groups of ringtrain wherever a program asks for "gloo", where a script or RINGTRAIN_AS_GLOO=1 asks for that.

Replaces `torch.distributed.distributed_c10d.ProcessGroupGloo`. Without this patch programs that insist on the name
"gloo" get groups of gloo.

Since PyTorch 2.1, the oldest that ringtrain takes. Before 2.8 torch does not tell such a group which ranks it has, so
it has to have all of them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d

from ringtrain.runner import installed
from ringtrain.torch.distributed import meeting
from ringtrain.torch.distributed.group import ProcessGroup
from ringtrain.torch.distributed.reconfigure import ReconfigurableGroup


class InPlaceOfGloo(ProcessGroup):
    """Made where torch makes a group of gloo, which is told its ranks and its name after that."""

    event_prefix = "gloo"

    def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False) -> Any:
        if enable_reconfigure:
            return ReconfigurableGroup(store, rank, size, timeout, "")
        return super().__new__(cls)

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, enable_reconfigure: bool = False) -> None:
        self._begin(store, list(range(size)), rank, timeout, "")
        self.options.global_ranks_in_group = []

    # One of these is the last that torch calls before it uses the group: the second from 2.14 on.

    def _set_sequence_number_for_group(self) -> None:
        self._enter()

    def _set_group_desc(self, desc: str) -> None:
        self._enter()
        super()._set_group_desc(desc)

    def _enter(self) -> None:
        if self._job != 0:
            return
        ranks = list(self.options.global_ranks_in_group)
        self._name_it(self.options.group_name)
        ranks = meeting.ranks_in_job(self._store, ranks, self._rank, self._size, self.options._timeout)
        self._open(self._store, ranks, self._rank)


def replace_gloo() -> None:
    """Have torch make groups of ringtrain wherever a program asks for "gloo".

    For programs that insist on that name; `get_backend()` goes on saying "gloo". To be called before
    init_process_group(). With the environment variable RINGTRAIN_AS_GLOO=1 the import of the backend does it.
    """
    module: Any = distributed_c10d
    module.ProcessGroupGloo = InPlaceOfGloo


def replace_if_asked() -> None:
    """Does so where the environment asks for it."""
    if installed.is_gloo_replaced():
        replace_gloo()
