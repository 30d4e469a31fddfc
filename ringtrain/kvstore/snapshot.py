"""All that a store keeps, as named arrays: values, and what its optimizer remembers."""

from __future__ import annotations

from ringtrain.arrays.adapter import adapter_for
from ringtrain.kvstore.entries import Entries
from ringtrain.kvstore.states import Arrays
from ringtrain.kvstore.updaters import Updater

_VALUE, _STATE = "value/", "state/"


def of(entries: Entries, updater: Updater | None) -> Arrays:
    """Raises ValueError for a key that has no value."""
    values = {_VALUE + entry.name: entry.value() for entry in entries.values()}
    arrays = {name: adapter_for(value).on_host(value) for name, value in values.items()}
    if updater is not None:
        arrays |= {_STATE + name: array for name, array in updater.states().items()}
    return arrays


def restore(arrays: Arrays, entries: Entries, updater: Updater | None) -> None:
    """Raises ValueError where the arrays do not fit the keys or the optimizer; nothing has changed then."""
    by_name = {entry.name: entry for entry in entries.values()}
    values, remembered = _part(arrays, _VALUE), _part(arrays, _STATE)
    for name, array in values.items():
        if name not in by_name:
            raise ValueError(f'the file has key "{name}", which has no value here; give it one with init')
        if by_name[name].shape != array.shape:
            raise ValueError(f'key "{name}" has shape {by_name[name].shape}, but {array.shape} in the file')
        by_name[name].value()
    if remembered and updater is None:
        raise ValueError("the file has what an optimizer remembers; call set_optimizer before load")
    if updater is not None:
        updater.load_states(remembered)
    for name, array in values.items():
        by_name[name].overwrite(array)


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
