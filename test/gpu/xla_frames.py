"""Calls of the functions that XLA calls, with frames made by hand: as csrc/xla/ffi.h writes XLA's interface down.

No program for a GPU can be run where there is none. Its handlers can be called as XLA would call them all the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

import ringtrain._core as _core

_ELEMENTS = {"int32": 4, "int64": 5, "uint32": 9, "float16": 10, "float32": 11, "float64": 12}
_EXECUTE = 3
_P, _SIZE, _INT, _LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64


def _struct(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": [("size", _SIZE), ("extension", _P), *fields.items()]})


_Buffer = _struct("Buffer", element=_INT, data=_P, rank=_LONG, dimensions=_P)
_Arguments = _struct("Arguments", count=_LONG, types=_P, items=_P)
_Attributes = _struct("Attributes", count=_LONG, types=_P, names=_P, items=_P)
_FailureCreate = _struct("FailureCreate", message=ctypes.c_char_p, code=_INT)
_StreamGet = _struct("StreamGet", context=_P, stream=_P)
_Version = _struct("Version", major=_INT, minor=_INT)
_CREATE = ctypes.CFUNCTYPE(_P, ctypes.POINTER(_FailureCreate))
_GET_STREAM = ctypes.CFUNCTYPE(_P, ctypes.POINTER(_StreamGet))
_Api = _struct(
    "Api",
    version=_Version,
    internal=_P,
    create_failure=_CREATE,
    unused=_P * 3,
    get_stream=_GET_STREAM,
    more=_P * 11,
)
_Frame = _struct(
    "Frame", api=_P, context=_P, stage=_INT, arguments=_Arguments, results=_Arguments, attributes=_Attributes, future=_P
)


class _Bytes(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_char_p), ("length", _SIZE))


class _Scalar(ctypes.Structure):
    _fields_ = (("element", _INT), ("value", _P))


class XlaError(Exception):
    """Returns the answer of a handler."""


class Stream:
    """XLA, on a stream of a GPU. Arrays have an address, a dtype and a shape, as those of CuPy."""

    def __init__(self, stream: int) -> None:
        self._failures: list[bytes] = []

        def create_failure(asked: Any) -> int:
            self._failures.append(asked.contents.message)
            return 1

        def get_stream(asked: Any) -> None:
            asked.contents.stream = stream

        self._kept = (_CREATE(create_failure), _GET_STREAM(get_stream))
        self._api = _Api(ctypes.sizeof(_Api), None, create_failure=self._kept[0], get_stream=self._kept[1])
        self._handlers = _core.xla_handlers(1)["CUDA"]

    def call(self, handler: str, arguments: Sequence[Any], results: Sequence[Any], /, **attributes: Any) -> None:
        """Raises XlaError with the message of the failure that XLA would have."""
        kept: list[Any] = []
        frame = _Frame(ctypes.sizeof(_Frame), None, ctypes.addressof(self._api), None, _EXECUTE)
        frame.arguments = _arrays(arguments, kept)
        frame.results = _arrays(results, kept)
        frame.attributes = _attributes(attributes, kept)
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = _P, [ctypes.py_object, ctypes.c_char_p]
        function = ctypes.CFUNCTYPE(_P, _P)(address(self._handlers[handler], None))
        if function(ctypes.addressof(frame)):
            raise XlaError(self._failures.pop().decode())


def _table(kind: Any, values: Sequence[Any], kept: list[Any]) -> int:
    table = (kind * max(len(values), 1))(*values)
    kept.append(table)
    return ctypes.addressof(table)


def _arrays(arrays: Sequence[Any], kept: list[Any]) -> Any:
    buffers = []
    for array in arrays:
        shape = _table(_LONG, array.shape, kept)
        element = _ELEMENTS[np.dtype(array.dtype).name]
        buffers.append(_Buffer(ctypes.sizeof(_Buffer), None, element, array.data.ptr, len(array.shape), shape))
    kept.extend(buffers)
    items = _table(_P, [ctypes.addressof(one) for one in buffers], kept)
    return _Arguments(ctypes.sizeof(_Arguments), None, len(arrays), None, items)


def _attributes(attributes: dict[str, Any], kept: list[Any]) -> Any:
    names, values = [], []
    for name, value in attributes.items():
        if isinstance(value, str):
            item: Any = _Bytes(value.encode(), len(value.encode()))
        else:
            kind, element = (ctypes.c_double, "float64") if isinstance(value, float) else (_LONG, "int64")
            number = kind(value)
            kept.append(number)
            item = _Scalar(_ELEMENTS[element], ctypes.addressof(number))
        names.append(_Bytes(name.encode(), len(name.encode())))
        values.append(item)
    kept.extend((*names, *values))
    return _Attributes(
        ctypes.sizeof(_Attributes),
        None,
        len(names),
        None,
        _table(_P, [ctypes.addressof(one) for one in names], kept),
        _table(_P, [ctypes.addressof(one) for one in values], kept),
    )
