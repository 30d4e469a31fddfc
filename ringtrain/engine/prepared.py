"""Allreduces of one tensor in place, as gradients need them: what is repeated in every step is prepared once."""

from __future__ import annotations

from typing import Any

import numpy as np

import ringtrain._core as _core
from ringtrain._core import OpKind, ReduceOp
from ringtrain.arrays.adapter import adapter_for
from ringtrain.compression import AnyCompressor, Compression
from ringtrain.engine.requirements import have
from ringtrain.engine.submission import INTEGERS, Operation, Reduction, start
from ringtrain.failure import call_site
from ringtrain.handles import Handle, OnGpu, report_failure
from ringtrain.process_sets import ProcessSet

_BOOL = _core.DTYPES["bool"]

How = tuple[ReduceOp | None, bool | None, float, float, AnyCompressor]  # the arguments of Reduction.of
Key = tuple[str | None, How, ProcessSet, int]  # the name, how, the process set, the priority


class Prepared(_core.Prepared):
    """One named array in the host's memory. `_core.Prepared` submits it; here is the key with which it was prepared."""

    __slots__ = ("how", "priority", "process_set", "process_set_id")
    how: How
    priority: int
    process_set: ProcessSet
    process_set_id: int

    def wait(self) -> Any:
        """Wait for what was begun and return its array. As `Handle.wait`, but only once."""
        try:
            array = self.finish(0.2)
        except BaseException as error:
            self.as_handle()
            report_failure(error)
            raise
        return self.as_handle().wait() if array is None else array

    def as_handle(self) -> Handle[Any]:
        """Return the Handle of what was begun, which keeps the array as long as it may be read or written."""
        return Handle(*self.take())

    def __del__(self) -> None:
        if self.has_begun():
            self.as_handle()


class PreparedTensors:
    """Submits allreduces of one tensor in place, at a third of the cost when a key is repeated.

    A repeated tensor may have other values and another address; after any other change it is prepared anew.

    Args:
        prefix: put before all names.
        prepares_new: prepare a tensor when its name is new; otherwise when the name is repeated, as most never are.
    """

    MAX_KNOWN = 10_000  # names; beyond that all are forgotten

    def __init__(self, prefix: str = "", prepares_new: bool = False):
        self.prefix = prefix
        self._prepares_new = prepares_new
        # By name, without the prefix. None for a name that came once, and on a GPU, where nothing is prepared.
        self.known: dict[str, Prepared | None] = {}

    def __reduce__(self) -> Any:
        """A copy begins with nothing prepared."""
        return PreparedTensors, (self.prefix, self._prepares_new)

    def submit(self, tensor: Any, key: Key, is_awaited: bool = False) -> Prepared | Handle[Any]:
        """Submit a tensor, for a caller that waits once. Raises at once what the rank of the caller can see.

        `is_awaited`: the caller waits at once.
        """
        name, how, process_set, priority = key
        prepared = self.known.get(name) if name else None
        if (
            prepared is not None
            and (prepared.how == how and prepared.priority == priority)
            and (prepared.process_set is process_set and prepared.process_set_id == process_set.process_set_id)
        ):
            try:
                if prepared.begin(tensor, is_awaited):
                    return prepared
            except Exception as error:
                report_failure(error)
                raise
        return self._submit_new(tensor, key, is_awaited)

    def _submit_new(self, tensor: Any, key: Key, is_awaited: bool) -> Handle[Any]:
        name, (op, average, prescale, postscale, compression), process_set, priority = key
        full_name = f"{self.prefix}{name}" if self.prefix else name
        if op is None and average is None:
            op = ReduceOp.Average
        is_usual = (
            (full_name is None or (isinstance(full_name, str) and full_name[:1] != "<"))
            and (type(op) is ReduceOp and average is None and compression is Compression.none)
            and (type(prescale) is type(postscale) is float and isinstance(process_set, ProcessSet))
        )
        number = process_set.process_set_id if is_usual else None
        adapter = adapter_for(tensor)
        view = adapter.view_in_place(tensor) if number is not None else None
        if view is None or (view[1] in INTEGERS and op is not None and not have(op, view[1] == _BOOL)):
            reduction = Reduction.of(op, average, prescale, postscale, compression)
            operation = Operation(OpKind.ALLREDUCE, [tensor], full_name, process_set, reduction, priority=priority)
            operation.in_place = True
            return start(operation, is_awaited)
        assert op is not None and number is not None
        agreed = full_name or "", op, prescale, postscale, number, priority
        site = call_site(full_name or "")
        prepared = None
        if name:
            is_repeated = name in self.known
            if len(view) == 3 and (is_repeated or self._prepares_new):
                kind = type(tensor)
                look = None if kind is np.ndarray else adapter.view_in_place
                exchange = getattr(kind, "__dlpack_c_exchange_api__", None) if adapter.MAKES == "torch" else None
                prepared = Prepared(view, *agreed, site, kind, look, exchange)
                prepared.how, prepared.priority = key[1], priority
                prepared.process_set, prepared.process_set_id = process_set, number
            if not is_repeated and len(self.known) >= self.MAX_KNOWN:
                self.known.clear()
            self.known[name] = prepared
        try:
            core = None if prepared is None else prepared.start(tensor)
            if core is None:
                core = _core.allreduce_in_place(view, *agreed, is_awaited, site)
        except Exception as error:
            report_failure(error)
            raise
        return Handle(core, tensor, None, OnGpu(adapter, tensor, view[4]) if len(view) == 5 else None)
