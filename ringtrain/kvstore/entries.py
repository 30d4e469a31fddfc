"""The keys that have values, and whether what a call gives fits them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from ringtrain.arrays.adapter import adapter_for
from ringtrain.handles import Handle
from ringtrain.kvstore import places
from ringtrain.kvstore.compression import Residuals
from ringtrain.kvstore.keys import Key, grouped


class Entry:
    """The value of one key."""

    __slots__ = ("dtype", "dtype_name", "free", "key", "name", "residuals", "rounds", "shape", "stored")

    def __init__(self, key: Key, stored: Any) -> None:
        self.key = key
        self.name = str(key)
        self.shape = tuple(stored.shape)
        self.dtype_name = adapter_for(stored).dtype_name(stored)
        self.dtype = stored.dtype  # of the library; quicker to compare
        self.stored: Any = stored  # None where pushpull has given it away
        self.free: Any = None  # memory of the size of the value that nobody uses
        self.rounds: deque[tuple[Handle[Any], Any]] = deque()  # pushed, not in the value yet; and where the sums are
        self.residuals: Residuals = {}

    def value(self) -> Any:
        """The array of the value. Raises ValueError where the store has none."""
        if self.stored is None:
            raise ValueError(
                f"key {self.key!r}: pushpull without an updater has put its value where it was wanted, and the store "
                "has none; use push and pull"
            )
        return self.stored

    def overwrite(self, array: Any) -> None:
        """Give the key another value. Raises as `value`."""
        places.copy_into(self.value(), array)

    def move_to(self, stored: Any) -> None:
        """Keep the value in another array, of the same shape and dtype."""
        self.stored, self.dtype = stored, stored.dtype


class Entries(dict[Key, Entry]):
    """By key; all keys are of one kind. Each error names the call."""

    def find(self, call: str, key: Key) -> Entry:
        entry = self.get(key)
        if entry is None:
            self.require_kind(call, [key])
            raise KeyError(f"{call}: key {key!r} has no value; give it one with init or broadcast")
        return entry

    def require_kind(self, call: str, keys: Iterable[Key]) -> None:
        """Raises TypeError unless keys are of the same kind, int or str, as those that are there."""
        known, first = next(iter(self), None), next(iter(keys), None)
        if known is not None and first is not None and type(known) is not type(first):
            raise TypeError(
                f"{call}: mixed key types: {first!r} is {type(first).__name__}, but this store has "
                f"{type(known).__name__} keys, such as {known!r}"
            )

    def pushed(self, call: str, key: Any, value: Any) -> list[tuple[Entry, list[Any]]]:
        """The values of each key, as arrays that can be read."""
        groups = []
        for one, values in grouped(call, key, value).items():
            entry = self.find(call, one)
            arrays = [places.readable(array) for array in values]
            for array in arrays:
                require_fitting(call, entry, array)
            groups.append((entry, arrays))
        return groups

    def pulled(self, call: str, key: Any, out: Any) -> list[tuple[Entry, list[Any]]]:
        """The arrays that get the value of each key."""
        groups = []
        for one, outs in grouped(call, key, out).items():
            entry = self.find(call, one)
            for array in outs:
                if places.shape_of(array) != entry.shape:
                    raise ValueError(
                        f"{call}: key {one!r} has shape {entry.shape}, but out has {places.shape_of(array)}"
                    )
                adapter_for(array).is_in_place(array)  # raises where it cannot be written to
            groups.append((entry, outs))
        return groups


def require_fitting(call: str, entry: Entry, array: Any) -> None:
    """Raises ValueError for another shape or dtype than the key has."""
    if array.shape != entry.shape:
        raise ValueError(f"{call}: key {entry.key!r} has shape {entry.shape}, but the value has {tuple(array.shape)}")
    if array.dtype == entry.dtype:
        return
    dtype = adapter_for(array).dtype_name(array)
    if dtype != entry.dtype_name and not (dtype == "float32" and entry.dtype_name in places.SIXTEEN_BITS):
        raise ValueError(f"{call}: key {entry.key!r} is {entry.dtype_name}, but the value is {dtype}; convert it")
