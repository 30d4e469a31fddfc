"""Some rows of an array, such as those of an embedding that one batch needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ringtrain.arrays.adapter import adapter_for

Array = np.ndarray[Any, Any]


class RowSparse:
    """Rows of a key: the result of `row_sparse_pull`, and an argument of `push`, where all other rows are zero.

    Args:
        indices: numbers of the rows, integers. Pulled ones are sorted and unique.
        rows: as many, each of the shape of a row of the key.
    """

    def __init__(self, indices: Any = (), rows: Any = ()) -> None:
        self.indices: Array = np.asarray(_on_host(indices), np.int64)
        self.rows: Array = _on_host(rows)

    def __repr__(self) -> str:
        return f"RowSparse({self.indices.tolist()}, {self.rows.shape} {self.rows.dtype})"


def is_sparse(value: Any) -> bool:
    """Whether it is a RowSparse, or a sparse tensor of PyTorch."""
    return isinstance(value, RowSparse) or getattr(value, "is_sparse", False) is True


def as_rows(call: str, key: Any, value: Any) -> RowSparse:
    """Returns the rows of a sparse value. Raises ValueError for a tensor with other sparse dimensions than the rows."""
    if isinstance(value, RowSparse):
        return value
    if not is_sparse(value):
        raise ValueError(f"{call}: key {key!r} has both rows and whole values; give it one kind")
    whole = value.detach().coalesce()
    if whole.sparse_dim() != 1:
        raise ValueError(f"{call}: key {key!r} needs a tensor with 1 sparse dimension, not {whole.sparse_dim()}")
    return RowSparse(whole.indices()[0], whole.values())


def require_place(call: str, key: Any, out: Any, shape: tuple[int, ...]) -> None:
    """Raises TypeError or ValueError unless `out` can hold rows of a key."""
    if not is_sparse(out):
        raise TypeError(f"{call}: out is a RowSparse or a sparse_coo tensor of PyTorch, not {type(out).__qualname__}")
    if not isinstance(out, RowSparse) and tuple(out.shape) != shape:
        raise ValueError(f"{call}: key {key!r} has shape {shape}, but out has {tuple(out.shape)}")


def put_rows(out: Any, numbers: Array, rows: Array) -> None:
    """Writes rows into `out`, which require_place() has checked."""
    if isinstance(out, RowSparse):
        out.indices, out.rows = numbers, rows
    else:
        cast(Any, adapter_for(out)).set_rows(out, numbers, rows)


def numbers_of(call: str, key: Any, row_ids: Any, rows: int) -> Array:
    """Returns the sorted unique numbers of rows. Raises ValueError for a row that the key does not have."""
    if row_ids is None:
        raise ValueError(f"{call}: key {key!r} needs row_ids, the numbers of the rows")
    numbers = np.unique(np.asarray(_on_host(row_ids), np.int64))
    if numbers.size and not (numbers[0] >= 0 and numbers[-1] < rows):
        raise ValueError(f"{call}: key {key!r} has rows 0 to {rows - 1}, not {numbers[0]} to {numbers[-1]}")
    return numbers


def sum_of(key: Any, values: Sequence[RowSparse], shape: tuple[int, ...], dtype: Any) -> RowSparse:
    """Returns the sum, with each row once. Raises ValueError for rows outside of the key, or of another shape."""
    indices = np.concatenate([value.indices for value in values])
    for value in values:
        if value.rows.shape != (value.indices.size, *shape[1:]):
            raise ValueError(
                f"push: key {key!r} has rows of shape {shape[1:]}, but {value.indices.size} indices come with "
                f"{value.rows.shape}"
            )
    numbers = numbers_of("push", key, indices, shape[0])
    rows = np.concatenate([value.rows for value in values])
    total = np.zeros((numbers.size, *shape[1:]), rows.dtype)
    np.add.at(total, np.searchsorted(numbers, indices), rows)
    return RowSparse(numbers, np.ascontiguousarray(total, dtype))


def _on_host(array: Any) -> Array:
    return np.asarray(array) if isinstance(array, (list, tuple, np.ndarray)) else adapter_for(array).on_host(array)
