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

    def __init__(self, error: BaseException | None = None):
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
        debug_data_loader: whether to print when an epoch and the thread begin and end.
        args, kwargs: for the loader. As in Horovod 0.28, a bool that comes first is `debug_data_loader`.
    """

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, debug_data_loader: bool = False, **kwargs: Any):
        if args and isinstance(args[0], bool):
            debug_data_loader, *args = args  # type: ignore[assignment]
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        self.started = False
        self.finished_event = threading.Event()
        self.queue: queue.Queue[Any] = queue.Queue(max(0, async_loader_queue_size))
        self.thread: threading.Thread | None = None
        self._failure: BaseException | None = None  # that has ended the thread
        self._debug(f"loads {async_loader_queue_size} batches ahead")

    def _debug(self, text: str) -> None:
        if self.debug_data_loader:
            print(f"{type(self).__name__}: {text}", flush=True)

    def close_async_loader(self) -> None:
        """End the thread. An iteration that has begun ends with the batches that are loaded."""
        self._debug("is closed")
        self.finished_event.set()
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def __iter__(self) -> Iterator[Any]:
        self._debug("begins an epoch")
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
        """None where the loader was closed and nothing is left; a failure comes again in each later loop."""
        while True:
            try:
                return self.queue.get(timeout=0 if self._failure else _LOOK_S)
            except queue.Empty:
                if self.finished_event.is_set():
                    return None
                if self._failure is not None:
                    return _End(self._failure)

    def _async_worker(self) -> None:
        """Loads one epoch after another, until the loader is closed or fails."""
        while not self.finished_event.is_set():
            try:
                for batch in self._iterate():  # type: ignore[attr-defined]
                    if not self._put((batch,)):
                        return
            except BaseException as error:  # a SystemExit, too: the training waits for this thread
                self._failure = error
                self._debug(f"has failed: {error!r}")
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
