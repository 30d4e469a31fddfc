"""Gradients on the wire in fewer bits: compress before the allreduce, decompress after it."""

from __future__ import annotations

from typing import Any

from ringtrain.arrays.adapter import adapter_for


class Compressor:
    """Makes an array smaller for its way between the ranks, and makes the result what the array was.

    Subclass it for a compression of your own; both methods are static, so a class is passed, never an instance.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the array to send for `tensor`, and what `decompress` needs (anything; it never leaves this rank).

        An array that is not worth compressing is returned itself, not a copy.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return `tensor`, which came back, in the dtype that it had before `compress`; `ctx` is what that returned."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends every array as it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


def _narrow(array: Any, dtype_name: str) -> tuple[Any, Any]:
    """Cast float32 and float64 to another dtype and return the one to go back to; leave anything else alone."""
    adapter = adapter_for(array)
    original = adapter.dtype_name(array)
    if original not in ("float32", "float64"):
        return array, None
    return adapter.cast(array, dtype_name), original


def _widen(array: Any, original: str | None) -> Any:
    return array if original is None else adapter_for(array).cast(array, original)


class FP16Compressor(Compressor):
    """Sends float32 and float64 as float16: half or a quarter of the bytes, range +-65504.

    A sum beyond that range becomes inf. `gradient_predivide_factor` (or a prescale factor) keeps it inside.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _narrow(tensor, "float16")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return _widen(tensor, ctx)


class BF16Compressor(Compressor):
    """Sends float32 and float64 as bfloat16: the range of float32, 8 bits of precision."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _narrow(tensor, "bfloat16")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return _widen(tensor, ctx)


class Compression:
    """The compressions to choose from, for `compression=` of an allreduce or a DistributedOptimizer."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
