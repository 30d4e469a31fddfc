"""The same parameters on every rank: pytrees, keys of random generators among them, from one rank or compared."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np

from ringtrain import ops
from ringtrain.jax.primitives import wait_for
from ringtrain.jax.trees import Tree, is_key
from ringtrain.process_sets import ProcessSet, global_process_set
from ringtrain.training import replicas

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
    handles = [
        ops.broadcast_async_(array, root_rank, f"{prefix or 'parameters'}{path}", process_set)
        for array, path in zip(arrays, tree.paths, strict=True)
    ]
    received = wait_for(handles)
    leaves = [as_leaf(array, leaf) for array, leaf in zip(received, tree.leaves, strict=True)]
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
    """A copy of a leaf that can be written to. Raises TypeError for anything else."""
    values = jax.random.key_data(leaf) if is_key(leaf) else leaf
    if not (hasattr(values, "dtype") or isinstance(values, (bool, int, float, complex))):
        raise TypeError(
            f'params["{path.removeprefix(".")}"] is {type(leaf).__name__}, no array: send it with broadcast_object'
        )
    return np.array(values, order="C", subok=True)  # a masked array stays one, and is refused


def as_leaf(array: np.ndarray[Any, Any], like: Any) -> Any:
    """Makes a leaf again of the result of `on_host`, in the place of the old one."""
    if is_key(like):
        data = jax.device_put(array, next(iter(like.sharding.device_set)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    if not hasattr(like, "dtype"):
        return type(like)(array.item())
    if isinstance(like, jax.Array):
        return jax.device_put(array, like.sharding)
    return array if isinstance(like, np.ndarray) else array[()]
