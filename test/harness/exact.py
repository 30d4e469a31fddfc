"""Inputs whose reduction is exact in every order, so that tests compare with `==`, and the naive reference.

All values are small integers: every partial result of up to MAX_RANKS ranks is representable in every dtype, int8 and
bfloat16 included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

# ringtrain's dtypes, in the order of csrc/base/dtype.h. Use ids=str in parametrize.
DTYPES = [
    np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", ml_dtypes.bfloat16, "float32", "float64"),
    )
]
FLOATS = DTYPES[-4:]
# One of each size, for what depends on no more than that; the 16-bit one is summed in float32.
DTYPE_OF_EACH_SIZE = [np.dtype(name) for name in ("int8", ml_dtypes.bfloat16, "float32", "int64")]

OPS = ["sum", "average", "min", "max", "product"]

COMPLEX = [np.dtype(name) for name in ("complex64", "complex128")]

# no dimension, no element, odd sizes, and more than fits into caches and mailboxes. Use ids=str in parametrize.
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7,), (33, 17), (1021,), (300_007,)]
_LARGE = SHAPES[-1]

MAX_RANKS = 10


def shapes_of(op: str) -> list[tuple[int, ...]]:
    """SHAPES, without the large one unless for a sum: how an array is cut and sent is the same for every op."""
    return [shape for shape in SHAPES if op == "sum" or shape != _LARGE]


def data(rank: int, shape: Sequence[int], dtype: Any, seed: int = 0, op: str = "sum") -> np.ndarray:
    """The array that `rank` contributes; any rank can make any other's.

    Args:
        rank: 0 to MAX_RANKS - 1.
        shape: of the array.
        dtype: one of DTYPES, or what numpy.dtype takes.
        seed: another seed gives other values.
        op: what the values are for. A product needs few factors; an average multiples of 12, which are exact for 1, 2,
            3, 4 and 6 ranks, however it is computed; sum, min and max take the same values.

    Raises ValueError for a rank for which nothing above is promised, and for an unknown op.
    """
    dtype = np.dtype(dtype)
    if not 0 <= rank < MAX_RANKS:
        raise ValueError(f"rank {rank}: the data are exact for {MAX_RANKS} ranks only")
    if op not in OPS:
        raise ValueError(f'op "{op}" is none of {OPS}')
    random = np.random.default_rng([seed, rank])
    if dtype.kind == "b":
        return np.asarray(random.integers(0, 2, shape), dtype)
    if op == "product":
        return _factors(random, rank, tuple(shape), dtype, seed)
    scale, limit = (12, _average_limit(dtype)) if op == "average" else (1, 7)
    return np.asarray(scale * random.integers(0 if dtype.kind == "u" else -limit, limit + 1, shape), dtype)


def complex_data_of_ranks(size: int, shape: Sequence[int], dtype: Any, op: str = "sum") -> list[np.ndarray]:
    """As `data_of_ranks`, with another imaginary part than real one."""
    parts = [data_of_ranks(size, shape, "float64", seed, op) for seed in (0, 1)]
    return [np.asarray(real + 1j * imaginary, dtype) for real, imaginary in zip(*parts, strict=True)]


def data_of_ranks(size: int, shape: Sequence[int], dtype: Any, seed: int = 0, op: str = "sum") -> list[np.ndarray]:
    """Returns the inputs of all ranks of a job of `size`."""
    return [data(rank, shape, dtype, seed, op) for rank in range(size)]


def gathered_together(size: int, many: Sequence[int], step: int) -> list[list[np.ndarray]]:
    """Returns the input of each rank to each of so many allgathers: other rows on each, none on some; some dtypes."""
    dtypes = ["float32", "uint8", "int64", "float16"]
    return [
        [
            data(rank, (rows * ((rank + i + step) % 3), 1 + i % 3), dtypes[i % len(dtypes)], seed=i + step)
            for rank in range(size)
        ]
        for i, rows in enumerate(many)
    ]


def reference(op: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The naive allreduce: reduce in float64 or int64, then cast back.

    bool: sum and max are "or", product and min are "and". An average of integers is truncated towards zero.
    """
    dtype = arrays[0].dtype
    wide = np.float64 if dtype in FLOATS else np.int64
    stacked = np.stack([array.astype(wide) for array in arrays])
    reductions: dict[str, Callable[..., Any]] = {
        "sum": np.sum,
        "average": np.sum,
        "min": np.min,
        "max": np.max,
        "product": np.prod,
    }
    reduced = np.asarray(reductions[op](stacked, axis=0))
    if op == "average" and dtype.kind != "b":
        reduced = reduced / len(arrays)  # the cast truncates
    return reduced.astype(dtype)


def require_equal(actual: Any, expected: np.ndarray) -> None:
    """Raise AssertionError unless dtype, shape and every element are the same; shows the first difference."""
    actual = np.asarray(actual)
    same_kind = (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert same_kind, f"{actual.dtype}{list(actual.shape)} instead of {expected.dtype}{list(expected.shape)}"
    different = np.argwhere(actual != expected)
    if len(different):
        index = tuple(map(int, different[0]))
        count = f"{len(different)} of {expected.size} elements differ"
        raise AssertionError(f"{count}, the first at {list(index)}: {actual[index]} instead of {expected[index]}")


def _average_limit(dtype: np.dtype) -> int:
    """Largest k for which the sum of MAX_RANKS values of 12 k fits; in bfloat16, 840 is 4 * 210."""
    return {"int8": 1, "uint8": 2}.get(dtype.name, 7)


def _factors(random: np.random.Generator, rank: int, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Mostly 1 and -1; each element has its 2 and its 3 on two ranks out of eight."""
    count = int(np.prod(shape))
    turn = (np.arange(count) + rank + seed) % 8
    magnitudes = np.where(turn == 0, 3, np.where(turn == 4, 2, 1))
    signs = 1 if dtype.kind == "u" else 2 * random.integers(0, 2, count) - 1
    return (magnitudes * signs).reshape(shape).astype(dtype)
