"""PyTorch as `measure.gpu.library` needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

name, version = "torch", str(torch.__version__)


def trouble() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA; install one that was, or take --library cupy"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU that it can use"


def zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> Tensor:
    return torch.zeros(tuple(shape), dtype=getattr(torch, dtype.name), device="cuda")


def fill(array: Tensor, value: int) -> None:
    array.fill_(value)


def finish() -> None:
    torch.cuda.current_stream().synchronize()
