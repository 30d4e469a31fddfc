"""PowerSGD for the gradients of JAX, inside jit or not; the method is in `ringtrain.training.power_sgd`.

The state of the optimizer has the factors and the errors. Here P is n x rank, and Q is m x rank. XLA computes the
gradients from the averages of the factors: with the same bits on ranks whose CPUs or GPUs are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ringtrain.engine.compression import PowerSGD
from ringtrain.engine.process_sets import ProcessSet
from ringtrain.jax.trees import Tree, is_key


class Kept(NamedTuple):
    """The state of PowerSGD, by the paths of the gradients that travel as factors."""

    step: jax.Array  # int32[]
    factors: dict[str, jax.Array]  # the same on all ranks
    errors: dict[str, jax.Array]  # of this rank alone; empty without error feedback


class PowerSGDState(NamedTuple):
    """The state of an optimizer with PowerSGD, and that of the optimizer within."""

    inner: Any
    power_sgd: Kept


class PowerSGDReduction:
    """Averages the gradients of one optimizer.

    Args:
        how: the settings.
        process_set: the ranks that take part.
        reduce: averages or sums a pytree, by weight if it gets one.
    """

    def __init__(self, how: PowerSGD, process_set: ProcessSet, reduce: Callable[[Any, Any], Any]) -> None:
        self._how = how
        self._process_set = process_set
        self._reduce = reduce

    def init(self, params: Any) -> Kept:
        """Return the state before the first step."""
        factors, errors = {}, {}
        for name, leaf in self._factored(_named(Tree.of(params))).items():
            columns, dtype = leaf.size // leaf.shape[0], _dtype_of(leaf)
            factors[name] = jnp.asarray(self._how.first_factor(name, columns, 0).T, dtype)
            if self._how.use_error_feedback:
                errors[name] = jnp.zeros((leaf.shape[0], columns), dtype)
        return Kept(jnp.zeros((), jnp.int32), factors, errors)

    def reduce(self, gradients: Any, kept: Kept, weight: Any) -> tuple[Any, Kept]:
        """Return the averages, and the state after this step."""
        if not self._process_set.included():
            return gradients, kept
        tree = Tree.of(gradients)
        if not self._how.start_step:
            averages, after = self._as_factors(tree, kept, weight)
        else:
            averages, after = jax.lax.cond(
                kept.step < self._how.start_step,
                lambda: (self._whole(_named(tree), weight), kept._replace(step=kept.step + 1)),
                lambda: self._as_factors(tree, kept, weight),
            )
        return tree.with_leaves(averages), after

    def _whole(self, named: dict[str, Any], weight: Any) -> list[Any]:
        """Returns the averages in the dtypes of the gradients, as `_as_factors` has them."""
        averages = self._reduce(named, weight)
        return [averages[name].astype(jnp.result_type(leaf)) for name, leaf in named.items()]

    def _as_factors(self, tree: Tree, kept: Kept, weight: Any) -> tuple[list[Any], Kept]:
        """Returns the averages of the leaves, and the state after this step."""
        how, named = self._how, _named(tree)
        factored = self._factored(named)
        matrices = {
            name: leaf.reshape(leaf.shape[0], -1).astype(_dtype_of(leaf)) + kept.errors.get(name, 0)
            for name, leaf in factored.items()
        }
        whole = {name: leaf for name, leaf in named.items() if name not in factored}
        first = {name: matrices[name] @ self._factor(name, kept) for name in factored}
        averages = self._reduce({**whole, **first}, weight)
        bases = {name: jnp.linalg.qr(averages[name])[0] for name in factored}
        own_second = {name: matrices[name].T @ bases[name] for name in factored}
        second = self._reduce({how.second_name(name): factor for name, factor in own_second.items()}, weight)
        factors, errors = dict(kept.factors), dict(kept.errors)
        for name, leaf in factored.items():
            factor = second[how.second_name(name)]
            is_finite = jnp.isfinite(factor).all()  # of all ranks: else nothing is kept of this step
            if how.warm_start:
                factors[name] = jnp.where(is_finite, factor, kept.factors[name])
            if how.use_error_feedback:
                counts = is_finite if weight is None else jnp.logical_and(is_finite, jnp.asarray(weight) != 0)
                error = matrices[name] - bases[name] @ own_second[name].T
                errors[name] = jnp.where(counts, error, kept.errors[name])
            averages[name] = (bases[name] @ factor.T).reshape(leaf.shape).astype(leaf.dtype)
        return [averages[name] for name in named], Kept(kept.step + 1, factors, errors)

    def _factored(self, named: dict[str, Any]) -> dict[str, Any]:
        return {
            name: jnp.asarray(leaf)
            for name, leaf in named.items()
            if not is_key(leaf)
            and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
            and self._how.pays(jnp.shape(leaf))
        }

    def _factor(self, name: str, kept: Kept) -> jax.Array:
        """The factor to project on."""
        factor = kept.factors[name]
        if self._how.warm_start:
            return factor
        key = jax.random.fold_in(jax.random.key(self._how.random_seed), kept.step)
        key = jax.random.fold_in(key, sorted(kept.factors).index(name))
        return jax.random.normal(key, factor.shape, factor.dtype)


def _named(tree: Tree) -> dict[str, Any]:
    """The leaves by their paths, in order."""
    names = (path.removeprefix(".") or "gradient" for path in tree.paths)
    return dict(zip(names, tree.leaves, strict=True))


def _dtype_of(leaf: Any) -> Any:
    return jnp.float64 if jnp.result_type(leaf) == jnp.float64 else jnp.float32
