"""The types of stores, and keys: as a call gives them, and those of a store with their values."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringtrain.arrays import numpy as numpy_adapter
from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.handles import Handle
from ringtrain.kvstore import places
from ringtrain.kvstore.gradient_compression import Residuals
from ringtrain.kvstore.update_rules import Rates

Key = int | str
# The values of each key, in the order of the first use of the keys.
Groups = dict[Key, list[Any]]


def grouped(call: str, key: Any, value: Any) -> Groups:
    """Groups the arguments of a call: a value or a list of values for a key, or for each of a list of keys.

    A repeated key has the values of all its places.

    Raises:
        TypeError: a key is neither int nor str, or one list has both.
        ValueError: the numbers of keys and values differ, or a key has no value.
    """
    if isinstance(key, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(key):
            given = f"{len(value)} values" if isinstance(value, list | tuple) else "one value"
            raise ValueError(f"{call}: a list of {len(key)} keys takes a list of as many values, not {given}")
        groups: Groups = {}
        for one, of_one in zip(key, value, strict=True):
            values = of_one if isinstance(of_one, list | tuple) else (of_one,)
            groups.setdefault(_checked_key(call, one), []).extend(values)
        _require_one_kind(call, groups)
    else:
        groups = {_checked_key(call, key): list(value) if isinstance(value, list | tuple) else [value]}
    for one, values in groups.items():
        if not values:
            raise ValueError(f"{call}: key {one!r} has no value in this call")
    return groups


def listed(call: str, key: Any) -> list[Key]:
    """Returns the keys of a call without values."""
    keys = [_checked_key(call, one) for one in key] if isinstance(key, list | tuple) else [_checked_key(call, key)]
    _require_one_kind(call, keys)
    return keys


def _checked_key(call: str, key: Any) -> Key:
    if type(key) is str or type(key) is int:
        return key
    if isinstance(key, str):
        return str(key)
    if not isinstance(key, bool):
        try:
            return operator.index(key)
        except TypeError:
            pass
    raise TypeError(f"{call}: a key is an int or a str, not {type(key).__name__} {key!r}")


def _require_one_kind(call: str, keys: Any) -> None:
    if len({type(one) for one in keys}) > 1:
        raise TypeError(f"{call}: mixed key types: a store has int keys or str keys, not both")


class Kind(NamedTuple):
    """A type of store."""

    name: str
    is_distributed: bool = False
    on_device: bool = False  # sums and values are on the devices of the arrays
    can_update: bool = True
    updates_by_default: bool = True  # the default of trainers
    is_asynchronous: bool = False  # each push is an update of its own


KINDS = {
    kind.name: kind
    for kind in (
        Kind("local"),
        Kind("local_update_cpu"),
        Kind("local_allreduce_cpu", updates_by_default=False),
        Kind("device", on_device=True),
        Kind("local_allreduce_device", on_device=True),
        Kind("nccl", on_device=True),
        Kind("dist", is_distributed=True),
        Kind("dist_sync", is_distributed=True),
        Kind("dist_sync_device", is_distributed=True, on_device=True),
        Kind("dist_device_sync", is_distributed=True, on_device=True),
        Kind("dist_async", is_distributed=True, is_asynchronous=True),
        Kind("dist_async_device", is_distributed=True, on_device=True, is_asynchronous=True),
        Kind("dist_device_async", is_distributed=True, on_device=True, is_asynchronous=True),
        Kind("horovod", is_distributed=True, on_device=True, can_update=False),
        Kind("ringtrain", is_distributed=True, on_device=True, can_update=False),
    )
}


class Entry:
    """The value of one key."""

    __slots__ = ("dtype", "dtype_name", "free", "key", "name", "residuals", "rounds", "shape", "stored")

    def __init__(self, key: Key, stored: Any) -> None:
        self.key = key
        self.name = str(key)
        self.shape = tuple(stored.shape)
        self.dtype_name = adapter_for(stored).dtype_name(stored)
        self.dtype = stored.dtype  # of the library; quicker to compare
        self.stored: Any = stored  # None after pushpull has given it away
        self.free: Any = None  # unused memory of the size of the value
        # Pending pushes, their sums, and the rates of the updates by these.
        self.rounds: deque[tuple[Handle[Any], Any, Rates | None]] = deque()
        self.residuals: Residuals = {}

    def value(self) -> Any:
        """Returns the array of the value. Raises ValueError if the store has none."""
        if self.stored is None:
            raise ValueError(
                f"key {self.key!r}: pushpull without an updater has put its value into `out`, and the store "
                "has none; use push and pull"
            )
        return self.stored

    def overwrite(self, array: Any) -> None:
        """Gives the key another value. Raises as `value`."""
        places.copy_into(self.value(), array)

    def move_to(self, stored: Any) -> None:
        """Keeps the value in another array, of the same shape and dtype."""
        self.stored, self.dtype = stored, stored.dtype


class Entries(dict[Key, Entry]):
    """The entries of a store by key; all keys are of one kind. Each error names the call."""

    def find(self, call: str, key: Key) -> Entry:
        entry = self.get(key)
        if entry is None:
            self.require_kind(call, [key])
            raise KeyError(f"{call}: key {key!r} has no value; give it one with init or broadcast")
        return entry

    def require_kind(self, call: str, keys: Iterable[Key]) -> None:
        """Raises TypeError unless keys are of the same kind, int or str, as those of the store."""
        known, first = next(iter(self), None), next(iter(keys), None)
        if known is not None and first is not None and type(known) is not type(first):
            raise TypeError(
                f"{call}: mixed key types: {first!r} is {type(first).__name__}, but this store has "
                f"{type(known).__name__} keys, such as {known!r}"
            )

    def pushed(self, call: str, key: Any, value: Any) -> list[tuple[Entry, list[Any]]]:
        """Returns the entry and the readable values of each key."""
        groups = []
        for one, values in grouped(call, key, value).items():
            entry = self.find(call, one)
            arrays = [places.readable(array) for array in values]
            for array in arrays:
                require_fitting(call, entry, array)
            groups.append((entry, arrays))
        return groups

    def pulled(self, call: str, key: Any, out: Any) -> list[tuple[Entry, list[Any]]]:
        """Returns the entry of each key and the arrays that get its value."""
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
    """Raises ValueError unless the array has the shape and dtype of the key."""
    if array.shape != entry.shape:
        raise ValueError(f"{call}: key {entry.key!r} has shape {entry.shape}, but the value has {tuple(array.shape)}")
    if array.dtype == entry.dtype:
        return
    require_dtype(call, entry, adapter_for(array).dtype_name(array))


def require_dtype(call: str, entry: Entry, dtype: str) -> None:
    """Raises ValueError unless values of the dtype may be pushed to the key, whole ones or rows."""
    if not is_fitting(entry, dtype):
        raise ValueError(f"{call}: key {entry.key!r} is {entry.dtype_name}, but the value is {dtype}; convert it")


def is_fitting(entry: Entry, dtype: str) -> bool:
    """Whether it is the dtype of the key, or float32 for 16-bit floats."""
    return dtype == entry.dtype_name or (dtype == "float32" and entry.dtype_name in places.SIXTEEN_BITS)


class Holder(Protocol):
    """Reads and writes values at the servers."""

    def read_into(self, entry: ServedEntry, array: Any) -> None: ...

    def write(self, entry: ServedEntry, array: Any) -> None: ...


class ServedEntry(Entry):
    """A key whose value servers hold. `replica` is None, or the value on this worker if updates are made here."""

    __slots__ = ("dtype_of_numpy", "holder", "id", "num_update", "replica", "request", "version")

    def __init__(self, holder: Holder, number: int, key: Key, like: Any, version: int) -> None:
        super().__init__(key, like)
        self.stored = None
        self.holder = holder
        self.id = number
        self.version = version  # how many values of it were published
        self.num_update = 0  # of a synchronous store: rounds that this worker has pushed
        self.dtype_of_numpy = numpy_adapter.cast(np.empty(0, np.float32), self.dtype_name).dtype
        self.replica: Any = None
        self.request: Any = None  # the latest push

    def value(self) -> Any:
        """Returns a new array of NumPy, or the replica."""
        if self.replica is not None:
            return self.replica
        array = np.empty(self.shape, self.dtype_of_numpy)
        self.holder.read_into(self, array)
        return array

    def overwrite(self, array: Any) -> None:
        here = np.ascontiguousarray(adapter_for(array).on_host(array), dtype=self.dtype_of_numpy)
        self.holder.write(self, here)
        if self.replica is not None:
            places.copy_into(self.replica, here)
