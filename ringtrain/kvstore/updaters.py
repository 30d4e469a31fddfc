"""Updaters of the values of a store: an optimizer and its state for each key, on this worker or on servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import ringtrain._core as _core
from ringtrain.arrays.adapter import adapter_for
from ringtrain.kvstore import update_rules
from ringtrain.kvstore.entries import ServedEntry
from ringtrain.kvstore.state_files import Arrays, parts_of
from ringtrain.kvstore.update_rules import Rates, Recipe
from ringtrain.optim import namespace_of

_WEIGHTS = ("float16", "bfloat16", "float32", "float64")
# Rounding a weight after each update would lose small updates, so a master in float32 is kept beside it.
_MASTER = {"float16": "float32", "bfloat16": "float32"}
_NUM_UPDATE, _MASTER_NAME = "num_update", "master"
_OF_THE_OBJECT = Rates(0, 0.0, 0.0)  # an object of the script reads its own numbers


def updater_for(optimizer: Any, numbers: Mapping[str, Any] | None = None) -> LocalUpdater:
    """Returns what a store calls for each sum of gradients.

    Args:
        optimizer: one of ringtrain.optim, by torch's formulas; a name such as "sgd" or an optimizer of MXNet, by
            MXNet's. It is read now: change numbers later with `update_optimizer` of the store. Or any object with
            `create_state(key, weight)` and `update(key, weight, grad, state)`, which gets the arrays of the store.
        numbers: with a name, MXNet's arguments, such as `learning_rate`.

    Raises:
        ValueError: an unknown name, argument or attribute, or a number out of range.
        TypeError: no optimizer.
    """
    if isinstance(optimizer, str):
        return BuiltInUpdater(update_rules.from_name(optimizer, numbers or {}))
    if numbers:
        raise ValueError(f"{', '.join(numbers)}: numbers need the name of an optimizer, not an object")
    if update_rules.is_of_optim(optimizer):
        return BuiltInUpdater(update_rules.from_optim(optimizer))
    if update_rules.is_of_mxnet(optimizer):
        return BuiltInUpdater(update_rules.from_mxnet(optimizer))
    if isinstance(optimizer, type) or not all(hasattr(optimizer, name) for name in ("create_state", "update")):
        kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__qualname__
        raise TypeError(
            f"a store cannot update with {kind}: give it an optimizer of ringtrain.optim or MXNet, a name such as "
            '"sgd", or an object with create_state(key, weight) and update(key, weight, grad, state)'
        )
    return ObjectUpdater(optimizer)


@dataclass
class _Key:
    """The state of one key. `remembered` is that of the optimizer."""

    num_update: int
    master: Any
    remembered: Any


class Updater(ABC):
    """The optimizer of a store, which runs on this worker or on servers. One thread at a time."""

    is_built_in: bool  # runs in the core where the arrays are in the host's memory
    # The factor of gradients, and whether `change` can change it.
    rescale_grad = 1.0
    can_rescale = False
    # None without a learning rate, or if a schedule decides it.
    learning_rate: float | None = None

    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """Returns what the ranks compare: texts, numbers, and lists and dicts of them."""

    @abstractmethod
    def change(self, **numbers: Any) -> None:
        """Changes numbers, such as `lr`, and keeps the state. Raises ValueError for a number that cannot change."""

    @abstractmethod
    def replaced(self, key: str, stored: Any) -> None:
        """Called when the value of a key has become `stored` without an update; its master follows."""

    @abstractmethod
    def states(self) -> Arrays:
        """Returns a copy of all states by "key/name": "num_update", "master", and the arrays of the optimizer."""

    @abstractmethod
    def load_states(self, states: Arrays) -> None:
        """Replaces all states by a result of `states`, of this or another updater.

        Raises:
            ValueError: they are not states, or belong to another optimizer; then nothing has changed.
        """


class LocalUpdater(Updater):
    """Updates the value of a key in place with a gradient, on this worker.

    `begin` reads what may change between updates, `end` updates. A store begins an update when the gradient is pushed,
    which is the same place of the script on all workers, and ends it when it has the sum.
    """

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}
        # States from `load_states` of keys that were not updated since.
        self._loaded: dict[str, Arrays] = {}

    def __call__(self, key: str, grad: Any, stored: Any) -> None:
        """Updates `stored` in place, as `begin` and `end`."""
        if tuple(grad.shape) != tuple(stored.shape):
            raise ValueError(f'key "{key}" has shape {tuple(stored.shape)}, but its gradient {tuple(grad.shape)}')
        self.end(key, grad, stored, self.begin(key, stored))

    def begin(self, key: str, stored: Any) -> Rates:
        """Returns the numbers of the next update of a key.

        Args:
            stored: floating-point.

        Raises:
            TypeError: the key has no floating-point values.
            ValueError: a loaded state does not fit the key.
        """
        kept = self._keys.get(key) or self._create(key, stored)
        rates = self.rates(key, kept.num_update + 1)
        kept.num_update += 1
        return rates

    def end(self, key: str, grad: Any, stored: Any, rates: Rates) -> None:
        """Updates `stored` in place. Weights of 16 bits have a float32 master, of which they are the rounded copy.

        Args:
            grad: of the library, device and shape of `stored`, and not changed.
            stored: as `begin` had it.
            rates: from `begin`.
        """
        kept = self._keys[key]
        adapter = adapter_for(stored)
        weight = stored if kept.master is None else kept.master
        dtype = adapter.dtype_name(weight)
        if adapter_for(grad).dtype_name(grad) != dtype:
            grad = adapter_for(grad).cast(grad, dtype)
        self._update(key, weight, grad, kept, rates)
        if kept.master is not None:
            adapter.assign(stored, kept.master)
        adapter.note_change(stored)

    def replaced(self, key: str, stored: Any) -> None:
        if key in self._keys and self._keys[key].master is not None:
            adapter_for(stored).assign(self._keys[key].master, stored)

    def states(self) -> Arrays:
        arrays: Arrays = {}
        for key, kept in self._keys.items():
            named: dict[str, Any] = {_NUM_UPDATE: kept.num_update}
            named |= {part.name: part.read() for part in parts_of(kept.remembered)}
            if kept.master is not None:
                named[_MASTER_NAME] = adapter_for(kept.master).on_host(kept.master)
            arrays |= {f"{key}/{name}": np.array(value) for name, value in named.items()}
        for key, loaded in self._loaded.items():
            arrays |= {f"{key}/{name}": array.copy() for name, array in loaded.items()}
        return arrays

    def load_states(self, states: Arrays) -> None:
        by_key: dict[str, Arrays] = {}
        for name, array in states.items():
            key, separator, part = name.rpartition("/")
            if not separator:
                raise ValueError(f'"{name}" is not the name of a state; it must be "key/name"')
            by_key.setdefault(key, {})[part] = array
        for key, arrays in by_key.items():
            self._require_own(key, arrays)
        self._keys, self._loaded = {}, by_key

    def _create(self, key: str, stored: Any) -> _Key:
        adapter = adapter_for(stored)
        dtype = adapter.dtype_name(stored)
        if dtype not in _WEIGHTS:
            raise TypeError(f'key "{key}" is {dtype}, but an optimizer updates floating-point values only')
        adapter.is_in_place(stored)  # raises if it is read-only
        master = adapter.cast(stored, _MASTER[dtype]) if dtype in _MASTER else None
        kept = _Key(self._first_num_update(), master, self._create_state(key, stored if master is None else master))
        if key in self._loaded:
            _fill(key, kept, self._loaded[key])
            del self._loaded[key]
        self._keys[key] = kept
        return kept

    def _first_num_update(self) -> int:
        return 0

    def _require_own(self, key: str, arrays: Arrays) -> None:
        if _NUM_UPDATE not in arrays:
            raise ValueError(f'the state of key "{key}" has no {_NUM_UPDATE}')

    @abstractmethod
    def _create_state(self, key: str, weight: Any) -> Any:
        """Returns a new state of the optimizer for a key."""

    @abstractmethod
    def rates(self, key: str, num_update: int) -> Rates:
        """Returns the rates of an update of a key, its `num_update`-th, and counts it for a schedule."""

    @abstractmethod
    def _update(self, key: str, weight: Any, grad: Any, kept: _Key, rates: Rates) -> None:
        """Updates a weight. Weight and grad have one dtype."""


def _fill(key: str, kept: _Key, loaded: Arrays) -> None:
    """Fills a new state with a loaded one. The master is optional, since the saved key may have had another dtype."""
    parts = {part.name: part for part in parts_of(kept.remembered)}
    found = {name: array for name, array in loaded.items() if name not in (_NUM_UPDATE, _MASTER_NAME)}
    if parts.keys() != found.keys():
        raise ValueError(f'the loaded state of key "{key}" has {sorted(found)}, not {sorted(parts)}')
    for name, part in parts.items():
        if part.shape != found[name].shape:
            raise ValueError(
                f'"{name}" of key "{key}" has shape {part.shape}, but that of its loaded state {found[name].shape}'
            )
    for name, part in parts.items():
        part.write(found[name])
    kept.num_update = int(loaded[_NUM_UPDATE])
    if kept.master is not None and _MASTER_NAME in loaded:
        adapter_for(kept.master).assign_host(kept.master, loaded[_MASTER_NAME])


class BuiltInUpdater(LocalUpdater):
    """An update of each element by itself, by a recipe."""

    is_built_in = True

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._use(recipe)
        self._most_updates = recipe.begin_num_update

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    @property
    def state_names(self) -> list[str]:
        return self._rule.state_names

    def configuration(self) -> dict[str, Any]:
        return self._recipe.described()

    def change(self, **numbers: Any) -> None:
        recipe = self._recipe.changed(**numbers)
        if _core.UpdateRule(recipe.name, recipe.form, recipe.numbers).state_names != self._rule.state_names:
            changed = ", ".join(numbers)
            raise ValueError(f"{changed}: {recipe.name} would have to remember something else; use set_optimizer")
        self._use(recipe)

    def _use(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._rule = _core.UpdateRule(recipe.name, recipe.form, recipe.numbers)
        self._formula = update_rules.formula_of(recipe)  # for GPUs
        self.can_rescale = "rescale_grad" in recipe.numbers
        self.rescale_grad = recipe.numbers.get("rescale_grad", 1.0)
        self.learning_rate = recipe.lr if recipe.schedule is None else None

    def load_states(self, states: Arrays) -> None:
        super().load_states(states)
        counts = [int(loaded[_NUM_UPDATE]) for loaded in self._loaded.values()]
        self._most_updates = max([self._recipe.begin_num_update, *counts])

    def _require_own(self, key: str, arrays: Arrays) -> None:
        super()._require_own(key, arrays)
        found = set(arrays) - {_NUM_UPDATE, _MASTER_NAME}
        if found != set(self._rule.state_names):
            wanted = ", ".join(self._rule.state_names) or "nothing"
            raise ValueError(
                f'the state of key "{key}" has {", ".join(sorted(found)) or "nothing"}, but {self._recipe.name} '
                f"remembers {wanted}: it is that of another optimizer"
            )

    def _first_num_update(self) -> int:
        return self._recipe.begin_num_update

    def _create_state(self, key: str, weight: Any) -> dict[str, Any]:
        plain = adapter_for(weight).prepare(weight)
        return {name: namespace_of(plain).zeros_like(plain) for name in self._rule.state_names}

    def rates(self, key: str, num_update: int) -> Rates:
        self._most_updates = max(self._most_updates, num_update)
        recipe = self._recipe
        return Rates(num_update, recipe.lr_of(key, self._most_updates), recipe.wd_of(key))

    def _update(self, key: str, weight: Any, grad: Any, kept: _Key, rates: Rates) -> None:
        adapter, states = adapter_for(weight), list(kept.remembered.values())
        if adapter.device(weight) >= 0:
            self._formula.update(weight, grad, states, rates)
            return
        plain, plain_grad = adapter.prepare(weight), adapter_for(grad).prepare(grad)
        views = [adapter.view(one) for one in states]
        self._rule.update(adapter.view(plain), adapter_for(grad).view(plain_grad), views, *rates)
        if plain is not weight:
            adapter.assign(weight, plain)


class ObjectUpdater(LocalUpdater):
    """Calls any object with `create_state(key, weight)` and `update(key, weight, grad, state)`."""

    is_built_in = False

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer

    def configuration(self) -> dict[str, Any]:
        kind = type(self._optimizer)
        public = {name: value for name, value in vars(self._optimizer).items() if not name.startswith("_")}
        comparable = {name: value for name, value in public.items() if isinstance(value, (int, float, str))}
        return {"optimizer": f"{kind.__module__}.{kind.__qualname__}", **comparable}

    def change(self, **numbers: Any) -> None:
        unknown = [name for name in numbers if not hasattr(self._optimizer, name)]
        if unknown:
            raise ValueError(f"{type(self._optimizer).__qualname__} has no attribute {', '.join(unknown)}")
        for name, value in numbers.items():
            setattr(self._optimizer, name, value)

    def _create_state(self, key: str, weight: Any) -> Any:
        return self._optimizer.create_state(key, weight)

    def rates(self, key: str, num_update: int) -> Rates:
        return _OF_THE_OBJECT

    def _update(self, key: str, weight: Any, grad: Any, kept: _Key, rates: Rates) -> None:
        self._optimizer.update(key, weight, grad, kept.remembered)


_WIDE = {"float64": np.dtype(np.float64)}


class Rules(Protocol):
    """The optimizer on the servers."""

    def all_entries(self) -> Sequence[ServedEntry]: ...

    def set_rule(self, recipe: Recipe, keeps_states: bool) -> None: ...

    def num_updates(self, entries: Sequence[ServedEntry]) -> list[int]:
        """Returns how often each value was updated, as far as this worker knows."""

    def read_num_updates(self, entries: Sequence[ServedEntry]) -> list[int]:
        """Returns the same, as the servers know it."""

    def write_num_updates(self, entries: Sequence[ServedEntry], counts: Sequence[int]) -> None: ...

    def read_state(self, entry: ServedEntry, name: str, array: np.ndarray[Any, Any]) -> None: ...

    def write_state(self, entry: ServedEntry, name: str, array: np.ndarray[Any, Any]) -> None: ...


class ServedUpdater(Updater):
    """A built-in optimizer that runs on servers: the worker sends the rates with each push and reads states back."""

    is_built_in = True

    def __init__(self, built_in: BuiltInUpdater, rules: Rules) -> None:
        self._built_in = built_in
        self._rules = rules
        self._take_over()

    def _take_over(self) -> None:
        self.rescale_grad, self.can_rescale = self._built_in.rescale_grad, self._built_in.can_rescale
        self.learning_rate = self._built_in.learning_rate

    @property
    def recipe(self) -> Recipe:
        return self._built_in.recipe

    def rates(self, entries: Sequence[ServedEntry]) -> list[tuple[float, float]]:
        """Returns the learning rate and the decay of the next update of each key."""
        has_schedule = self.recipe.schedule is not None
        counts = self._rules.num_updates(entries) if has_schedule else [0] * len(entries)
        rates = [self._built_in.rates(entry.name, count + 1) for entry, count in zip(entries, counts, strict=True)]
        return [(of_one.lr, of_one.wd) for of_one in rates]

    def configuration(self) -> dict[str, Any]:
        return self._built_in.configuration()

    def change(self, **numbers: Any) -> None:
        before = self.recipe.numbers
        self._built_in.change(**numbers)
        self._take_over()
        if self.recipe.numbers != before:  # rates are sent with each push
            self._rules.set_rule(self.recipe, keeps_states=True)

    def replaced(self, key: str, stored: Any) -> None:
        """Does nothing: servers have updated their masters themselves."""

    def states(self) -> Arrays:
        arrays: Arrays = {}
        entries = self._rules.all_entries()
        for entry, count in zip(entries, self._rules.read_num_updates(entries), strict=True):
            if count == self.recipe.begin_num_update:
                continue  # a key that was never updated has no state
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
        entries = [entry for entry in self._rules.all_entries() if entry.name in counts]
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

    def _names(self, entry: ServedEntry) -> list[str]:
        master = [_MASTER_NAME] if entry.dtype_name in ("float16", "bfloat16") else []
        return [*self._built_in.state_names, *master]


class SentUpdater(Updater):
    """An optimizer or function in Python that runs on servers.

    Args:
        updater: of `set_optimizer`, or None.
        function: of `set_updater`, if there is no updater.
        tell: sends the servers other numbers; called by all workers alike.
    """

    is_built_in = True

    def __init__(
        self,
        updater: LocalUpdater | None,
        function: Callable[[Any, Any, Any], object] | None,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._updater = updater
        self.for_servers = UpdaterOfServers(updater, function)
        self._tell = tell

    def configuration(self) -> dict[str, Any]:
        return {} if self._updater is None else self._updater.configuration()

    def change(self, **numbers: Any) -> None:
        if self._updater is None:
            raise ValueError("a function that set_updater has set has no numbers to change")
        self._updater.change(**numbers)
        self._tell(numbers)

    def replaced(self, key: str, stored: Any) -> None:
        """Does nothing: servers have updated their masters themselves."""

    def states(self) -> Arrays:
        raise ValueError(
            "what an optimizer in Python remembers is on the servers, and is not brought back from there; in a "
            '"dist_sync" store without kv_python_updaters every worker has it'
        )

    def load_states(self, states: Arrays) -> None:
        self.states()


class UpdaterOfServers:
    """The object that servers are sent as a pickle."""

    def __init__(self, updater: LocalUpdater | None, function: Callable[[Any, Any, Any], object] | None) -> None:
        self._updater = updater
        self._function = function

    def __call__(self, key: Any, grad: Any, stored: Any) -> None:
        if self._updater is not None:
            self._updater(str(key), grad, stored)
        elif self._function is not None:
            self._function(key, grad, stored)

    def change(self, **numbers: Any) -> None:
        if self._updater is not None:
            self._updater.change(**numbers)
