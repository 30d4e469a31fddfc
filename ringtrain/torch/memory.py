"""Tensors in memory that the ranks of a node share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ringtrain import memory


def empty(*shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A new CPU tensor, not initialised, for which an allreduce in place costs least; see `ringtrain.empty`.

    Args:
        shape: as for torch.empty.
        dtype: any that an operation takes.

    Raises:
        NotInitializedError: before init().
    """
    lengths = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    size = torch.Size(lengths)  # type: ignore[arg-type]
    content = memory.empty(math.prod(size) * dtype.itemsize, np.uint8)
    return torch.from_numpy(content).view(dtype).view(size)
