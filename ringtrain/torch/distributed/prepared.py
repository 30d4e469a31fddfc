"""Allreduces of one tensor that come again in each step: what the core needs to know of them is told once."""

from __future__ import annotations

from typing import Any

import ringtrain._core as _core
from ringtrain._core import ReduceOp
from ringtrain.arrays.adapter import View
from ringtrain.engine.handles import keep_until_free, report_failure
from ringtrain.errors import RingtrainError
from ringtrain.failure import RepeatedSite, call_site
from ringtrain.torch.distributed.naming import Call
from ringtrain.torch.distributed.streams import StreamOrder
from ringtrain.torch.distributed.views import Tensor
from ringtrain.torch.distributed.work import LOOK_S


class Prepared(_core.Prepared):
    """The operation of a call. It is submitted again with any tensor of the same class, dtype and number of elements.

    Attributes:
        device: the number of the GPU; None for tensors in host memory.
        op: torch's reduction, as its hash.
        signature: the number by which the names of the group know it.
        site: the line of the script.
    """

    __slots__ = ("device", "op", "signature", "site")
    device: int | None
    op: int
    signature: int
    site: RepeatedSite

    def submit(self, tensor: Tensor, is_async: bool, title: str) -> _core.Handle | bool:
        """Returns the Handle, True for what is to be awaited at once, or False: then nothing has happened."""
        site = self.site.get()
        try:
            if is_async:
                return self.start(tensor, False, title, site) or False
            return self.begin(tensor, True, title, site)
        except Exception as error:
            report_failure(error)
            raise

    def run(self, timeout_s: float) -> _core.Handle | None:
        """Wait for what was begun. Returns its Handle if it has failed or takes long, and None if it is done.

        On a GPU the current stream waits for the result.

        An operation that makes no progress fails on all ranks after `timeout_s`.
        """
        try:
            if self.finish(min(LOOK_S, timeout_s), timeout_s) is not None:
                return None
        except RingtrainError:
            pass
        except BaseException:  # what a signal handler has raised
            keep_until_free(*self.take())
            raise
        return self.take()[0]

    def order_of(self, handle: _core.Handle) -> StreamOrder | None:
        """Returns the order of what was submitted; None in host memory."""
        return None if self.device is None else StreamOrder(self.device, handle.stream)


def prepare(
    tensor: Tensor, view: View, process_set: int, reduction: ReduceOp, op: Any, call: Call, signature: int, title: str
) -> _core.Handle | None:
    """Submit an allreduce so that its call can be submitted again. None, and nothing has happened, where it cannot."""
    kind: Any = type(tensor)
    exchange = getattr(kind, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return None
    agreed = call.name, reduction, 1.0, 1.0, process_set, 0
    site = call_site()
    prepared = Prepared(view, *agreed, site, kind, None, None, exchange, is_flat=True, waits_for_name=True)
    prepared.device = view[3] if len(view) == 5 else None
    prepared.op, prepared.signature, prepared.site = hash(op), signature, RepeatedSite()
    try:
        handle = prepared.start(tensor, False, title, site)
    except Exception as error:
        report_failure(error)
        raise
    if handle is not None:
        call.prepared = prepared
    return handle
