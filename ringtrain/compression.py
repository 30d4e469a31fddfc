"""Compression: sends gradients in fewer bits. Compresses before the allreduce, decompresses after it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ringtrain.arrays.adapter import adapter_for


class Compressor:
    """Makes an array smaller before it is sent, and gives the result the dtype of the array.

    Subclass it for a compression of your own, and pass the class, or an instance if it has parameters.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the array to send for `tensor`, and what `decompress` needs (anything; it never leaves this rank).

        An array that is not worth compressing is returned itself, not a copy.
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the result `tensor` in the dtype that it had before `compress`; `ctx` is what `compress` returned."""
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


class QuantizingCompressor(NoneCompressor):
    """Sums the ranks of each host in float32, and sends these sums between hosts in two bits or one.

    The rounding error is kept under the name of the operation, and added to the next operation of that name.
    """

    def __init__(self, codes: str, name: str, threshold: float, force: bool) -> None:
        if not (threshold > 0 and math.isfinite(np.float32(threshold))):
            raise ValueError(f"{name}: the threshold must be a finite number above 0, but is {threshold}")
        self.codes = codes  # the core's word
        self.threshold = float(threshold)
        self.is_forced = force
        self._name = name

    def __repr__(self) -> str:
        return f"Compression.{self._name}({self.threshold:g})"


class BlockCodes:
    """Differences of parameters in codes of 8 or 4 bits, for `compression=` of `DiLoCo`; see `Compression.int8`.

    This is not a Compressor: codes with scales of their own cannot be summed on their way.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def __repr__(self) -> str:
        return f"Compression.int{self.bits}"


AnyCompressor = type[Compressor] | Compressor


class Compression:
    """The compressions to choose from, for `compression=` of an allreduce or a DistributedOptimizer.

    `int8` and `int4` are for `DiLoCo` alone: a block of 256 values shares one scale.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = BlockCodes(8)
    int4 = BlockCodes(4)

    @staticmethod
    def two_bit(threshold: float = 0.5, force: bool = False) -> QuantizingCompressor:
        """Send float32 between hosts in two bits: `threshold`, `-threshold` or 0, as MXNet's "2bit".

        For sums and averages of float32 with a name, over 2 to 16 hosts. The sum of the ranks of a host, after the
        prescale factor, is compared with the threshold. The rounding error is added to the next operation of that name.

        Args:
            threshold: about as large as a large gradient; smaller values wait until they have added up to it.
            force: use codes even if all ranks are on one host. This takes time, changes values, and saves nothing.

        Raises:
            ValueError: the threshold is not a finite number above 0.
        """
        return QuantizingCompressor("2bit", "two_bit", threshold, force)

    @staticmethod
    def one_bit(threshold: float = 0.5, force: bool = False) -> QuantizingCompressor:
        """Send float32 between hosts in one bit: 1 above the threshold, else -1, as MXNet's "1bit".

        Args and errors are those of `two_bit`.
        """
        return QuantizingCompressor("1bit", "one_bit", threshold, force)
