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


class _Cast(Compressor):
    """Sends float32 and float64 in another dtype, and leaves anything else alone."""

    _dtype_name: str

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        adapter = adapter_for(tensor)
        original = adapter.dtype_name(tensor)
        if original not in ("float32", "float64"):
            return tensor, None
        return adapter.cast(tensor, cls._dtype_name), original

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else adapter_for(tensor).cast(tensor, ctx)


class FP16Compressor(_Cast):
    """Sends float32 and float64 as float16: half or a quarter of the bytes, range +-65504.

    A sum beyond that range becomes inf. `gradient_predivide_factor` (or a prescale factor) keeps it inside.
    """

    _dtype_name = "float16"


class BF16Compressor(_Cast):
    """Sends float32 and float64 as bfloat16: the range of float32, 8 bits of precision."""

    _dtype_name = "bfloat16"


class Compression:
    """The compressions to choose from, for `compression=` of an allreduce or a DistributedOptimizer."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
