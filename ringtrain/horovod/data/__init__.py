"""`horovod.data`: loaders of batches that load ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

# --- `horovod.data.data_loader_base`: what a loader of batches is, and one that loads ahead in a thread ---------------


# How often a thread that waits for room in the queue looks whether the loader was closed.
_LOOK_S = 0.2


class _End:
    """The last item of an epoch; `error` is what ended it, if anything."""

    def __init__(self, error: Exception | None = None):
        self.error = error


class BaseDataLoader:
    """A loader; a subclass has `__len__` and `_iterate`, and may have `_process_batch`."""

    def __len__(self) -> int:
        """How many batches an epoch has."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """The batches of an epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """The batch as the training gets it. Called in the thread of the training."""
        return batch


class AsyncDataLoaderMixin:
    """Loads batches ahead in a thread; to be named before the loader: `class Loader(AsyncDataLoaderMixin, Base)`.

    Args:
        async_loader_queue_size: how many batches are loaded ahead; 0 loads none ahead and starts no thread.
        args, kwargs: for the loader.
    """

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any):
        self.async_loader_queue_size = async_loader_queue_size
        super().__init__(*args, **kwargs)
        self.started = False
        self.finished_event = threading.Event()
        self.queue: queue.Queue[Any] = queue.Queue(max(0, async_loader_queue_size))
        self.thread: threading.Thread | None = None

    def close_async_loader(self) -> None:
        """End the thread. An iteration that has begun ends with the batches that are loaded."""
        self.finished_event.set()
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():  # type: ignore[attr-defined]
                yield self._process_batch(batch)  # type: ignore[attr-defined]
            return
        if not self.started:
            self.started = True
            self.thread = threading.Thread(target=self._async_worker, name="ringtrain loader", daemon=True)
            self.thread.start()
        while (item := self._next_item()) is not None:
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield self._process_batch(item[0])  # type: ignore[attr-defined]

    def _next_item(self) -> Any:
        """None where the loader was closed and nothing is left."""
        while True:
            try:
                return self.queue.get(timeout=_LOOK_S)
            except queue.Empty:
                if self.finished_event.is_set():
                    return None

    def _async_worker(self) -> None:
        """Loads one epoch after another, until the loader is closed or fails."""
        while not self.finished_event.is_set():
            try:
                for batch in self._iterate():  # type: ignore[attr-defined]
                    if not self._put((batch,)):
                        return
            except Exception as error:
                self._put(_End(error))
                return
            self._put(_End())

    def _put(self, item: Any) -> bool:
        """Whether there was room before the loader was closed."""
        while not self.finished_event.is_set():
            try:
                self.queue.put(item, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False
