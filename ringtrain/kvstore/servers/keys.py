"""The keys of a store as its workers know them: worker 0 places them and publishes them in the directory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import ringtrain._core as _core
from ringtrain.arrays.adapter import adapter_for
from ringtrain.errors import MismatchError
from ringtrain.kvstore.servers.membership import KEY, MEMORY
from ringtrain.kvstore.servers.python_updates import NUMBER
from ringtrain.kvstore.servers.worker import KeepsArrays, Worker

# Pieces are multiples of this: a word of one-bit codes.
_ELEMENTS = 32


class Piece(NamedTuple):
    """Consecutive elements of a key at one server."""

    server: int
    begin: int
    elements: int


class KeyPlacement:
    """Chooses the server of each key, so that the bytes are spread evenly over the keys known so far.

    Args:
        bound: keys with at least this many elements are cut over all servers; None cuts none.
    """

    def __init__(self, servers: int, bound: int | None):
        self._bound = bound
        self._bytes = [0] * servers

    def place(self, sizes: Sequence[tuple[int, int]]) -> list[list[Piece]]:
        """Returns the pieces of keys that are created together.

        Args:
            sizes: of each key the number of elements and the bytes of one.
        """
        pieces: list[list[Piece]] = [[] for _ in sizes]
        for number in sorted(range(len(sizes)), key=lambda one: -sizes[one][0] * sizes[one][1]):
            count, element_bytes = sizes[number]
            cut = self._cut(count) if self._bound is not None and count >= self._bound else []
            pieces[number] = cut if len(cut) > 1 else [Piece(self._least_loaded(), 0, count)]
            for piece in pieces[number]:
                self._bytes[piece.server] += piece.elements * element_bytes
        return pieces

    def _least_loaded(self) -> int:
        return self._bytes.index(min(self._bytes))

    def _cut(self, count: int) -> list[Piece]:
        servers = len(self._bytes)
        borders = [min(count, round(count * i / servers / _ELEMENTS) * _ELEMENTS) for i in range(servers)] + [count]
        cuts = zip(range(servers), borders[:-1], borders[1:], strict=True)
        return [Piece(server, begin, end - begin) for server, begin, end in cuts if end > begin]


Pieces = list[tuple[int, int, int]]
# Entries of a store beside its keys.
_RULE, _NEXT = "rule", "next"
# The prefix of the entry, by store, that names a key of which a worker has given another shape or dtype than worker 0.
_MISMATCH = "mismatch/"


class Known(NamedTuple):
    """A key that has a value; `version` counts its values."""

    id: int
    version: int


class KeyTable:
    """The keys of one store on one worker.

    Args:
        cuts_keys: whether large keys are cut over all servers.
    """

    def __init__(self, worker: Worker, store: int, cuts_keys: bool = True) -> None:
        self._worker = worker
        self._store = store
        bound = int(worker.seconds("kv_bound")) if cuts_keys else None
        self._placement = KeyPlacement(len(worker.world.servers), bound)
        self._next_id = 0
        self._pieces: dict[str, Pieces] = {}
        self._rule_version = 0

    def begin(self, arrays: Mapping[Any, Any]) -> list[Known]:
        """Gives keys their first value, that of worker 0. Returns when the servers have it.

        Raises:
            MismatchError: worker 0 gives another shape or dtype.
            TypeError: worker 0 gives a dtype that servers cannot hold.
            StalledError: worker 0 does not give a key a value in time.
            PeerLostError: worker 0, a server or the scheduler is lost.
        """
        names = [str(key) for key in arrays]
        wanted = dict(zip(names, arrays.values(), strict=True))
        found = self._find(names, 0) if self._worker.is_recovery else {}
        new = {name: wanted[name] for name in names if found.get(name) is None}
        is_first = self._worker.number == 0
        if new and is_first:
            self._require_dtypes(new)
            self._create(new, has_ints=isinstance(next(iter(arrays)), int))
        known = self._find(names, 1)
        for entry in known.values():
            if "error" in entry:
                raise TypeError(entry["error"])
        self._attach({name: known[name] for name in names if not is_first or name not in new}, wanted)
        return [Known(known[name]["id"], known[name]["version"]) for name in names]

    def replace(self, name: str, number: int, array: Any, version: int) -> int:
        """Gives a key another value, that of worker 0. Returns its version."""
        if self._worker.number == 0:
            with KeepsArrays(self._worker.client, array):
                self._worker.client.assign(self._store, [number], [adapter_for(array).view(array)])
            entry = self._find([name], version)[name]
            self._publish({name: {**entry, "version": version + 1}})
        return int(self._find([name], version + 1)[name]["version"])

    def pieces(self, name: str) -> Pieces:
        return self._pieces[name]

    def rules_before(self) -> int:
        """Returns how many optimizers the others have set before this worker took its place; 0 after the first call."""
        if not self._worker.is_recovery or self._rule_version:
            return 0
        self._rule_version = 1
        rule = self._worker.scheduler_client.find(self._store, {_RULE: 0}, 0)[_RULE]
        return 0 if rule is None else int(rule["version"])

    def publish_rule(self) -> None:
        self._rule_version += 1
        self._worker.scheduler_client.publish(self._store, {_RULE: {"version": self._rule_version}})

    def require_agreed(self, names: Collection[str]) -> None:
        """Raises MismatchError if a worker has refused one of these keys: it will not push it."""
        label = f"{_MISMATCH}{self._store}"
        found = self._worker.scheduler_client.find(MEMORY, {label: 0}, 0)[label]
        if found is not None and found["key"] in names:
            raise MismatchError(found["text"])

    def _require_dtypes(self, arrays: Mapping[str, Any]) -> None:
        """Raises TypeError, also on the workers that wait for these keys, if servers cannot hold a dtype."""
        for name, array in arrays.items():
            dtype = adapter_for(array).dtype_name(array)
            if dtype in _core.DTYPES:
                continue
            text = (
                f'key "{name}" is {dtype}, but servers hold {", ".join(_core.DTYPES)}; push real and imaginary parts '
                "as two keys, or use a store without servers"
            )
            self._publish({waiting: {"version": 1, "error": text} for waiting in arrays})
            raise TypeError(text)

    def _create(self, arrays: Mapping[str, Any], has_ints: bool) -> None:
        if self._worker.is_recovery:
            before = self._worker.scheduler_client.find(self._store, {_NEXT: 0}, 0)[_NEXT]
            self._next_id = max(self._next_id, before["id"] if before else 0)
        sizes = [(prod(array.shape), int(array.nbytes) // max(1, prod(array.shape))) for array in arrays.values()]
        entries = {}
        for (name, array), pieces in zip(arrays.items(), self._placement.place(sizes), strict=True):
            entries[name] = {
                "id": self._next_id,
                "version": 1,
                "dtype": adapter_for(array).dtype_name(array),
                "shape": list(array.shape),
                "pieces": [list(piece) for piece in pieces],
            }
            self._next_id += 1
        prepared = [adapter_for(array).prepare(array) for array in arrays.values()]
        views = [adapter_for(array).view(array) for array in prepared]
        with KeepsArrays(self._worker.client, prepared):
            self._worker.client.create_keys(self._store, self._core_keys(entries), views)
        self._worker.publish_memory()
        by_number = {
            f"{NUMBER}{entry['id']}": {"version": 1, "key": name, "is_int": has_ints, "shape": entry["shape"]}
            for name, entry in entries.items()
        }
        self._worker.scheduler_client.publish(self._store, {_NEXT: {"version": 1, "id": self._next_id}, **by_number})
        self._publish(entries)

    def _attach(self, entries: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        for name, entry in entries.items():
            array = arrays[name]
            own = adapter_for(array).dtype_name(array), list(array.shape)
            if own != (entry["dtype"], entry["shape"]):
                text = (
                    f'key "{name}" is {entry["dtype"]}{entry["shape"]} on worker 0, but {own[0]}{own[1]} on worker '
                    f"{self._worker.number}; give all workers the same shape and dtype"
                )
                told = {"version": 1, "key": name, "text": text}
                self._worker.scheduler_client.publish(MEMORY, {f"{_MISMATCH}{self._store}": told})
                raise MismatchError(text)
        if entries:
            self._worker.client.attach_keys(self._store, self._core_keys(entries))
            self._worker.publish_memory()

    def _core_keys(self, entries: Mapping[str, Any]) -> list[_core.StoreKey]:
        keys = []
        for name, entry in entries.items():
            pieces = self._pieces[name] = [(server, begin, count) for server, begin, count in entry["pieces"]]
            keys.append(_core.StoreKey(entry["id"], name, _core.DTYPES[entry["dtype"]], prod(entry["shape"]), pieces))
        return keys

    def _publish(self, entries: Mapping[str, Any]) -> None:
        self._worker.scheduler_client.publish(self._store, {KEY + name: entry for name, entry in entries.items()})

    def _find(self, names: list[str], version: int) -> dict[str, Any]:
        if not names:
            return {}
        found = self._worker.find(self._store, {KEY + name: version for name in names})
        return {name: found[KEY + name] for name in names}
