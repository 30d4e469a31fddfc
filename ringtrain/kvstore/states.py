"""What a store keeps, as named arrays of NumPy, and in files: .npz without pickle."""

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
from ringtrain.record.whole_file import whole_file

Arrays = dict[str, np.ndarray[Any, Any]]

_FORMAT = "ringtrain kvstore 1"
# The one entry that is no array of a key, whose names all have a slash.
_HEAD = "head"
# NumPy's format has no word for it, so it is written as integers.
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Part:
    """An array or a number within the state that an optimizer made, by where it is in it."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray[Any, Any]]
    write: Callable[[np.ndarray[Any, Any]], None]


def parts_of(state: Any, name: str = "state") -> Iterator[Part]:
    """All parts of a state of arrays, numbers and None in dicts, lists and tuples, nested as you like.

    Raises:
        TypeError: it has something else in it, or a number where it cannot be written.
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
    """What was in a file. `configuration` is None where the optimizer was not saved with its states."""

    arrays: Arrays
    configuration: dict[str, Any] | None


def save(path: str | Path, arrays: Arrays, configuration: dict[str, Any] | None = None) -> None:
    """Write the arrays, whose names have a slash; the file is there when it is whole, and the old one until then."""
    stored = {name: array.view(np.uint16) if array.dtype == _BFLOAT16 else array for name, array in arrays.items()}
    bfloat16 = [name for name, array in arrays.items() if array.dtype == _BFLOAT16]
    head = json.dumps({"format": _FORMAT, "bfloat16": bfloat16, "configuration": configuration})
    with whole_file(Path(path)) as file, zipfile.ZipFile(file, "w") as members:
        for name, array in {_HEAD: np.array(head), **stored}.items():
            with members.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def load(path: str | Path) -> Saved:
    """Read what `save` has written.

    Raises:
        OSError: there is no such file.
        ValueError: it is another kind of file.
    """
    try:
        # As a file, since what is no .npz at all would be unpickled, or refused as a pickle.
        with zipfile.ZipFile(path) as members:
            arrays = {name.removesuffix(".npy"): _read(members, name) for name in members.namelist()}
        head = json.loads(str(arrays.pop(_HEAD)))
        if head["format"] != _FORMAT:
            raise ValueError(head["format"])
        for name in head["bfloat16"]:
            arrays[name] = arrays[name].view(_BFLOAT16)
        return Saved(arrays, head["configuration"])
    except (zipfile.BadZipFile, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file that a store has written: {error}") from None


def _read(members: zipfile.ZipFile, name: str) -> np.ndarray[Any, Any]:
    with members.open(name) as member:
        array: np.ndarray[Any, Any] = np.lib.format.read_array(member, allow_pickle=False)
    return array
