"""What carries out the calls of a store, and what it needs to check them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from ringtrain.arrays.adapter import adapter_for
from ringtrain.handles import Pending
from ringtrain.kvstore import places, snapshot, states
from ringtrain.kvstore.base import KVStoreBase
from ringtrain.kvstore.entries import Entries, Entry, Key, Kind
from ringtrain.kvstore.gradient_compression import GradientCompression, require_compressible
from ringtrain.kvstore.updaters import Updater

# A function of key, sum and stored value, which it changes.
Function = Callable[[Key, Any, Any], object]
# Keys with the values or the arrays that a call has given them.
Groups = list[tuple[Entry, list[Any]]]


class Engine(KVStoreBase):
    """One of each kind derives from `KVStore`, which has the calls of users. One thread at a time."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._entries = Entries()
        self._updater: Updater | None = None
        self._function: Function | None = None  # of set_updater
        self._compression: GradientCompression | None = None

    # --------------------------------------------------------------------------------------------------- values

    @abstractmethod
    def _begin(self, key: Key, array: Any) -> Entry:
        """Give a key the value that `array` is on rank 0: a copy, in the entry that it has or in a new one."""

    def _begin_all(self, arrays: dict[Key, Any]) -> None:
        """The same for all keys of a call."""
        for key, array in arrays.items():
            self._entries[key] = self._begin(key, array)

    @abstractmethod
    def _push(self, entry: Entry, values: list[Any], priority: int, copies: bool) -> Pending[Any] | None:
        """Begin to push. None, or what to wait for before the values may be changed."""

    def _push_all(self, groups: Groups, priority: int, copies: bool) -> list[Pending[Any]]:
        """The same for all keys of a call."""
        handles = [self._push(entry, values, priority, copies) for entry, values in groups]
        return [handle for handle in handles if handle is not None]

    def _pull_all(self, groups: Groups, priority: int) -> None:
        """Fill the arrays of all keys of a call."""
        for entry, outs in groups:
            current = self._current(entry)
            for one in outs:
                places.copy_into(one, current)

    @abstractmethod
    def _pushpull(self, groups: list[tuple[Entry, list[Any], list[Any]]], priority: int) -> None: ...

    def _place(self, groups: Groups) -> None:
        """Decide where the values of keys are, which are about to be pushed."""

    def _finish(self, entry: Entry) -> None:
        """Wait until all that was pushed is in the value."""

    def _current(self, entry: Entry) -> Any:
        self._finish(entry)
        return entry.value()

    # -------------------------------------------------------------------------------------------------- updates

    def _use(self, updater: Updater | None, function: Function | None) -> None:
        """Update values with one of both from now on, on all workers alike; all own pushes are done."""
        self._updater, self._function = updater, function

    def _apply(self, entry: Entry, total: Any) -> bool:
        """Update the value of a key with a sum, or overwrite it. Whether `total` has become the value itself."""
        if not self._updates():
            return self._assign(entry, total)
        stored = entry.value()
        gradient = places.like(total, stored)
        with adapter_for(stored).at_device_of(stored):
            if self._updater is not None:
                self._updater(entry.name, gradient, stored)
            elif self._function is not None:
                self._function(entry.key, gradient, stored)
        return False

    def _updates(self) -> bool:
        return self._updater is not None or self._function is not None

    def _assign(self, entry: Entry, total: Any) -> bool:
        places.copy_into(entry.stored, total)
        return False

    # ---------------------------------------------------------------------------------------------------- files

    def _save(self, fname: str) -> None:
        """All values, and what the optimizer remembers. Of rank 0."""
        states.save(fname, snapshot.of(self._entries, self._updater))

    def _load(self, fname: str) -> None:
        """Raises OSError and ValueError, on all workers alike, who have nothing under way."""
        snapshot.restore(self._of_rank_0(lambda: states.load(fname)).arrays, self._entries, self._updater)

    def _load_states(self, updater: Updater, fname: str) -> None:
        """Raises as `_load`."""
        updater.load_states(self._of_rank_0(lambda: states.load(fname)).arrays)

    # --------------------------------------------------------------------------------------------------- checks

    def _given(self, call: str, key: Any, value: Any) -> list[tuple[Entry, list[Any]]]:
        self._require_usable()
        groups = self._entries.pushed(call, key, value)
        self._place(groups)
        return groups

    def _first_value(self, key: Key, value: Any) -> Any:
        array = places.readable(value)
        if self._compression is not None:
            require_compressible(key, adapter_for(array).dtype_name(array))
        return array

    def _require_usable(self) -> None:
        """Raises if the workers are others than those that have made the store."""

    def _require_same(self, call: str, given: dict[str, Any]) -> None:
        """Raises MismatchError unless all workers have given the same."""

    def _of_rank_0(self, read: Callable[[], Any]) -> Any:
        """What `read` returns or raises on rank 0."""
        return read()

    def _require_can_update(self) -> None:
        if not self._kind.can_update:
            raise ValueError(
                f'a "{self._kind.name}" store only adds up: update the weights yourself, or use "dist_sync_device"'
            )

    def _require_optimizer(self, call: str) -> Updater:
        self._require_usable()
        if self._updater is None:
            raise ValueError(f"{call}: the store has no optimizer; call set_optimizer first")
        return self._updater
