"""Arrays of libraries that ringtrain does not know, which show no more than a protocol. They are in CuPy's memory."""

from __future__ import annotations

import ctypes
from typing import Any

from ringtrain.arrays import dlpack


class OnlyDlpack:
    """Has `__dlpack__` and `__dlpack_device__`. Further arguments are claimed of the array."""

    def __init__(self, owned: Any, flags: int = 0, code: int | None = None, bits: int = 0, device: Any = None):
        self._owned = owned
        self._flags = flags
        self._code, self._bits = code, bits
        self._device = device or owned.__dlpack_device__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None, **others: Any) -> Any:
        capsule = self._owned.__dlpack__(stream=stream, max_version=max_version)
        tensor, _ = dlpack._tensor_in(capsule)
        if max_version is not None:
            offset = dlpack._VersionedTensor.tensor.offset - dlpack._VersionedTensor.flags.offset
            ctypes.c_uint64.from_address(ctypes.addressof(tensor) - offset).value = self._flags
        if self._code is not None:
            tensor.dtype.code, tensor.dtype.bits = self._code, self._bits
        return capsule


class UnversionedDlpack(OnlyDlpack):
    """From before DLPack 1.0."""

    def __dlpack__(self, *, stream: int | None = None) -> Any:  # type: ignore[override]
        return self._owned.__dlpack__(stream=stream)


class OnlyInterface:
    """Has `__cuda_array_interface__`. Further arguments replace what the array says."""

    def __init__(self, owned: Any, is_read_only: bool = False, **claims: Any):
        self._owned = owned
        self._is_read_only = is_read_only
        self._claims = claims

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = self._owned.__cuda_array_interface__
        return {**interface, "data": (interface["data"][0], self._is_read_only), **self._claims}
