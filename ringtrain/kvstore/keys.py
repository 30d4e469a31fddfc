"""Keys and values as a call gives them, grouped by key."""

from __future__ import annotations

import operator
from typing import Any

Key = int | str
# The values of each key, in the order in which the keys came first.
Groups = dict[Key, list[Any]]


def grouped(call: str, key: Any, value: Any) -> Groups:
    """What one call gives: a value or a list of them for a key, or for each of a list of keys.

    Repeated keys have the values of all their places.

    Raises:
        TypeError: a key that is neither int nor str, or both in one list.
        ValueError: another number of values than of keys, or a key without a value.
    """
    if isinstance(key, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(key):
            given = f"{len(value)} values" if isinstance(value, list | tuple) else "one value"
            raise ValueError(f"{call}: a list of {len(key)} keys takes a list of as many values, not {given}")
        groups: Groups = {}
        for one, of_one in zip(key, value, strict=True):
            values = of_one if isinstance(of_one, list | tuple) else (of_one,)
            groups.setdefault(_checked(call, one), []).extend(values)
        _require_one_kind(call, groups)
    else:
        groups = {_checked(call, key): list(value) if isinstance(value, list | tuple) else [value]}
    for one, values in groups.items():
        if not values:
            raise ValueError(f"{call}: key {one!r} comes without a value")
    return groups


def listed(call: str, key: Any) -> list[Key]:
    """The keys of a call that has no values."""
    keys = [_checked(call, one) for one in key] if isinstance(key, list | tuple) else [_checked(call, key)]
    _require_one_kind(call, keys)
    return keys


def _checked(call: str, key: Any) -> Key:
    if type(key) is str or type(key) is int:
        return key
    if isinstance(key, str):
        return str(key)
    if not isinstance(key, bool):
        try:
            return operator.index(key)
        except TypeError:
            pass
    raise TypeError(f"{call}: a key is an int or a str, not {type(key).__name__} {key!r}")


def _require_one_kind(call: str, keys: Any) -> None:
    if len({type(one) for one in keys}) > 1:
        raise TypeError(f"{call}: mixed key types: a store has int keys or str keys, not both")
