"""Some rows of an array, such as those of an embedding that one batch needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ringtrain.arrays import numpy as numpy_adapter
from ringtrain.arrays.adapter import adapter_for
from ringtrain.kvstore.entries import Entry, is_fitting, require_dtype

Array = np.ndarray[Any, Any]


class RowSparse:
    """Rows of a key: the result of `row_sparse_pull`, and an argument of `push`, where all other rows are zero.

    Args:
        indices: numbers of the rows, integers. Pulled ones are sorted and unique.
        rows: as many, each of the shape of a row of the key.
    """

    def __init__(self, indices: Any = (), rows: Any = ()) -> None:
        self.indices: Array = _as_numbers("RowSparse", _on_host(indices))
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
    if value.sparse_dim() != 1:
        raise ValueError(f"{call}: key {key!r} needs a tensor with 1 sparse dimension, not {value.sparse_dim()}")
    whole = value.detach()
    return RowSparse(whole._indices()[0], whole._values())  # sum_of() adds up repeated ones


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
    numbers = np.unique(_as_numbers(call, _on_host(row_ids)))
    if numbers.size and not (numbers[0] >= 0 and numbers[-1] < rows):
        raise ValueError(f"{call}: key {key!r} has rows 0 to {rows - 1}, not {numbers[0]} to {numbers[-1]}")
    return numbers


def sum_of(entry: Entry, values: Sequence[RowSparse]) -> RowSparse:
    """Returns the sum, with each row once, of the dtype that the sum of whole values would have.

    Raises:
        ValueError: rows outside of the key, or of another shape or dtype.
    """
    key, of_row = entry.key, entry.shape[1:]
    given = [value for value in values if value.indices.size or value.rows.size]  # RowSparse() has no shape
    for value in given:
        if value.rows.shape != (value.indices.size, *of_row):
            raise ValueError(
                f"push: key {key!r} has rows of shape {of_row}, but {value.indices.size} indices come with "
                f"{value.rows.shape}"
            )
        require_dtype("push", entry, value.rows.dtype.name)
    names = [value.rows.dtype.name for value in values if is_fitting(entry, value.rows.dtype.name)]
    dtype = numpy_adapter.cast(np.empty(0, np.float32), names[0] if names else entry.dtype_name).dtype
    none = np.empty((0, *of_row), dtype)
    indices = np.concatenate([np.empty(0, np.int64), *(value.indices.reshape(-1) for value in given)])
    rows = [value.rows for value in given]
    wide = np.result_type(none, *rows) if len({one.dtype for one in rows}) > 1 else dtype  # float32 among 16-bit ones
    numbers_of("push", key, indices, entry.shape[0])
    numbers, total = numpy_adapter.sum_rows(indices, np.concatenate([none, *rows], dtype=wide))
    return RowSparse(numbers, total.astype(dtype, copy=False))


def _as_numbers(call: str, numbers: Array) -> Array:
    """Returns int64. Raises ValueError for fractions, NaN, and numbers beyond int64."""
    with np.errstate(invalid="ignore"):
        whole = np.asarray(numbers).astype(np.int64, copy=False)
    if numbers.dtype.kind not in "iu" and not np.array_equal(whole, numbers):
        raise ValueError(f"{call}: numbers of rows are integers, not {numbers.dtype} such as {numbers.ravel()[0]}")
    return whole


def _on_host(array: Any) -> Array:
    return np.asarray(array) if isinstance(array, (list, tuple, np.ndarray)) else adapter_for(array).on_host(array)
