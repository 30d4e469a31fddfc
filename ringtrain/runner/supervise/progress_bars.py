"""What one rank writes to one stream, as a terminal would show it: lines that are over, and rows that may still change.

A progress bar writes over its row, after a carriage return or by moving the cursor up: only its last state counts.
Memory is bounded and work is in proportion to what comes, for a bar of days and for output without line ends.
"""

from __future__ import annotations

import re

# An open line is broken here.
MAX_LINE_BYTES = 1 << 16
# Bars that stand below each other; the uppermost of more is taken for a line.
_MAX_ROWS = 32
_TOKENS = re.compile(rb"([\r\n]|\x1b\[\d*[AK])")


class _Row:
    def __init__(self) -> None:
        self.text = bytearray()
        self.is_bar = False
        self.is_at_start = True

    def write(self, text: bytes) -> None:
        if self.is_at_start:
            self.text.clear()
            self.is_at_start = False
        self.text += text
        if self.is_bar:
            del self.text[MAX_LINE_BYTES:]

    def line(self) -> bytes:
        # a bar is filled up with spaces to hide what was there before
        return bytes(self.text.rstrip() if self.is_bar else self.text)


class Rows:
    """Keeps bars back after their line end, for a cursor that comes back to them, until plain text or `settle`."""

    def __init__(self) -> None:
        self._rows = [_Row()]
        self._at = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that are over now, without their ends."""
        if not self.have_bars and b"\r" not in data and b"\x1b[" not in data:
            return self._feed_lines(data)
        over: list[bytes] = []
        for token in _TOKENS.split(data):
            if token:
                self._take(token, over)
        return over

    def settle(self) -> list[bytes]:
        """The cursor stays: what stands above it is over."""
        over: list[bytes] = []
        self._finish(self._at, over)
        return over

    def rest(self) -> list[bytes]:
        """What is not over, as lines."""
        lines = [row.line() for row in self._rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def bars(self) -> list[bytes]:
        """The rows that are progress bars, the uppermost first, without empty ones."""
        return [line for line in (row.line() for row in self._rows if row.is_bar) if line]

    @property
    def have_bars(self) -> bool:
        """Also without anything to see: `settle` may bring lines."""
        return len(self._rows) > 1 or self._rows[0].is_bar

    def _feed_lines(self, data: bytes) -> list[bytes]:
        """The same for plain text, which is most of what there is, and faster."""
        *over, rest = data.split(b"\n")
        if over and not self._rows[0].is_at_start:
            over[0] = self._rows[0].line() + over[0]
            self._rows[0] = _Row()
        self._write(rest, over)
        return over

    def _take(self, token: bytes, over: list[bytes]) -> None:
        row = self._rows[self._at]
        if token == b"\n":
            self._end_line(over)
        elif token == b"\r":
            row.is_bar = row.is_at_start = True
        elif token[:2] != b"\x1b[" or token[-1:] not in b"AK":
            self._write(token, over)
        elif token[-1:] == b"A":
            self._at = max(0, self._at - int(token[2:-1] or 1))
        elif row.is_at_start or token == b"\x1b[2K":
            row.text.clear()

    def _write(self, text: bytes, over: list[bytes]) -> None:
        if not text:
            return
        if not self._rows[self._at].is_bar:
            self._finish(self._at, over)
        row = self._rows[self._at]
        row.write(text)
        while len(row.text) > MAX_LINE_BYTES:
            over.append(bytes(row.text[:MAX_LINE_BYTES]))
            del row.text[:MAX_LINE_BYTES]

    def _end_line(self, over: list[bytes]) -> None:
        row = self._rows[self._at]
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(_Row())
        # an empty row below a bar may be on the way to another bar
        if not row.is_bar and (self._at == 1 or not row.is_at_start):
            self._finish(self._at, over)
        if self._at > _MAX_ROWS:
            self._finish(1, over)

    def _finish(self, count: int, over: list[bytes]) -> None:
        """The uppermost `count` rows are over."""
        over += [row.line() for row in self._rows[:count]]
        del self._rows[:count]
        self._at -= count
