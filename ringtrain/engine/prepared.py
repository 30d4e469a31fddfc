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


class Prepared(_core.Prepared):
    """One named array, wherever it lies in the host's memory.

    An array that is not as the prepared one, but for its address, is refused: then nothing has happened. `begin`, which
    is called for every gradient in every step, is that of the core; see there.

    `view`: what the array's adapter tells of it, for `_core.Prepared`. `site`: where it comes from, for messages.
    """

    __slots__ = ("priority", "process_set")

    def __init__(self, array: Any, adapter: Adapter, view: Any, name: str, how: How, site: _core.Site) -> None:
        kind = type(array)
        look = None if kind is np.ndarray else adapter.view_in_place
        exchange = getattr(kind, "__dlpack_c_exchange_api__", None) if adapter.MAKES == "torch" else None
        super().__init__(view, name, *how, site, kind, look, exchange)
        self.process_set = how.process_set
        self.priority = how.priority

    def submit(self, array: Any) -> Handle[Any] | None:
        """Submit the array; None where it is refused."""
        if get_ident() not in deadlock.submitters:
            deadlock.note_submitter()
        try:
            core = self.start(array)
        except Exception as error:
            report_failure(error)
            raise
        return None if core is None else Handle(core, array)

    def wait(self) -> Any:
        """The array of what was begun, when it has the result; as `Handle.wait`, but once."""
        try:
            array = self.finish(0.2)
        except BaseException as error:
            self._handle()
            report_failure(error)
            raise
        return self._handle().wait() if array is None else array

    def _handle(self) -> Handle[Any]:
        """What keeps the array as long as it may be read or written."""
        return Handle(*self.take())

    def __del__(self) -> None:
        if self.has_begun():
            self._handle()
