"""The value of a key that servers hold."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ringtrain.arrays import numpy as numpy_adapter
from ringtrain.arrays.adapter import adapter_for
from ringtrain.kvstore import places
from ringtrain.kvstore.entries import Entry
from ringtrain.kvstore.keys import Key


class Holder(Protocol):
    """Who asks the servers for a key."""

    def read_into(self, entry: ServedEntry, array: Any) -> None: ...

    def write(self, entry: ServedEntry, array: Any) -> None: ...


class ServedEntry(Entry):
    """`replica` is None, or the value on this worker, where its updates are made here."""

    __slots__ = ("dtype_of_numpy", "holder", "id", "num_update", "replica", "under_way", "version")

    def __init__(self, holder: Holder, number: int, key: Key, like: Any, version: int) -> None:
        super().__init__(key, like)
        self.stored = None
        self.holder = holder
        self.id = number
        self.version = version  # how often the directory has been told of a value
        self.num_update = 0  # of a synchronous store: the rounds that this worker has pushed
        self.dtype_of_numpy = numpy_adapter.cast(np.empty(0, np.float32), self.dtype_name).dtype
        self.replica: Any = None
        self.under_way: Any = None  # the latest push

    def value(self) -> Any:
        """A new array of NumPy, or the replica."""
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
