"""Compression: sends gradients in fewer bits. Compresses before the allreduce, decompresses after it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
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


class PowerSGD:
    """Gradients as two thin factors, for `compression=` of a DistributedOptimizer; see `Compression.powersgd`.

    This is not a Compressor: a gradient takes two sums, of which the second needs the result of the first.
    """

    def __init__(
        self,
        rank: int,
        start_step: int,
        min_compression_rate: float,
        use_error_feedback: bool,
        warm_start: bool,
        random_seed: int,
    ) -> None:
        for name, value, least in (("rank", rank, 1), ("start_step", start_step, 0), ("random_seed", random_seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"powersgd: {name} must be an integer, not {value!r}")
            if value < least:
                raise ValueError(f"powersgd: {name} must be at least {least}, not {value}")
        if isinstance(min_compression_rate, bool) or not isinstance(min_compression_rate, (int, float)):
            raise TypeError(f"powersgd: min_compression_rate must be a number, not {min_compression_rate!r}")
        if not (min_compression_rate > 0 and math.isfinite(min_compression_rate)):
            raise ValueError(f"powersgd: min_compression_rate must be a finite number above 0: {min_compression_rate}")
        self.rank = rank
        self.start_step = start_step
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = bool(use_error_feedback)
        self.warm_start = bool(warm_start)
        self.random_seed = random_seed

    def pays(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of that shape is sent as factors: it has two dimensions, and these are small enough."""
        if len(shape) < 2:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        is_smaller = (rows + columns) * self.rank * self.min_compression_rate < rows * columns
        return is_smaller and self.rank <= min(rows, columns)

    def first_factor(self, name: str, columns: int, step: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the factor to begin with, float64[rank, columns]: random numbers, the same ones on all ranks."""
        seed = [self.random_seed, zlib.crc32(name.encode()), 0 if self.warm_start else step]
        return np.random.default_rng(seed).standard_normal((self.rank, columns))

    def second_name(self, name: str) -> str:
        """Return the name of the second factor of a gradient.

        It tells how the first factor was made: ranks with another one would average numbers that mean nothing together,
        and so do not find each other.
        """
        seed = "" if self.random_seed == 0 else f", random_seed={self.random_seed}"
        start = "" if self.warm_start else ", warm_start=False"
        return f"{name}.<Q{seed}{start}>"

    def __repr__(self) -> str:
        return f"Compression.powersgd({self.rank})"


AnyCompressor = type[Compressor] | Compressor
GradientCompression = AnyCompressor | PowerSGD


class Compression:
    """The compressions to choose from, for `compression=` of an allreduce or a DistributedOptimizer.

    `int8` and `int4` are for `DiLoCo` alone: a block of 256 values shares one scale. `powersgd` is for optimizers.
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

    @staticmethod
    def powersgd(
        rank: int,
        *,
        start_step: int = 0,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        random_seed: int = 0,
    ) -> PowerSGD:
        """Send gradients as two thin factors: PowerSGD (arXiv 1905.13727), for op=Average or Sum of an optimizer.

        A gradient of n x m numbers (all dimensions but the first are one) becomes n x rank and m x rank numbers. Those
        of float16 and bfloat16 are computed, and sent, in float32. Vectors, and gradients for which this does not pay,
        travel whole. Mirrors `PowerSGDState` of PyTorch.

        Args:
            rank: of the approximation; at least 1. 1 to 4 in the paper.
            start_step: steps in which gradients travel whole before the first factors.
            min_compression_rate: factors travel where they have so many times fewer numbers than the gradient.
            use_error_feedback: keep the rest of each gradient on its rank, and add it to the next gradient.
            warm_start: begin with the factor of the step before; otherwise with other random numbers in each step.
            random_seed: of the first factors; the same on all ranks.

        Raises:
            TypeError: an argument is not a number. ValueError: it is out of its range.
        """
        return PowerSGD(rank, start_step, min_compression_rate, use_error_feedback, warm_start, random_seed)
