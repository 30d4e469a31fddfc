"""The interface of an array library for the measurements."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np

NAMES = ("torch", "cupy")


class Library(Protocol):
    """A module of ringtrain.bench. `zeros` works on the GPU that init() has chosen."""

    name: str
    version: str

    def trouble(self) -> str:
        """Why it finds no GPU; "" if it finds one."""

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any: ...

    def fill(self, array: Any, value: int) -> None: ...

    def finish(self) -> None:
        """Makes the host wait for the work in the current stream."""


def load(name: str) -> Library:
    """Imports the library, which init() must find loaded when it chooses a GPU."""
    return cast(Library, importlib.import_module(f"measure.{name}.on_gpu"))
