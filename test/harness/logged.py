"""Collects the messages of ringtrain, for tests to compare."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def messages() -> Iterator[list[str]]:
    """Collects the messages of the logger of ringtrain."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringtrain").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("ringtrain").removeHandler(handler)
