"""A progress bar on standard error, where tqdm is installed."""

from __future__ import annotations

from typing import Any


class Progress:
    """Counts rounds; shows them if told to and if tqdm is installed."""

    def __init__(self, is_shown: bool) -> None:
        self._bar: Any = None
        if is_shown:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(unit=" rounds", leave=False)

    def expect(self, rounds: int) -> None:
        if self._bar is not None:
            self._bar.total = (self._bar.total or 0) + rounds
            self._bar.refresh()

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
