"""Gradients on the wire in fewer bits: compress before the allreduce, decompress after it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


class Compressor:
    """Makes an array smaller for its way between the ranks, and makes the result what the array was.

    Subclass it for a compression of your own; both methods are static, so a class is passed, never an instance.
    """

    @staticmethod
    def compress(array: Any) -> tuple[Any, Any]:
        """Return the array to send, and the context that `decompress` needs (anything; it never leaves this rank).

        An array that is not worth compressing is returned itself, not a copy.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(array: Any, context: Any) -> Any:
        """Return what came back, in the dtype that the array had before `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends every array as it is."""

    @staticmethod
    def compress(array: Any) -> tuple[Any, Any]:
        return array, None

    @staticmethod
    def decompress(array: Any, context: Any) -> Any:
        return array


def _narrow(array: Any, dtype: Any) -> tuple[Any, Any]:
    """Cast float32 and float64 to dtype and return the dtype to go back to; leave anything else alone."""
    original = np.dtype(array.dtype)
    if original.name not in ("float32", "float64"):
        return array, None
    return array.astype(dtype), original


def _widen(array: Any, original: Any) -> Any:
    return array if original is None else array.astype(original)


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16: half or a quarter of the bytes, range +-65504.

    A sum beyond that range becomes inf. `gradient_predivide_factor` (or a prescale factor) keeps it inside.
    """

    @staticmethod
    def compress(array: Any) -> tuple[Any, Any]:
        return _narrow(array, np.float16)

    @staticmethod
    def decompress(array: Any, context: Any) -> Any:
        return _widen(array, context)


class BF16Compressor(Compressor):
    """Sends float32 and float64 as bfloat16: the range of float32, 8 bits of precision."""

    @staticmethod
    def compress(array: Any) -> tuple[Any, Any]:
        return _narrow(array, ml_dtypes.bfloat16)

    @staticmethod
    def decompress(array: Any, context: Any) -> Any:
        return _widen(array, context)


class Compression:
    """The compressions to choose from, for `compression=` of an allreduce or a DistributedOptimizer.

    For arrays with `astype`: NumPy, CuPy, JAX, MXNet.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
