"""An optimizer that runs on servers: the worker sends the rates with each push, and asks for what is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ringtrain.kvstore.optimizers import BuiltInUpdater, Updater
from ringtrain.kvstore.recipes import Recipe
from ringtrain.kvstore.served_entry import ServedEntry
from ringtrain.kvstore.states import Arrays

_NUM_UPDATE, _MASTER = "num_update", "master"
_WIDE = {"float64": np.dtype(np.float64)}


class Rules(Protocol):
    """The servers' side of an optimizer."""

    def entries(self) -> Sequence[ServedEntry]: ...

    def set_rule(self, recipe: Recipe, keeps_states: bool) -> None: ...

    def num_updates(self, entries: Sequence[ServedEntry]) -> list[int]:
        """How often each value was updated, as far as this worker knows."""

    def read_num_updates(self, entries: Sequence[ServedEntry]) -> list[int]:
        """The same, as the servers know it."""

    def write_num_updates(self, entries: Sequence[ServedEntry], counts: Sequence[int]) -> None: ...

    def read_state(self, entry: ServedEntry, name: str, array: np.ndarray[Any, Any]) -> None: ...

    def write_state(self, entry: ServedEntry, name: str, array: np.ndarray[Any, Any]) -> None: ...


class ServedUpdater(Updater):
    """What a store asks of its optimizer, of one that is built in."""

    is_built_in = True

    def __init__(self, built_in: BuiltInUpdater, rules: Rules) -> None:
        super().__init__()
        self._built_in = built_in
        self._rules = rules
        self._most_updates = built_in.recipe.begin_num_update
        self._take_over()

    def _take_over(self) -> None:
        self.rescale_grad, self.can_rescale = self._built_in.rescale_grad, self._built_in.can_rescale
        self.learning_rate = self._built_in.learning_rate

    @property
    def recipe(self) -> Recipe:
        return self._built_in.recipe

    def rates(self, entries: Sequence[ServedEntry]) -> list[tuple[float, float]]:
        """The learning rate and the decay of the next update of each key."""
        recipe = self.recipe
        if recipe.schedule is None:
            return [(recipe.lr_of(entry.name, 0), recipe.wd_of(entry.name)) for entry in entries]
        rates = []
        for entry, count in zip(entries, self._rules.num_updates(entries), strict=True):
            self._most_updates = max(self._most_updates, count + 1)
            rates.append((recipe.lr_of(entry.name, self._most_updates), recipe.wd_of(entry.name)))
        return rates

    def configuration(self) -> dict[str, Any]:
        return self._built_in.configuration()

    def change(self, **numbers: Any) -> None:
        before = self.recipe.numbers
        self._built_in.change(**numbers)
        self._take_over()
        if self.recipe.numbers != before:  # the rates go with each push
            self._rules.set_rule(self.recipe, keeps_states=True)

    def replaced(self, key: str, stored: Any) -> None:
        """The servers have given their masters the value themselves."""

    def states(self) -> Arrays:
        arrays: Arrays = {}
        entries = self._rules.entries()
        for entry, count in zip(entries, self._rules.read_num_updates(entries), strict=True):
            if count == self.recipe.begin_num_update:
                continue  # as elsewhere, what was never updated has no state
            arrays[f"{entry.name}/{_NUM_UPDATE}"] = np.array(count)
            for name in self._names(entry):
                array = arrays[f"{entry.name}/{name}"] = np.empty(entry.shape, _WIDE.get(entry.dtype_name, np.float32))
                self._rules.read_state(entry, name, array)
        return arrays

    def load_states(self, states: Arrays) -> None:
        self._built_in.load_states(states)  # raises where they are those of another optimizer
        counts = {
            name.rpartition("/")[0]: int(array) for name, array in states.items() if name.endswith(f"/{_NUM_UPDATE}")
        }
        entries = [entry for entry in self._rules.entries() if entry.name in counts]
        for entry in entries:
            for name in self._names(entry):
                array = states.get(f"{entry.name}/{name}")
                if array is None:
                    continue  # another dtype was saved, without a master
                if array.shape != entry.shape:
                    raise ValueError(
                        f'"{name}" of key "{entry.name}" has shape {entry.shape}, but that of its loaded state '
                        f"{array.shape}"
                    )
                wide = np.ascontiguousarray(array, _WIDE.get(entry.dtype_name, np.float32))
                self._rules.write_state(entry, name, wide)
        self._rules.write_num_updates(entries, [counts[entry.name] for entry in entries])
        self._most_updates = max([self.recipe.begin_num_update, *counts.values()])

    def _names(self, entry: ServedEntry) -> list[str]:
        master = [_MASTER] if entry.dtype_name in ("float16", "bfloat16") else []
        return [*self._built_in.state_names, *master]

    def _create_state(self, key: str, weight: Any) -> Any:
        raise AssertionError("values are updated on the servers")

    def _update(self, key: str, weight: Any, grad: Any, kept: Any) -> None:
        raise AssertionError("values are updated on the servers")
