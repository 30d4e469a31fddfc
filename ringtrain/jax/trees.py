"""Pytrees of arrays: as lists with names, and the same ones on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import ringtrain._core as _core
from ringtrain.arrays import jax as of_jax
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.jax import private
from ringtrain.ops import objects
from ringtrain.training import replicas

# --- pytrees as lists with names, and keys of random generators as arrays ---------------------------------------------


_COMPLEX = ("complex64", "complex128")


class _NoValues(NamedTuple):
    """Stands in a pytree for an array of float0, which is what jax.grad returns for an integer."""

    shape: tuple[int, ...]


def _without_values_again(shape: tuple[int, ...], _: Any) -> Any:
    return np.zeros(shape, jax.dtypes.float0)


jax.tree_util.register_pytree_node(_NoValues, lambda one: ((), one.shape), _without_values_again)


def _has_no_values(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def _without_values(leaf: Any) -> Any:
    return _NoValues(np.shape(leaf)) if _has_no_values(leaf) else leaf


class Tree(NamedTuple):
    """A pytree in parts. `paths` are such as ".encoder.0.weight", and "" for what is one array.

    Gradients by integers, which have no values, are part of the structure, as None is.
    """

    leaves: list[Any]
    paths: tuple[str, ...]
    structure: Any

    @staticmethod
    def of(tree: Any) -> Tree:
        """Raises ValueError where two leaves have the same path, such as those of the keys 1 and "1"."""
        with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)
        if any(_has_no_values(leaf) for _, leaf in with_paths):
            tree = jax.tree_util.tree_map(_without_values, tree)
            with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)
        paths = tuple("".join(f".{_text(key)}" for key in path) for path, _ in with_paths)
        repeated = [path for path, count in Counter(paths).items() if count > 1]
        if repeated:
            raise ValueError(f"two arrays of this tree have the path {repeated[0]}: give them other keys")
        return Tree([leaf for _, leaf in with_paths], paths, structure)

    def with_leaves(self, leaves: Sequence[Any]) -> Any:
        return jax.tree_util.tree_unflatten(self.structure, leaves)


def _text(key: Any) -> str:
    """Returns the text of a child's key: of a dict, a list, a class or an unknown node."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


class Carried(NamedTuple):
    """An array to send, and the function that makes the received one an array of its kind.

    `ndim`: of what the script has given.
    """

    array: Any
    back: Callable[[Any], Any]
    ndim: int


def is_key(array: Any) -> bool:
    """Whether it holds keys of a random generator."""
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def carried(value: Any, title: str, takes_keys: bool, is_moved: bool = False) -> Carried:
    """As an array that the core can send.

    Args:
        value: an array, maybe a traced one, or a number.
        title: of the operation, for errors.
        takes_keys: whether keys of random generators can be sent: by Sum, and by operations that only move elements.
        is_moved: the operation only moves elements, so it takes those of one byte of any dtype.

    Raises:
        TypeError: nothing that can be sent.
    """
    if is_key(value):
        if not takes_keys:
            raise TypeError(f"{title}: keys of a random generator can be sent, but not averaged or compared")
        kind = jax.random.key_impl(value)
        data = carried(jax.random.key_data(value), title, True)
        return Carried(data.array, lambda result: jax.random.wrap_key_data(data.back(result), impl=kind), value.ndim)
    if not (hasattr(value, "dtype") or isinstance(value, (bool, int, float, complex))):
        raise TypeError(f"{title}: a {type(value).__qualname__} is not an array; send it with broadcast_object")
    array = jnp.asarray(value)
    name = array.dtype.name
    if name in _core.DTYPES or name in _COMPLEX:
        return Carried(array, as_weak if is_weak(array) else lambda result: result, array.ndim)
    if is_moved and jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize == 1 and _bits_of(array) == 8:
        dtype = array.dtype
        bits = jax.lax.bitcast_convert_type(array, jnp.uint8)
        return Carried(bits, lambda result: jax.lax.bitcast_convert_type(result, dtype), array.ndim)
    if is_moved and _bits_of(array) < 8:  # exact in the wider one
        dtype, wide = array.dtype, jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int8
        return Carried(array.astype(wide), lambda result: result.astype(dtype), array.ndim)
    raise TypeError(f"{title}: ringtrain cannot send {name}; convert it to one of {', '.join(_core.DTYPES)}")


