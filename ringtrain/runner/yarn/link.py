"""What the starter has of a container: the connection that came from there."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ringtrain.runner.start.link import Link, Share


class ContainerLink(Link):
    """What is said there comes in one stream: under ringrun both outputs of a rank are frames of its wrapper."""

    def __init__(self, share: Share, way: socket.socket, container: str):
        super().__init__(share, open_streams=1)
        self._container = container
        self._reading = way
        # a selector wants another descriptor for this
        self._writing = way.dup()
        way.setblocking(False)

    @property
    def orders(self) -> socket.socket:
        return self._writing

    def streams(self) -> list[tuple[int, Callable[[bytes], None]]]:
        return [(self._reading.fileno(), self._take)]

    def end_in_words(self) -> str:
        return f"the connection to container {self._container} on {self._share.host} has ended"

    def close(self) -> None:
        self._reading.close()
        self._writing.close()

    def _take(self, data: bytes) -> None:
        for line in self._output.feed(data) if data else self._output.close():
            self._take_line(line, 2)
