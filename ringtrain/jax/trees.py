"""Pytrees of arrays as lists with names, and keys of random generators as arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import ringtrain._core as _core

_COMPLEX = ("complex64", "complex128")


class Tree(NamedTuple):
    """A pytree in parts. `paths` are such as ".encoder.0.weight", and "" for what is one array."""

    leaves: list[Any]
    paths: tuple[str, ...]
    structure: Any

    @staticmethod
    def of(tree: Any) -> Tree:
        """Raises ValueError where two leaves have the same path, such as those of the keys 1 and "1"."""
        with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)
        paths = tuple("".join(f".{_text(key)}" for key in path) for path, _ in with_paths)
        repeated = [path for path, count in Counter(paths).items() if count > 1]
        if repeated:
            raise ValueError(f"two arrays of this tree have the path {repeated[0]}: give them other keys")
        return Tree([leaf for _, leaf in with_paths], paths, structure)

    def with_leaves(self, leaves: Sequence[Any]) -> Any:
        return jax.tree_util.tree_unflatten(self.structure, leaves)


def _text(key: Any) -> str:
    """Of a dict's, a list's, a class's or an unknown node's child."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


class Carried(NamedTuple):
    """An array to send, and the function that makes the received one an array of its kind."""

    array: Any
    back: Callable[[Any], Any]


def is_key(array: Any) -> bool:
    """Whether it holds keys of a random generator."""
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def carried(value: Any, title: str, takes_keys: bool) -> Carried:
    """As an array that the core can send.

    Args:
        value: an array, maybe a traced one, or a number.
        title: of the operation, for errors.
        takes_keys: whether keys of random generators can be sent: by Sum, and by operations that only move elements.

    Raises:
        TypeError: nothing that can be sent.
    """
    if is_key(value):
        if not takes_keys:
            raise TypeError(f"{title}: keys of a random generator can be sent, but not averaged or compared")
        kind = jax.random.key_impl(value)
        data = carried(jax.random.key_data(value), title, True)
        return Carried(data.array, lambda result: jax.random.wrap_key_data(data.back(result), impl=kind))
    if not (hasattr(value, "dtype") or isinstance(value, (bool, int, float, complex))):
        raise TypeError(f"{title}: a {type(value).__qualname__} is no array; send it with broadcast_object")
    array = jnp.asarray(value)
    name = array.dtype.name
    if name in _core.DTYPES or name in _COMPLEX:
        return Carried(array, lambda result: result)
    raise TypeError(f"{title}: ringtrain cannot send {name}; convert it to one of {', '.join(_core.DTYPES)}")
