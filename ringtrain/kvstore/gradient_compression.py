"""Gradients that a store sends in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

import ringtrain._core as _core
from ringtrain.arrays import numpy as numpy_adapter
from ringtrain.arrays.adapter import adapter_for

_CASTS = {"fp16": "float16", "bf16": "bfloat16"}
_QUANTIZERS = ("2bit", "1bit")
_THRESHOLD = 0.5

Array = np.ndarray[Any, Any]
# The error of the last encoding of each value, by its position among the values of the key.
Residuals = dict[int, Array]


class GradientCompression(NamedTuple):
    """The parameters of `set_gradient_compression`."""

    kind: str
    threshold: float = 0.0  # of the quantizers

    @staticmethod
    def of(params: Mapping[str, Any]) -> GradientCompression:
        """Raises ValueError for an unknown kind or argument, or a threshold that is not positive, or 0 of 1bit."""
        if not isinstance(params, Mapping) or "type" not in params:
            raise ValueError(
                f'set_gradient_compression takes a dict such as {{"type": "2bit", "threshold": 0.5}}, not {params!r}'
            )
        kind = params["type"]
        if kind not in _CASTS and kind not in _QUANTIZERS:
            raise ValueError(f'gradient compression must be one of {", ".join((*_QUANTIZERS, *_CASTS))}, not "{kind}"')
        takes = {"type", "threshold"} if kind in _QUANTIZERS else {"type"}
        unknown = sorted(set(params) - takes)
        if unknown:
            raise ValueError(f'gradient compression "{kind}" does not take {", ".join(unknown)}')
        if kind in _CASTS:
            return GradientCompression(kind)
        threshold = float(params.get("threshold", _THRESHOLD))
        is_valid = threshold > 0 or (threshold == 0 and kind == "1bit")
        if not is_valid or threshold == float("inf"):
            wanted = "finite" if threshold > 0 else "positive"
            raise ValueError(f"the threshold of gradient compression must be {wanted}, but is {threshold}")
        return GradientCompression(kind, threshold)

    @property
    def dtype(self) -> str | None:
        """The dtype in which values are sent; None for codes."""
        return _CASTS.get(self.kind)

    def encode(self, value: Any, residuals: Residuals, place: int = 0) -> Array:
        """Returns the codes of a float32 value of any library. Their error is added to the next value."""
        values = np.ascontiguousarray(adapter_for(value).on_host(value))
        if place not in residuals:
            residuals[place] = np.zeros_like(values)
        codes = np.empty(_core.quantized_bytes(self.kind, values.size), np.uint8)
        view = numpy_adapter.view
        _core.quantize(self.kind, self.threshold, view(values), view(residuals[place]), view(codes))
        return codes

    def decode(self, codes: Array, values: Array, add: bool = False) -> None:
        """Writes decoded values to float32 values in the host's memory, or adds them."""
        _core.dequantize(self.kind, self.threshold, numpy_adapter.view(codes), numpy_adapter.view(values), add)

    def rounded(self, value: Any, residuals: Residuals, place: int = 0) -> Any:
        """Returns the value as its receivers decode it: a new array of the same dtype, library and device."""
        adapter = adapter_for(value)
        if self.dtype is not None:
            return adapter.cast(adapter.cast(value, self.dtype), adapter.dtype_name(value))
        new = adapter.empty_like(value)
        self.round_into(new, value, residuals, place)
        return new

    def round_into(self, target: Any, value: Any, residuals: Residuals, place: int = 0) -> None:
        """Writes the value as its receivers decode it. For the types with codes."""
        adapter, codes = adapter_for(target), self.encode(value, residuals, place)
        if adapter.device(target) < 0:
            self.decode(codes, adapter.on_host(target))
            return
        values = np.empty(tuple(target.shape), np.float32)
        self.decode(codes, values)
        adapter.assign_host(target, values)


def require_compressible(key: int | str, dtype_name: str) -> None:
    """Raises ValueError unless it is float32."""
    if dtype_name != "float32":
        raise ValueError(f"key {key!r} is {dtype_name}, but gradient compression is for float32")
