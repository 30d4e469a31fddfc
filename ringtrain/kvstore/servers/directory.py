"""What worker 0 has told of the keys of each store, and who waits to hear of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ringtrain.kvstore.servers.places import Place

Message = dict[str, Any]
# Names of keys begin so.
KEY = "key/"
# In the place of a store: where workers have memory that they share with servers. Every worker tells of its own.
MEMORY = -1


@dataclass
class _Wait:
    member: int
    message: Message
    began_s: float
    end_s: float


@dataclass
class _Store:
    entries: dict[str, Any] = field(default_factory=dict)
    waits: list[_Wait] = field(default_factory=list)


class Directory:
    """By store and name. An entry has a version, from 1 on."""

    def __init__(self) -> None:
        self._stores: dict[int, _Store] = {}
        self._lost = ""  # why nobody publishes any more

    def publish(self, store: int, entries: dict[str, Any]) -> list[tuple[int, Message]]:
        """New entries, or later versions. Returns the answers to who has waited for them."""
        if store != MEMORY:
            self._lost = ""
        of_store = self._store(store)
        of_store.entries |= entries
        return self._answers(of_store)

    def find(self, member: int, message: Message, now_s: float) -> list[tuple[int, Message]]:
        """`versions` is, by name, the least version that is wanted; 0 is an entry or None."""
        of_store = self._store(message["store"])
        patience_s = float(message["patience_s"]) or float("inf")
        of_store.waits.append(_Wait(member, message, now_s, now_s + patience_s))
        answers = self._answers(of_store)
        return answers if answers or not self._lost else self.lose(Place("worker", 0), self._lost)

    def lose(self, _who: Place, text: str) -> list[tuple[int, Message]]:
        """Who publishes is lost."""
        self._lost = text
        failures = []
        for of_store in self._stores.values():
            for wait in of_store.waits:
                key = ", ".join(_keys(self._missing(of_store, wait)))
                whole = f'{text}; nobody else gives key "{key}" a value'
                failures.append((wait.member, _failure(wait, "PeerLostError", whole)))
            of_store.waits.clear()
        return failures

    def overdue(self, now_s: float) -> list[tuple[int, Message]]:
        failures = []
        for of_store in self._stores.values():
            for wait in [one for one in of_store.waits if one.end_s < now_s]:
                of_store.waits.remove(wait)
                names = ", ".join(_keys(self._missing(of_store, wait)))
                text = (
                    f'key "{names}" has no value after {now_s - wait.began_s:.1f} s '
                    "(stall_shutdown_time_s): worker 0, whose value counts, has not called init or broadcast with it"
                )
                failures.append((wait.member, _failure(wait, "StalledError", text)))
        return failures

    def _store(self, number: int) -> _Store:
        return self._stores.setdefault(int(number), _Store())

    def _answers(self, of_store: _Store) -> list[tuple[int, Message]]:
        done = [wait for wait in of_store.waits if not self._missing(of_store, wait)]
        of_store.waits = [wait for wait in of_store.waits if wait not in done]
        return [(wait.member, self._answer(of_store, wait)) for wait in done]

    def _missing(self, of_store: _Store, wait: _Wait) -> list[str]:
        versions: dict[str, int] = wait.message["versions"]
        known = of_store.entries
        return [name for name, version in versions.items() if known.get(name, {"version": 0})["version"] < version]

    def _answer(self, of_store: _Store, wait: _Wait) -> Message:
        entries = {name: of_store.entries.get(name) for name in wait.message["versions"]}
        return {"kind": "answer", "id": wait.message["id"], "value": entries}


def _keys(names: list[str]) -> list[str]:
    return [name.removeprefix(KEY) for name in names]


def _failure(wait: _Wait, error: str, text: str) -> Message:
    return {"kind": "error", "id": wait.message["id"], "error": error, "text": text}
