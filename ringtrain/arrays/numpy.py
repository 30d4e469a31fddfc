"""NumPy arrays and Python's numbers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

import ringtrain._core as _core

Array = np.ndarray[Any, np.dtype[Any]]  # numpy.typing would be one more import

MAKES = "numpy"
_NOWHERE_ELSE: AbstractContextManager[None] = nullcontext()
SMALL_BYTES = 256 << 10
_BFLOAT16 = _core.DTYPES["bfloat16"]


class _Dtypes(dict[Any, int]):
    """The numbers of the core, by dtype. That of bfloat16 is learned from the first array that has it.

    ml_dtypes, which makes that dtype, takes long to import, and few ranks need it.
    """

    def __missing__(self, dtype: Any) -> int:
        if getattr(dtype, "name", "") != "bfloat16" or not dtype.isnative:
            raise KeyError(dtype)
        return self.setdefault(dtype, _BFLOAT16)

    def knows(self, dtype: Any) -> bool:
        try:
            self[dtype]
        except KeyError:
            return False
        return True


# CuPy and `borrowing` have NumPy's dtypes too.
DTYPES = _Dtypes({np.dtype(name): number for name, number in _core.DTYPES.items() if number != _BFLOAT16})
# Of complex numbers, what their parts are.
_PARTS = {np.dtype("complex64"): np.dtype("float32"), np.dtype("complex128"): np.dtype("float64")}


def accepts(array: Any) -> bool:
    """Raises TypeError for a masked array, whose mask would be lost."""
    masked = sys.modules.get("numpy.ma")  # slow to import, and imported where such an array was made
    if masked is not None and isinstance(array, masked.MaskedArray):
        raise TypeError(
            "ringtrain cannot send a masked array, since its mask would be lost; send array.filled(value), or the "
            "array and its mask with broadcast_object or allgather_object"
        )
    return isinstance(array, (np.ndarray, np.generic, bool, int, float, complex))


def prepare(array: Any) -> Array:
    values = np.asarray(array)
    require_known(values.dtype)
    return values if values.flags.c_contiguous else values.copy(order="C")


def require_known(dtype: Any) -> None:
    """Raises TypeError for a dtype that the core does not have."""
    if dtype not in _PARTS and not DTYPES.knows(dtype):
        raise TypeError(f"ringtrain cannot send dtype {dtype}{_remedy(dtype)}")


def _remedy(dtype: Any) -> str:
    """How to send an array of a dtype that the core does not have."""
    as_object = "broadcast_object or allgather_object"
    if not dtype.isnative:
        convert = 'array.astype(array.dtype.newbyteorder("="))'
        return f", which is not in the byte order of this machine; convert it with {convert}"
    if dtype.names is not None:
        return f'; send its fields one by one, such as array["{dtype.names[0]}"], or the array with {as_object}'
    if dtype.type in (np.longdouble, np.clongdouble):
        narrower = "float64" if dtype.kind == "f" else "complex128"
        return f"; convert it with array.astype(numpy.{narrower}), or send it unchanged with {as_object}"
    if dtype.kind in "mM":
        return "; send array.view(numpy.int64)"
    if dtype.kind in "OSUT" or dtype.type is np.void:
        return f"; send it with {as_object}"
    names = ", ".join([*_core.DTYPES, *map(str, _PARTS)])
    return f"; convert it to one of {names}"


def is_in_place(array: Any) -> bool:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"an operation in place needs a NumPy array, not a {type(array).__qualname__}")
    if not array.flags.writeable:
        raise ValueError("an operation in place needs an array that can be written to, and this one is read-only")
    return bool(array.flags.c_contiguous)


def empty_like(array: Array) -> Array:
    return np.empty(array.shape, array.dtype)


def copy_of_small(array: Any) -> Array | None:
    return array.copy() if type(array) is np.ndarray and array.nbytes <= SMALL_BYTES else None


def no_copy(array: Any) -> None:
    """Stands for `copy_of_small` in adapters of libraries for which a copy does not pay."""


def view(array: Array) -> tuple[int, int, tuple[int, ...]]:
    dtype, shape = spec_of(array)
    # bfloat16 has no letter in the buffer protocol
    return _core.address(array.view(np.uint16) if dtype == _BFLOAT16 else array), dtype, shape


def spec_of(array: Any) -> tuple[int, tuple[int, ...]]:
    """The number of its dtype and its shape, as the core has them: see `adapter.View`."""
    part = _PARTS.get(array.dtype)
    return (DTYPES[array.dtype], array.shape) if part is None else (DTYPES[part], (*array.shape, 2))


def shape_from_core(shape: list[int], like: Any) -> tuple[int, ...]:
    """The shape of an array of the dtype of `like` that has `shape` in the core."""
    return tuple(shape[:-1] if like.dtype in _PARTS else shape)


def view_in_place(array: Array) -> tuple[int, int, tuple[int, ...]] | None:
    return _core.writable_view(array)


def assign(target: Array, source: Array) -> None:
    target[...] = source


assign_host = assign


def note_change(array: Any) -> None:
    pass


def from_memory(memory: Array, shape: list[int], like: Array) -> Array:
    typed: Array = memory.view(like.dtype)
    return typed.reshape(shape_from_core(shape, like))


def returned(array: Array, like: Any) -> Array:
    return array


def rows(array: Array) -> Array:
    return array.reshape(1) if array.ndim == 0 else array


def sum_rows(numbers: Array, rows: Array, scale: float = 1.0) -> tuple[Array, Array]:
    """Returns each number once, in order, with `scale` times the sum of its rows, rounded as the sum of whole arrays.

    Args:
        numbers: of the rows, int64.
        rows: as many, of a dtype of the core or complex.
        scale: 1/n divides by n, also integers.
    """
    merged, places = np.unique(numbers, return_inverse=True)
    total = np.empty((merged.size, *rows.shape[1:]), rows.dtype)
    _core.sum_rows(view(places.reshape(-1)), view(prepare(rows)), view(total), scale)
    return merged, total


def is_finite(array: Array) -> bool:
    if array.dtype.kind in "biu":
        return True
    # The sum takes one look at each element, but may be too large itself.
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum(dtype=np.float32 if array.dtype.itemsize < 4 else None)
    return bool(np.isfinite(total) or np.isfinite(array).all())


def dtype_name(array: Array) -> str:
    return str(array.dtype.name)


def cast(array: Array, dtype_name: str) -> Array:
    return array.astype(dtype_of(dtype_name))


def dtype_of(wanted: Any) -> np.dtype[Any]:
    """Returns the dtype that is named, also by "bfloat16", which NumPy knows only after an import."""
    if isinstance(wanted, str) and wanted == "bfloat16":
        importlib.import_module("ml_dtypes")
    found: np.dtype[Any] = np.dtype(wanted)
    return found


def received_splits(numbers: list[int], sent: Any) -> Array:
    return np.array(numbers, np.int64)


def stream(array: Any) -> int | None:
    return None


def device(array: Any) -> int:
    return -1


def stack(arrays: Sequence[Any]) -> Array:
    return np.stack(arrays)


def on_host(array: Any) -> Array:
    return np.asarray(array)


in_host_memory = on_host


def at_place_of(array: Array, like: Any) -> Array:
    return array


def at_device_of(array: Any) -> AbstractContextManager[Any]:
    return _NOWHERE_ELSE


def on_device(array: Array, device: Any) -> Array:
    if not str(device).startswith("cpu"):
        raise ValueError(
            f"NumPy's arrays are in the host's memory, not on {device!r}; give an array of CuPy or PyTorch"
        )
    return array


def require_results() -> None:
    pass
