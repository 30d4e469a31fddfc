"""What ringrun prints: lines and, below them on a terminal, the rows of the ranks that still change."""

from __future__ import annotations

import re
import time
import unicodedata

from ringtrain.runner.supervise.printing import FindSurface, Print

# Rows that change are painted again after this time.
_FRAME_S = 0.1
_ESCAPE = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z])")
_NO_COLOUR = "\x1b[0m"


class Screen:
    """For one thread. Nothing else may print to the same terminal."""

    def __init__(self, write: Print, find_surface: FindSurface = lambda: None, speaker: str = "ringrun"):
        self._write = write
        self._find_surface = find_surface
        self.speaker = speaker
        self._painted: list[str] = []
        self._painted_at = 0.0
        self._erasing = b""
        self._is_at_line_start = True

    def print(self, data: bytes, is_error: bool) -> None:
        """Print in the place of the rows; `show` brings them back."""
        if data:
            self._erase()
            self._write(data, is_error)
            self._is_at_line_start = data.endswith(b"\n")

    def say(self, text: str) -> None:
        """Print a sentence of this program's own."""
        self.print(f"{self.speaker}: {text}\n".encode(), True)

    def show(self, rows: list[bytes]) -> None:
        """Have these rows, and no others, stand below what was printed."""
        if not rows:
            self._erase()
        elif not self._painted or time.monotonic() > self._painted_at + _FRAME_S:
            self._paint(rows)

    def _paint(self, rows: list[bytes]) -> None:
        surface = self._find_surface()
        if surface is None or not self._is_at_line_start:
            return
        # a character in the last column could wrap
        height = max(1, surface.lines - 1) if surface.has_cursor else 1
        texts = [cut(row.decode(errors="replace"), surface.columns - 1) for row in rows[-height:]]
        if texts != self._painted:
            self._erase()
            self._write("\n".join(texts).encode(), True)
            self._painted, self._painted_at = texts, time.monotonic()
            up = f"\x1b[{len(texts) - 1}A" if len(texts) > 1 else ""
            blank = f"\r{up}\x1b[J" if surface.has_cursor else "\r" + " " * surface.columns + "\r"
            self._erasing = blank.encode()

    def _erase(self) -> None:
        if self._painted:
            self._write(self._erasing, True)
            self._painted = []


def cut(text: str, columns: int) -> str:
    """What of `text` fits into a row of that many columns. Of escape sequences only colours stay."""
    shown: list[str] = []
    for part in _ESCAPE.split(text):
        if _ESCAPE.fullmatch(part):
            shown += [part] if part.endswith("m") else []
            continue
        for character in part:
            columns -= _columns_of(character)
            if columns >= 0 and character.isprintable():
                shown.append(character)
    return "".join(shown) + (_NO_COLOUR if "\x1b" in text else "")


def _columns_of(character: str) -> int:
    if unicodedata.combining(character) or not character.isprintable():
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
