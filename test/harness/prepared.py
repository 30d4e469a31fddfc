"""Requires that operations are submitted again as they were prepared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ringtrain.engine.submission import PreparedAllreduces, PreparedBroadcasts


@contextmanager
def all_are_prepared() -> Iterator[None]:
    """Raises AssertionError from an operation that is not prepared."""

    def refuse(*_: Any) -> None:
        raise AssertionError("an operation was not prepared")

    with pytest.MonkeyPatch.context() as patch:
        for kind in (PreparedAllreduces, PreparedBroadcasts):
            patch.setattr(kind, "_submit_new", refuse)
        yield
