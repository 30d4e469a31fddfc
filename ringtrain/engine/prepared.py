"""An allreduce in place that comes again in every step: all that is known of it before is looked up once."""

from __future__ import annotations

from threading import get_ident
from typing import Any, NamedTuple

import numpy as np

import ringtrain._core as _core
from ringtrain._core import ReduceOp
from ringtrain.arrays.adapter import Adapter
from ringtrain.failure import deadlock
from ringtrain.handles import Handle, report_failure


class How(NamedTuple):
    """All but the array and the name, which the ranks agree on but for the priority."""

    op: ReduceOp
    prescale: float
    postscale: float
    process_set: int
    priority: int


class Prepared:
    """One named array, wherever it lies in the host's memory.

    `view`: what the array's adapter tells of it, for `_core.Prepared`. `site`: where it comes from, for messages.
    """

    __slots__ = ("_core", "_tells_itself", "_type", "_view_in_place", "how")

    def __init__(self, array: Any, adapter: Adapter, view: Any, name: str, how: How, site: _core.Site) -> None:
        self.how = how
        self._type = type(array)
        self._tells_itself = self._type is np.ndarray
        self._view_in_place = adapter.view_in_place
        op, prescale, postscale, process_set, priority = how
        self._core = _core.Prepared(view, name, op, prescale, postscale, process_set, priority, site)

    def submit(self, array: Any, is_awaited: bool = False) -> Handle[Any] | None:
        """None for an array that is not as the prepared one, but for its address: then nothing has happened.

        `is_awaited`: the caller waits for it at once.
        """
        # Of every gradient in every step, so nothing is called that need not be.
        if get_ident() not in deadlock.submitters:
            deadlock.note_submitter()
        if type(array) is not self._type:
            return None
        view = array if self._tells_itself else self._view_in_place(array)
        if view is None:
            return None
        try:
            core = self._core.submit(view, is_awaited)
        except Exception as error:
            report_failure(error)
            raise
        return None if core is None else Handle(core, array)
