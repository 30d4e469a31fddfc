"""What a starter waits for, in one thread: its agents, signals, and whatever else it has."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ringtrain.runner.start.link import Link


class HasDescriptor(Protocol):
    """A file, or what has one."""

    def fileno(self) -> int: ...


class Loop:
    """Links are read, and written to, from `add` until they are closed at both ends, or `forget`."""

    def __init__(self, on_report: Callable[[Link, dict[str, Any]], None]):
        """`on_report` takes what an agent reports."""
        self._selector = selectors.PollSelector()  # that of epoll takes no files
        self._on_report = on_report
        self._links: list[Link] = []

    def add(self, link: Link) -> None:
        self._links.append(link)
        for stream, handle in link.streams():
            self._selector.register(stream, selectors.EVENT_READ, self._reader(link, stream, handle))

    def forget(self, link: Link) -> None:
        """Nothing that it may still say is of interest."""
        self._links.remove(link)
        for stream, _ in link.streams():
            if stream in self._selector.get_map():
                self._selector.unregister(stream)

    def handle_signals(self, numbers: Iterable[int], handle: Callable[[bytes], None]) -> None:
        """`handle` takes those that have come. A signal that is ignored stays ignored."""
        wake_up, wake_up_end = os.pipe()
        for descriptor in (wake_up, wake_up_end):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_up_end, warn_on_full_buffer=False)
        self.register(wake_up, lambda: handle(os.read(wake_up, 4096)))
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)

    def register(self, stream: int | HasDescriptor, read: Callable[[], None]) -> None:
        """Call `read` whenever there is something to read, for ever."""
        self._selector.register(stream, selectors.EVENT_READ, read)

    def wait(self, longest_s: float, also: Mapping[HasDescriptor, Callable[[], None]] | None = None) -> None:
        """Wait until there is something, and handle it. `also` are to be read this time alone."""
        orders = {link.orders: link.write_orders for link in self._links if link.has_orders}
        for stream, write in orders.items():
            self._selector.register(stream, selectors.EVENT_WRITE, write)
        for source, read in (also or {}).items():
            self._selector.register(source, selectors.EVENT_READ, read)
        ready = self._selector.select(longest_s)
        for passing in (*orders, *(also or {})):
            self._selector.unregister(passing)
        for key, _ in ready:
            key.data()

    def _reader(self, link: Link, stream: int, handle: Callable[[bytes], None]) -> Callable[[], None]:
        def read() -> None:
            try:
                data = os.read(stream, 1 << 16)
            except (ConnectionError, TimeoutError):  # of a host that has vanished
                data = b""
            handle(data)
            if not data:
                self._selector.unregister(stream)
                link.open_streams -= 1
            for report in link.take_reports():
                self._on_report(link, report)

        return read
