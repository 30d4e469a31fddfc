"""Torch tensors and NumPy arrays over the same memory, bfloat16 included, which torch does not take from NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ringtrain.bench.rounds import Array


def as_tensor(array: Array) -> Any:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: Any, dtype: np.dtype[Any]) -> Array:
    array: Array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array.view(dtype)
