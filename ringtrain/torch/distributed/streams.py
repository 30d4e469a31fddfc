"""The order between an operation on a GPU and torch's streams, as torch expects it of a backend.

An operation begins after what the current stream has to do when it is called. `wait()` makes the stream wait that is
current then. The host waits until all ranks have called the operation, and not for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

import ringtrain._core as _core
from ringtrain.arrays import torch as adapter
from ringtrain.engine.handles import keep_until, keep_until_free

_STREAM_OF_THREAD = 2  # the default stream of each thread, where a library has one


class StreamOrder:
    """Orders the streams of one operation.

    Args:
        device: the number of the GPU.
        stream: that was the current one when the operation was called.
    """

    def __init__(self, device: int, stream: int) -> None:
        self._device = device
        self._submitted = stream
        self._made: _core.GpuPoint | None = None  # where the results are made of those of the engine

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self._device)

    def again(self) -> StreamOrder:
        """Returns the order of an operation that was called at the same place."""
        return StreamOrder(self._device, self._submitted)

    def follow(self, handles: Sequence[_core.Handle]) -> None:
        """Makes the current stream wait for the results. Raises the error of an operation that has failed."""
        stream = self._current()
        if self._made is not None:
            self._made.follow(stream)
            return
        for handle in handles:
            handle.follow(stream)

    def note_made(self) -> None:
        """The current stream has just been given the work that makes the results."""
        self._made = _core.gpu_point(self._device, self._current())

    def is_over(self, handles: Sequence[_core.Handle]) -> bool:
        """Whether the GPU has the results."""
        return self._made.is_over() if self._made is not None else all(handle.is_over() for handle in handles)

    def keep(self, handles: Sequence[_core.Handle], tensors: Any) -> None:
        """Keeps tensors while the GPU uses them. The current stream waits for the results.

        torch gives freed memory to what comes next in the stream that the memory was made in. So tensors of the
        current stream need not be kept.
        """
        if self._current() == self._submitted != _STREAM_OF_THREAD:
            return
        for handle in handles:
            keep_until_free(handle, tensors)
        if self._made is not None:
            keep_until(self._made.is_over, tensors)

    def beside(self) -> AbstractContextManager[Any]:
        """Within `with` a stream is current that nothing else waits for."""
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def _current(self) -> int:
        return adapter.stream_of_device(self._device)


def order_of(view: _core.View) -> StreamOrder | None:
    """Returns the order of an operation on a tensor with this view; None in host memory."""
    return StreamOrder(view[3], view[4]) if len(view) == 5 else None
