"""At which servers the values of keys lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Borders of pieces: what codes of one or two bits have in a word.
_ELEMENTS = 32


class Piece(NamedTuple):
    """Some elements of a key, at one server."""

    server: int
    begin: int
    elements: int


class Placement:
    """Where each key goes: the bytes are spread evenly, as far as they are known when a key comes.

    Args:
        bound: from so many elements on a key is cut over all servers; None: none is.
    """

    def __init__(self, servers: int, bound: int | None):
        self._bound = bound
        self._bytes = [0] * servers

    def place(self, sizes: Sequence[tuple[int, int]]) -> list[list[Piece]]:
        """The pieces of keys that come together.

        Args:
            sizes: of each key its elements and their bytes.
        """
        pieces: list[list[Piece]] = [[] for _ in sizes]
        for number in sorted(range(len(sizes)), key=lambda one: -sizes[one][0] * sizes[one][1]):
            count, element_bytes = sizes[number]
            is_cut = self._bound is not None and count >= self._bound
            pieces[number] = self._cut(count) if is_cut else [Piece(self._least_loaded(), 0, count)]
            for piece in pieces[number]:
                self._bytes[piece.server] += piece.elements * element_bytes
        return pieces

    def _least_loaded(self) -> int:
        return self._bytes.index(min(self._bytes))

    def _cut(self, count: int) -> list[Piece]:
        servers = len(self._bytes)
        borders = [min(count, round(count * i / servers / _ELEMENTS) * _ELEMENTS) for i in range(servers)] + [count]
        cuts = zip(range(servers), borders[:-1], borders[1:], strict=True)
        return [Piece(server, begin, end - begin) for server, begin, end in cuts if end > begin]
