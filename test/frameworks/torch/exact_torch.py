"""The exact data of `exact.py` as PyTorch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from harness.exact import DTYPES, data_of_ranks, require_equal
from harness.frameworks import on_demand, version_of

torch = on_demand("torch")

# Unsigned integers of more than 8 bits are new in PyTorch 2.3.
_NEW = ("uint16", "uint32", "uint64")
TORCH_DTYPES = [dtype for dtype in DTYPES if dtype.name not in _NEW or version_of("torch") >= (2, 3)]


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """A tensor with a copy of the array."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def array_of(tensor: torch.Tensor) -> np.ndarray:
    values = tensor.detach().contiguous()
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return values.numpy()


def tensors_of_ranks(size: int, shape: Sequence[int], dtype: Any = "float64", **how: Any) -> list[torch.Tensor]:
    """Returns the inputs of all ranks of a job of `size`; see `exact.data_of_ranks`."""
    return [tensor_of(array) for array in data_of_ranks(size, shape, dtype, **how)]


def require_tensor(tensor: Any, expected: np.ndarray | torch.Tensor) -> None:
    """Raise AssertionError unless it is a tensor on the CPU whose dtype, shape and elements are the same."""
    assert type(tensor) is torch.Tensor and tensor.is_cpu, f"{type(tensor)} instead of a tensor on the CPU"
    require_equal(array_of(tensor), array_of(expected) if isinstance(expected, torch.Tensor) else expected)


def arrays_of(model: torch.nn.Module) -> list[np.ndarray]:
    """Copies of the parameters."""
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def require_same(model: torch.nn.Module, arrays: Sequence[np.ndarray]) -> None:
    """The parameters have these dtypes and these bits."""
    for own, right in zip(arrays_of(model), arrays, strict=True):
        assert own.dtype == right.dtype and (own == right).all()
