"""CuPy as `measure.gpu.library` needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from measure.cupy import finish as finish

name, version = "cupy", str(cupy.__version__)


def trouble() -> str:
    return "" if cupy.is_available() else "CuPy finds no GPU"


def zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
    return cupy.zeros(tuple(shape), dtype)


def fill(array: Any, value: int) -> None:
    array.fill(value)
