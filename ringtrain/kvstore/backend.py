"""Backends carry out the calls of a KVStore: the interface, and the backend of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ringtrain.arrays import numpy as numpy_adapter
from ringtrain.arrays.adapter import adapter_for
from ringtrain.errors import MismatchError
from ringtrain.handles import Pending
from ringtrain.kvstore import places, state_files
from ringtrain.kvstore.entries import Entries, Entry, Key, Kind
from ringtrain.kvstore.gradient_compression import GradientCompression
from ringtrain.kvstore.row_sparse import Array, RowSparse, sum_of
from ringtrain.kvstore.state_files import Arrays
from ringtrain.kvstore.updaters import LocalUpdater, Updater

# A function of key, sum and stored value, which it changes.
Function = Callable[[Key, Any, Any], object]
# Keys with the values or the arrays that a call has given them.
Groups = list[tuple[Entry, list[Any]]]
_VALUE, _STATE = "value/", "state/"


class Backend:
    """Holds the values of a KVStore, which has checked the arguments. One thread at a time.

    Methods that concern other workers are those of a store with one worker.
    """

    rank = local_rank = 0
    num_local_workers = 1
    is_recovery = False

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.entries = Entries()
        self.updater: Updater | None = None
        self.function: Function | None = None  # of set_updater
        self.compression: GradientCompression | None = None

    # --------------------------------------------------------------------------------------------------- values

    def begin(self, arrays: dict[Key, Any]) -> None:
        """Gives each key the value that its array has on rank 0: a copy, in the entry that it has or in a new one."""
        raise NotImplementedError

    def push(self, groups: Groups, priority: int, copies: bool) -> list[Pending[Any]]:
        """Begins to push. Returns what to wait for before the values may be changed."""
        raise NotImplementedError

    def pull(self, groups: Groups, priority: int) -> None:
        """Fills the arrays of each key with its value."""
        for entry, outs in groups:
            value = self.value(entry)
            for one in outs:
                places.copy_into(one, value)

    def pushpull(self, groups: list[tuple[Entry, list[Any], list[Any]]], priority: int) -> None:
        """Pushes the first list of each key and fills the second with the result."""
        raise NotImplementedError

    def push_rows(self, entry: Entry, values: Sequence[RowSparse], priority: int) -> list[Pending[Any]]:
        """Pushes rows; here as a whole value with zeros in all others."""
        dtype = numpy_adapter.cast(np.empty(0, np.float32), entry.dtype_name).dtype
        total = sum_of(entry.key, values, entry.shape, dtype)
        whole = np.zeros(entry.shape, dtype)
        whole[total.indices] = total.rows
        return self.push([(entry, [whole])], priority, copies=False)

    def pull_rows(self, entry: Entry, numbers: Array, priority: int) -> Array:
        """Returns a new array of rows that the key has."""
        value = self.value(entry)
        return np.ascontiguousarray(adapter_for(value).on_host(value)[numbers])

    def finish(self, entry: Entry) -> None:
        """Waits until the value has everything that this worker has pushed."""

    def value(self, entry: Entry) -> Any:
        self.finish(entry)
        return entry.value()

    # -------------------------------------------------------------------------------------------------- updates

    def use(self, updater: LocalUpdater | None, function: Function | None) -> None:
        """Updates values with one of both from now on, on all workers alike; all own pushes are done."""
        self.updater, self.function = updater, function

    def _apply(self, entry: Entry, total: Any) -> bool:
        """Updates the value of a key with a sum, or overwrites it. Returns whether `total` has become the value."""
        if not self._updates():
            return self._assign(entry, total)
        stored = entry.value()
        gradient = places.like(total, stored)
        with adapter_for(stored).at_device_of(stored):
            if isinstance(self.updater, LocalUpdater):
                self.updater(entry.name, gradient, stored)
            elif self.function is not None:
                self.function(entry.key, gradient, stored)
        return False

    def _updates(self) -> bool:
        return self.updater is not None or self.function is not None

    def _assign(self, entry: Entry, total: Any) -> bool:
        places.copy_into(entry.stored, total)
        return False

    # ---------------------------------------------------------------------------------------------------- files

    def save(self, fname: str) -> None:
        """Writes all values and the states of the optimizer. Called on rank 0."""
        values = {_VALUE + entry.name: entry.value() for entry in self.entries.values()}
        arrays = {name: adapter_for(value).on_host(value) for name, value in values.items()}
        if self.updater is not None:
            arrays |= {_STATE + name: array for name, array in self.updater.states().items()}
        state_files.save(fname, arrays)

    def load(self, fname: str) -> None:
        """Raises OSError and ValueError on all workers alike, which have no operation pending. Then nothing changed."""
        arrays = self._of_rank_0(lambda: state_files.load(fname)).arrays
        by_name = {entry.name: entry for entry in self.entries.values()}
        values, remembered = _part(arrays, _VALUE), _part(arrays, _STATE)
        for name, array in values.items():
            if name not in by_name:
                raise ValueError(f'the file has key "{name}", which has no value here; give it one with init')
            if by_name[name].shape != array.shape:
                raise ValueError(f'key "{name}" has shape {by_name[name].shape}, but {array.shape} in the file')
            by_name[name].value()
        if remembered and self.updater is None:
            raise ValueError("the file has what an optimizer remembers; call set_optimizer before load")
        if self.updater is not None:
            self.updater.load_states(remembered)
        for name, array in values.items():
            by_name[name].overwrite(array)

    def load_states(self, updater: Updater, fname: str) -> None:
        """Raises as `load`."""
        updater.load_states(self._of_rank_0(lambda: state_files.load(fname)).arrays)

    def _of_rank_0(self, read: Callable[[], Any]) -> Any:
        """Returns or raises on every worker what `read` does on rank 0."""
        return read()

    # -------------------------------------------------------------------------------------------------- workers

    @property
    def num_workers(self) -> int:
        return 1

    def require_usable(self) -> None:
        """Raises if the workers are others than those that have made the store."""

    def require_same(self, call: str, given: dict[str, Any]) -> None:
        """Raises MismatchError unless all workers have given the same."""

    def barrier(self) -> None:
        """Waits until all workers have come here."""

    def join(self) -> None:
        """Waits until all workers have joined; until then this one pushes zeros."""

    def count_dead(self, node_id: int, timeout_s: float) -> int:
        """Returns 0: the loss of a worker ends the operations of the others with an error."""
        return 0

    def wait_before_exit(self, waits: bool) -> None:
        """Sets whether workers with servers wait for each other at their end."""

    def command(self, head: int, body: str) -> None:
        raise ValueError("send_command_to_servers: there are no servers; every worker has all values")

    def placement(self) -> dict[Key, list[tuple[int, int, int]]]:
        return {}

    def restored(self) -> dict[Key, float]:
        return {}


class LocalBackend(Backend):
    """Of one process: sums of its devices' values, in host memory or on a device.

    Every operation is complete when its call returns; on a GPU it is in the current stream.
    """

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self._bytes_on: Counter[int] = Counter()  # by device
        self._placed: set[Key] = set()

    def begin(self, arrays: dict[Key, Any]) -> None:
        for key, array in arrays.items():
            if key in self.entries:
                places.copy_into(self.entries[key].stored, array)
            else:
                here = array if self.kind.on_device else places.in_host_memory(array)
                self.entries[key] = Entry(key, places.copy_of(here))

    def push(self, groups: Groups, priority: int, copies: bool) -> list[Pending[Any]]:
        if self.kind.on_device:
            self._place(groups)
        for entry, values in groups:
            self._push(entry, values)
        return []

    def pushpull(self, groups: list[tuple[Entry, list[Any], list[Any]]], priority: int) -> None:
        if self.kind.on_device:
            self._place([(entry, values) for entry, values, _ in groups])
        for entry, values, outs in groups:
            self._push(entry, values)
            for one in outs:
                places.copy_into(one, entry.stored)

    def _place(self, groups: Groups) -> None:
        """Spreads the keys of a device store over the devices that have their values: the largest first."""
        new = [group for group in groups if group[0].key not in self._placed]
        for entry, values in sorted(new, key=lambda group: -int(group[0].stored.nbytes)):
            there = {adapter_for(value).device(value): value for value in values}
            device = min(there, key=lambda one: (self._bytes_on[one], one))
            if adapter_for(there[device]).dtype_name(there[device]) == entry.dtype_name:
                entry.move_to(places.like(entry.stored, there[device]))
            self._bytes_on[device] += entry.stored.nbytes
            self._placed.add(entry.key)

    def _push(self, entry: Entry, values: list[Any]) -> None:
        if self.compression is not None:
            values = [self.compression.rounded(one, entry.residuals, place) for place, one in enumerate(values)]
        if not self.kind.on_device:
            values = [places.in_host_memory(one) for one in values]
        self._apply(entry, values[0] if len(values) == 1 else places.sum_of(values, entry.stored))


def require_same(call: str, given: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises MismatchError, which names the first difference.

    Args:
        given: by rank, names and what each rank has for them.
    """
    first_rank = min(given)
    first = given[first_rank]
    for rank, other in given.items():
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise MismatchError(
                    f"{call}: rank {first_rank} has {name}={first.get(name)!r}, rank {rank} has "
                    f"{name}={other.get(name)!r}; give all workers the same"
                )


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
