"""Compares what decides the next update, in each step: some elements of the parameters and of the optimizer's state.

Each rank makes one number d of 16 bits of each array. The sums over the ranks of 1, d and d * d say whether all have
the same number, since n * sum(d * d) - sum(d) ** 2 is the sum of the squares of all differences. So the ranks need not
know how many they are, and ranks that have joined count as none. The sums travel beside the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringtrain.engine.process_sets import ProcessSet
from ringtrain.jax.ops import allreduce
from ringtrain.jax.primitives import report_differences_p
from ringtrain.jax.trees import Tree, is_key
from ringtrain.ops import Sum

# So many elements of an array, evenly spread.
_ELEMENTS = 16


def compared(results: Any, compared_trees: dict[str, Any], name: str, process_set: ProcessSet) -> Any:
    """Return the results. A warning on the first of the ranks names, once, what is not the same on all of them.

    Args:
        results: a pytree of arrays that the program needs.
        compared_trees: pytrees of arrays, by what their users call them, such as "params".
        name: of the gradients.
        process_set: the ranks that are compared; this one is among them.
    """
    tree = Tree.of(results)
    leaves = {
        path: jnp.asarray(leaf)
        for title, whole in compared_trees.items()
        for path, leaf in _leaves_of(title, whole)
        if _can_be_compared(leaf)
    }
    if (process_set.size() or 1) == 1 or not tree.leaves or not leaves:
        return results
    # Learning rates and counts first, and in one order on all ranks.
    names = sorted(leaves, key=lambda path: (leaves[path].size, path))
    own = _with_squares(_numbers_of([jax.lax.stop_gradient(leaves[path]) for path in names]))
    flags = _flags(allreduce(own, Sum, f"{name}.<replicas>", process_set=process_set))
    first, *others = tree.leaves
    before, after = _words(name)
    reported = report_differences_p.bind(
        first, flags, names=tuple(names), before=before, after=after, rank=(process_set.ranks or [0])[0]
    )
    return tree.with_leaves([reported, *others])


def _words(name: str) -> tuple[str, str]:
    """Returns the words of a warning before the names of arrays that differ, and after them."""
    return f"{name}: the ranks do not have the same ", (
        ", and each goes on with a model of its own. Begin with params, state = hvd.broadcast_parameters((params, "
        "state)), use the same optimizer and learning rate on all ranks, and give update() the same values, but for "
        "gradients and losses. hvd.check_replicas((params, state)) says which ranks differ. This is said once"
    )


def _leaves_of(title: str, whole: Any) -> list[tuple[str, Any]]:
    try:
        tree = Tree.of(whole)
    except ValueError:  # two leaves with one path, which broadcast_parameters refuses; here their order names them
        return [(f"{title}[{place}]", leaf) for place, leaf in enumerate(jax.tree_util.tree_leaves(whole))]
    return [(title + path, leaf) for path, leaf in zip(tree.paths, tree.leaves, strict=True)]


def _can_be_compared(leaf: Any) -> bool:
    if isinstance(leaf, (bool, int, float, complex)):
        return True
    if not hasattr(leaf, "dtype") or not np.size(leaf):
        return False
    return is_key(leaf) or jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == jnp.bool_


def _numbers_of(leaves: Sequence[Any]) -> list[Any]:
    """One number of each array, in parts: outside of jit one for each placement of arrays on devices."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return [_numbers(leaves)]
    if len({frozenset(leaf.devices()) for leaf in leaves}) == 1:
        return [np.asarray(_numbers(leaves))]
    return [np.asarray(_numbers([leaf])) for leaf in leaves]


@jax.jit
def _with_squares(parts: Sequence[Any]) -> jax.Array:
    numbers = jnp.concatenate(parts)
    return jnp.concatenate([jnp.ones_like(numbers[:1]), numbers, numbers * numbers])


@jax.jit
def _flags(sums: jax.Array) -> jax.Array:
    """Says of each array whether the ranks have different numbers."""
    count, (of_numbers, of_squares) = sums[0], jnp.split(sums[1:], 2)
    return (count * of_squares != of_numbers * of_numbers).astype(jnp.int32)


@jax.jit
def _numbers(leaves: Sequence[Any]) -> jax.Array:
    samples = [_sample(leaf) for leaf in leaves]
    width = max(len(sample) for sample in samples)
    rows = jnp.stack([jnp.pad(sample, (0, width - len(sample))) for sample in samples])
    factors = jnp.asarray(np.random.default_rng(0).integers(0, 2**31, width, np.uint32) * 2 + 1)
    return _mixed((_mixed(rows) * factors).sum(1, dtype=jnp.uint32)) >> 16


def _mixed(words: jax.Array) -> jax.Array:
    """Each bit decides about all bits of the result: two floats that are near differ in a few."""
    words = (words ^ (words >> 16)) * np.uint32(0x7FEB352D)
    words = (words ^ (words >> 15)) * np.uint32(0x846CA68B)
    return words ^ (words >> 16)


def _sample(leaf: Any) -> jax.Array:
    flat = (jax.random.key_data(leaf) if is_key(leaf) else leaf).reshape(-1)
    step = max(1, flat.size // _ELEMENTS)
    return _bits(jax.lax.slice(flat, (0,), (min(flat.size, step * _ELEMENTS),), (step,)))


def _bits(array: jax.Array) -> jax.Array:
    """As uint32, one or two for each element."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.concatenate([_bits(array.real), _bits(array.imag)])
    if array.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(array, jnp.uint32).reshape(-1)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(jnp.uint32)
    if array.dtype.itemsize == 2:
        return jax.lax.bitcast_convert_type(array, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)
