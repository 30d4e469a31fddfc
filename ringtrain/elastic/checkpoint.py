"""The newest commits of a state on disk, from which a job goes on whose ranks were all lost."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ringtrain import pickling
from ringtrain.record.logger import logger
from ringtrain.record.whole_file import whole_file

_FORMAT = "ringtrain elastic state 1"


class Found(NamedTuple):
    """What was in the file."""

    commits: int
    content: Any


class Checkpoint:
    """One file, which is always whole.

    Args:
        every_s: how often it is written.
    """

    def __init__(self, path: Path, every_s: float):
        self._path = path
        self._every_s = every_s
        self._written_s = time.monotonic()

    def read(self) -> Found | None:
        """None where there is no file. Raises ValueError for what is no such file."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            found = pickle.loads(content)
            if found["format"] != _FORMAT:
                raise KeyError("format")
            return Found(found["commits"], found["content"])
        except (pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
            raise ValueError(f"{self._path} is no file that save_to has written: {error}") from None

    def write_if_due(self, commits: int, content: Callable[[], Any]) -> None:
        """A disk that is full is no reason to end the job: it is said, and tried again."""
        if time.monotonic() - self._written_s < self._every_s:
            return
        self._written_s = time.monotonic()
        try:
            with whole_file(self._path) as file:
                file.write(pickling.dumps({"format": _FORMAT, "commits": commits, "content": content()}))
        except OSError as error:
            logger.error("the state cannot be written to %s: %s", self._path, error)
