"""A state of arrays of any library, which stay where they are, and of optimizers and other objects beside them."""

from __future__ import annotations

from typing import Any

from ringtrain import objects
from ringtrain.arrays.adapter import adapter_for
from ringtrain.elastic import agreement
from ringtrain.elastic.state import ObjectState


class ArrayState(ObjectState):
    """Arrays, optimizers and other objects, each an attribute of this one.

    Args:
        values: an array, or arrays in lists and dicts, nested as you like, are saved, restored and overwritten in
            place; what has `state_dict` and `load_state_dict`, such as the optimizers of ringtrain, is asked for these;
            anything else is a Python object.
    """

    _arrays: dict[str, dict[str, Any]]  # of each attribute by their paths: the copies
    _holders: dict[str, Any]  # of each attribute that has a state_dict: the copy

    def __init__(self, **values: Any):
        arrays = {name: value for name, value in values.items() if _has_arrays(value)}
        holders = {name: value for name, value in values.items() if name not in arrays and _has_state_dict(value)}
        self._arrays = {name: {} for name in arrays}
        self._holders = dict.fromkeys(holders)
        for name, value in {**arrays, **holders}.items():
            setattr(self, name, value)
        super().__init__(**{name: value for name, value in values.items() if name not in {**arrays, **holders}})
        self.save()

    def save(self) -> None:
        super().save()
        for name, copies in self._arrays.items():
            self._arrays[name] = _copied(self._by_path(name), copies)
        for name in self._holders:
            self._holders[name] = getattr(self, name).state_dict()

    def restore(self) -> None:
        super().restore()
        for name, copies in self._arrays.items():
            for path, array in self._by_path(name).items():
                adapter_for(array).assign(array, copies[path])
        for name, content in self._holders.items():
            getattr(self, name).load_state_dict(content)

    def sync_from(self, root_rank: int) -> None:
        super().sync_from(root_rank)
        for name in self._arrays:
            agreement.share_arrays(self._by_path(name), root_rank, name)
        for name in self._holders:
            holder = getattr(self, name)
            agreement.share_object(holder.state_dict(), root_rank, name, holder.load_state_dict)

    def saved_content(self) -> Any:
        arrays = {
            name: {path: adapter_for(array).on_host(array) for path, array in copies.items()}
            for name, copies in self._arrays.items()
        }
        return {"objects": super().saved_content(), "arrays": arrays, "holders": self._holders}

    def load_content(self, content: Any) -> None:
        super().load_content(content["objects"])
        for name in self._arrays:
            for path, array in self._by_path(name).items():
                adapter_for(array).assign(array, content["arrays"][name][path])
        for name in self._holders:
            getattr(self, name).load_state_dict(content["holders"][name])

    def _by_path(self, name: str) -> dict[str, Any]:
        return objects.by_path(getattr(self, name), "ArrayState")


def _has_arrays(value: Any) -> bool:
    if _has_state_dict(value):
        return False
    try:
        return bool(objects.by_path(value, "ArrayState"))
    except TypeError:
        return False


def _has_state_dict(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _copied(arrays: dict[str, Any], copies: dict[str, Any]) -> dict[str, Any]:
    """Copies of the arrays, in the memory of earlier ones that fit."""
    for path, array in arrays.items():
        adapter, place = adapter_for(array), copies.get(path)
        if place is None or place.shape != array.shape or place.dtype != array.dtype:
            copies[path] = place = adapter.empty_like(array)
        adapter.assign(place, array)
    return copies
