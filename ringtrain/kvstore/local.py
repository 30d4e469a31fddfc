"""The store of one process: sums of its devices' values, in host memory or on a device."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ringtrain.arrays.adapter import adapter_for
from ringtrain.handles import Handle
from ringtrain.kvstore import places
from ringtrain.kvstore.entries import Entry, Key, Kind
from ringtrain.kvstore.store import KVStore


class LocalStore(KVStore):
    """What is asked for is done when a call returns; on a GPU it is in the current stream."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self._bytes_on: Counter[int] = Counter()  # by device
        self._placed: set[Key] = set()

    def _begin(self, key: Key, array: Any) -> Entry:
        known = self._entries.get(key)
        if known is not None:
            places.copy_into(known.stored, array)
            return known
        return Entry(key, places.copy_of(array if self._kind.on_device else places.in_host_memory(array)))

    def _place(self, groups: list[tuple[Entry, list[Any]]]) -> None:
        """Spread the keys of a device store over the devices that have their values: the largest first."""
        new = [group for group in groups if group[0].key not in self._placed] if self._kind.on_device else []
        for entry, values in sorted(new, key=lambda group: -int(group[0].stored.nbytes)):
            there = {adapter_for(value).device(value): value for value in values}
            device = min(there, key=lambda one: (self._bytes_on[one], one))
            if adapter_for(there[device]).dtype_name(there[device]) == entry.dtype_name:
                entry.move_to(places.like(entry.stored, there[device]))
            self._bytes_on[device] += entry.stored.nbytes
            self._placed.add(entry.key)

    def _push(self, entry: Entry, values: list[Any], priority: int, copies: bool) -> Handle[Any] | None:
        if self._compression is not None:
            values = [self._compression.rounded(one, entry.residuals, place) for place, one in enumerate(values)]
        if not self._kind.on_device:
            values = [places.in_host_memory(one) for one in values]
        self._apply(entry, values[0] if len(values) == 1 else places.sum_of(values, entry.stored))
        return None

    def _pushpull(self, groups: list[tuple[Entry, list[Any], list[Any]]], priority: int) -> None:
        for entry, values, outs in groups:
            self._push(entry, values, priority, copies=False)
            for one in outs:
                places.copy_into(one, entry.stored)
