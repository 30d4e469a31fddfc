"""The contents of a store as named arrays of NumPy, and in files: .npz without pickle."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ringtrain.arrays.adapter import adapter_for
from ringtrain.pickling import whole_file

Arrays = dict[str, np.ndarray[Any, Any]]

_FORMAT = "ringtrain kvstore 1"
# The one entry that does not belong to a key. The names of the others have a slash.
_HEAD = "head"
# NumPy's format does not know it, so it is written as integers.
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Part:
    """An array or a number within the state of an optimizer, with its path as name."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray[Any, Any]]
    write: Callable[[np.ndarray[Any, Any]], None]


def parts_of(state: Any, name: str = "state") -> Iterator[Part]:
    """Yields the parts of a state of arrays, numbers and None in nested dicts, lists and tuples.

    Raises:
        TypeError: it has an object of another type, or a number in a tuple, which cannot be written.
    """
    if isinstance(state, (dict, list, tuple)):
        for place, value in state.items() if isinstance(state, dict) else enumerate(state):
            inner = str(place) if name == "state" and isinstance(state, dict) else f"{name}.{place}"
            if isinstance(value, (bool, int, float)) and not isinstance(state, tuple):
                yield _number(inner, state, place)
            else:
                yield from parts_of(value, inner)
    elif state is not None:
        yield _array(name, state)


def _number(name: str, holder: Any, place: Any) -> Part:
    def write(value: np.ndarray[Any, Any]) -> None:
        holder[place] = value.item()

    return Part(name, (), lambda: np.asarray(holder[place]), write)


def _array(name: str, array: Any) -> Part:
    if not hasattr(array, "shape"):
        raise TypeError(
            f"the optimizer keeps a {type(array).__qualname__} as {name} of its state; a store can keep arrays, and "
            "numbers in dicts and lists"
        )
    adapter = adapter_for(array)
    shape = tuple(array.shape)
    return Part(name, shape, lambda: adapter.on_host(array), lambda values: adapter.assign_host(array, values))


class Saved(NamedTuple):
    """The contents of a file. `configuration` is None if the optimizer was not saved with its states."""

    arrays: Arrays
    configuration: dict[str, Any] | None


def save(path: str | Path, arrays: Arrays, configuration: dict[str, Any] | None = None) -> None:
    """Writes arrays, whose names have a slash. The old file is replaced when the new one is complete."""
    stored = {name: array.view(np.uint16) if array.dtype == _BFLOAT16 else array for name, array in arrays.items()}
    bfloat16 = [name for name, array in arrays.items() if array.dtype == _BFLOAT16]
    head = json.dumps({"format": _FORMAT, "bfloat16": bfloat16, "configuration": configuration})
    with whole_file(Path(path)) as file, zipfile.ZipFile(file, "w") as members:
        for name, array in {_HEAD: np.array(head), **stored}.items():
            with members.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def load(path: str | Path) -> Saved:
    """Reads a file of `save`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is another kind of file.
    """
    try:
        # Not with np.load, which would try to unpickle a file of another format.
        with zipfile.ZipFile(path) as members:
            arrays = {name.removesuffix(".npy"): _read(members, name) for name in members.namelist()}
        head = json.loads(str(arrays.pop(_HEAD)))
        if head["format"] != _FORMAT:
            raise ValueError(head["format"])
        for name in head["bfloat16"]:
            arrays[name] = arrays[name].view(_BFLOAT16)
        return Saved(arrays, head["configuration"])
    except (zipfile.BadZipFile, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} was not written by a store: {error}") from None


def _read(members: zipfile.ZipFile, name: str) -> np.ndarray[Any, Any]:
    with members.open(name) as member:
        array: np.ndarray[Any, Any] = np.lib.format.read_array(member, allow_pickle=False)
    return array