def _bits_of(array: Any) -> int:
    kind = jnp.finfo if jnp.issubdtype(array.dtype, jnp.floating) else jnp.iinfo
    return int(kind(array.dtype).bits) if jnp.issubdtype(array.dtype, jnp.number) else 8


def is_weak(array: Any) -> bool:
    """Whether it takes the dtype of what it is combined with, as Python's numbers do."""
    return bool(getattr(array, "weak_type", False))


def as_weak(array: Any) -> Any:
    return private.with_weak_type(array)


# --- the same parameters on every rank --------------------------------------------------------------------------------


Params = TypeVar("Params")


def broadcast_parameters(
    params: Params, root_rank: int = 0, prefix: str | None = None, *, process_set: ProcessSet = global_process_set
) -> Params:
    """The parameters of one rank, on all ranks. Outside of jit.

    JAX's arrays cannot be written to, so take what it returns: `params = hvd.broadcast_parameters(params)`.

    Args:
        params: a pytree of arrays, of keys of random generators, and of numbers, such as parameters, or the state of
            an optimizer of optax. The same tree, dtypes and shapes on all ranks.
        root_rank: the rank of the world that has the right values.
        prefix: put before all names; needed only when threads of one process broadcast at the same time.
        process_set: the ranks that take part.

    Returns:
        A tree of new arrays, each on the device of the old one; NumPy's of NumPy's, and numbers of numbers.

    Raises:
        TypeError: a leaf is none of these; the message says where it is.
        MismatchError: the ranks have different dtypes or shapes under one name.
    """
    tree = Tree.of(params)
    arrays = [on_host(leaf, path) for leaf, path in zip(tree.leaves, tree.paths, strict=True)]
    name = prefix or "parameters"
    named = {f"{name}{path}": array for array, path in zip(arrays, tree.paths, strict=True)}
    objects.broadcast_arrays(named, root_rank, name, process_set)
    leaves = [as_leaf(array, leaf) for array, leaf in zip(arrays, tree.leaves, strict=True)]
    whole: Params = tree.with_leaves(leaves)
    return whole


def check_replicas(params: Any, process_set: ProcessSet = global_process_set) -> None:
    """Compare the parameters of all ranks, bit for bit. Outside of jit; all ranks of the process set call it together.

    Only 64 bits of each array travel, unless one differs.

    Args:
        params: as for `broadcast_parameters`.
        process_set: the ranks that are compared.

    Raises:
        ReplicaError: on all ranks, some array is not the same everywhere; the message names the first one, the ranks,
            and the first element.
        TypeError: a leaf is nothing that could be compared.
    """
    tree = Tree.of(params)
    arrays = {path.removeprefix("."): on_host(leaf, path) for leaf, path in zip(tree.leaves, tree.paths, strict=True)}
    replicas.check_replicas(arrays, process_set)


def on_host(leaf: Any, path: str) -> np.ndarray[Any, Any]:
    """A copy of a leaf that can be written to, of bytes where the core does not know the dtype.

    Raises:
        TypeError: of anything else.
        ValueError: other ranks have parts of the array.
    """
    values = jax.random.key_data(leaf) if is_key(leaf) else leaf
    if not (hasattr(values, "dtype") or isinstance(values, (bool, int, float, complex))):
        raise TypeError(
            f'params["{path.removeprefix(".")}"] is {type(leaf).__name__}, no array: send it with broadcast_object'
        )
    # A masked array stays one, and is refused.
    array: np.ndarray[Any, Any] = np.array(of_jax.on_host(values), order="C", subok=True)
    return array.view(np.uint8) if _is_only_moved(array.dtype) else array


def _is_only_moved(dtype: Any) -> bool:
    """Whether it is one of those that the core cannot reduce, such as float8."""
    return dtype.itemsize == 1 and dtype.name not in _core.DTYPES and jnp.issubdtype(dtype, jnp.number)


def as_leaf(array: np.ndarray[Any, Any], like: Any) -> Any:
    """Makes a leaf again of the result of `on_host`, in the place of the old one."""
    if is_key(like):
        data = of_jax.returned(array, jax.random.key_data(like))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    if not hasattr(like, "dtype"):
        return type(like)(array.item())
    if _is_only_moved(like.dtype):
        array = array.view(like.dtype)
    if isinstance(like, jax.Array):
        return of_jax.returned(as_weak(jnp.asarray(array)) if is_weak(like) else array, like)
    return array if isinstance(like, np.ndarray) else array[()]
