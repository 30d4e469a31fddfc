"""Optimizers and gradients over all ranks: optax's transformations, and what jax.grad returns."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ringtrain._core import ReduceOp
from ringtrain.engine.compression import AnyCompressor, Compression, GradientCompression, PowerSGD
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.requirements import (
    require_compressor,
    require_op,
    require_passes,
    require_predivide_factor,
    require_process_set,
    require_weight,
)
from ringtrain.failure import call_place
from ringtrain.jax.ops import allreduce
from ringtrain.jax.power_sgd import PowerSGDReduction, PowerSGDState
from ringtrain.jax.primitives import How, Names, replicated_p, require_finite_p
from ringtrain.jax.replicas import compared
from ringtrain.jax.trees import Tree
from ringtrain.job import session
from ringtrain.ops import Average, Max, Sum

Transformation = TypeVar("Transformation")

# How many names were given away in this generation, by the ranks of the process set.
_taken: Counter[tuple[int, ...]] = Counter()
session.at_init(lambda _settings: _taken.clear())


def distribute(
    optimizer: Transformation,
    op: ReduceOp = Average,
    compression: GradientCompression = Compression.none,
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    nan_check: bool = False,
    prefix: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Transformation:
    """An optimizer of optax that gets the averages of the gradients over the ranks.

    tx = hvd.distribute(optax.adam(1e-3))
    updates, state = tx.update(gradients, state, params)  # inside jit, or not
    updates, state = tx.update(gradients, state, params, weight=samples)  # the mean over the samples of all ranks

    Other arguments that come from the data are reduced, too, as one process with all data would have them: `value` and
    `grad`, and the results of `value_fn`, `obj_fn` and `grad_fn`, are averaged, or summed for op=Sum. All else that
    `update` gets must be the same on all ranks, as params and the state are: some elements of these are compared in
    each step, and a warning names once what differs.

    `weight` is that of `allreduce`, for op=Average. With backward_passes_per_step that of the last call is for the sum
    of the passes.

    All ranks call it in the same order, or give a prefix.

    Args:
        optimizer: optax's, or any named tuple of `init` and `update`.
        op: Average, Sum, Adasum, ...
        compression: how gradients travel, such as Compression.fp16, or Compression.powersgd(rank=4), which then has its
            state in that of the optimizer.
        backward_passes_per_step: update only at every n-th call, with the sum of the gradients of n calls; the other
            updates are zeros. This is optax.MultiSteps, around the distributed optimizer.
        gradient_predivide_factor: f divides by f before the sum and multiplies by f / size after it; for Average only.
        average_aggregated_gradients: divide by backward_passes_per_step too, as optax.MultiSteps does. Off, as in
            Horovod.
        nan_check: look for NaN and infinity in every gradient; NonFiniteError on all ranks, and no update.
        prefix: put before the names of all gradients. None numbers them: gradients0, gradients1, ...
        process_set: the ranks that take part; the others update with their own gradients.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of its range.
    """
    require_process_set(process_set, "gradients")
    of_whole = Compression.none if isinstance(compression, PowerSGD) else compression
    name = prefix or _next_prefix(process_set)
    checks = nan_check and of_whole is compression  # with PowerSGD the gradients are not what is sent
    reduce = _reduction(op, of_whole, gradient_predivide_factor, checks, name, process_set)
    of_all_ranks = _reduction_of_arguments(op, name, process_set)
    wrapped: Any = optimizer
    if not callable(getattr(wrapped, "update", None)) or not hasattr(wrapped, "_replace"):
        raise TypeError(
            f"{type(optimizer).__name__} is not an optimizer of optax: it is not a named tuple of init(params) and "
            "update(updates, state, params)"
        )
    require_passes(backward_passes_per_step)

    def update(updates: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
        averages = reduce(updates, weight)
        extra = of_all_ranks(extra, updates, averages, weight)
        if process_set.included():
            averages = compared(averages, {"state": state, "params": params}, name, process_set)
        return wrapped.update(averages, state, params, **extra)

    distributed = _taking_weight(wrapped)._replace(update=update)
    if isinstance(compression, PowerSGD):
        distributed = _with_power_sgd(wrapped, compression, op, reduce, of_all_ranks, nan_check, name, process_set)
    if backward_passes_per_step > 1:
        import optax

        steps = optax.MultiSteps(distributed, backward_passes_per_step, use_grad_mean=average_aggregated_gradients)
        distributed = _taking_weight(steps.gradient_transformation())
    whole: Transformation = distributed
    return whole


def _reduction_of_arguments(op: ReduceOp, name: str, process_set: ProcessSet) -> Callable[..., dict[str, Any]]:
    """Returns the function that makes arguments of an optimizer's `update` those of all ranks.

    A line search that saw the loss of this rank alone would take another step than those of the other ranks.
    """
    op_of_losses = Sum if op == Sum else Average  # as one process would add up, or average, its losses

    def reduced(x: Any, part: str, weight: Any) -> Any:
        floats = jax.tree.map(lambda leaf: leaf if _is_inexact(leaf) else jnp.asarray(leaf, float), x)
        return allreduce(floats, op_of_losses, f"{name}.{part}", process_set=process_set, weight=weight)

    def of_function(function: Callable[..., Any], part: str, weight: Any) -> Callable[..., Any]:
        @functools.wraps(function)  # optax reads the names of its arguments
        def of_all(params: Any, *args: Any, **kwargs: Any) -> Any:
            # The gradient by the parameters that all ranks have is that of all ranks.
            return reduced(function(_replicated(params, f"{name}.{part}", process_set), *args, **kwargs), part, weight)

        return of_all

    def of_all_ranks(extra: dict[str, Any], gradients: Any, averages: Any, weight: Any) -> dict[str, Any]:
        if not process_set.included():
            return extra
        known = {part: extra[part] for part in _OF_ONE_RANK if extra.get(part) is not None}
        for part, given in known.items():
            if callable(given):
                known[part] = of_function(given, part, weight)
            else:
                known[part] = averages if _is_same(given, gradients) else reduced(given, part, weight)
        return {**extra, **known}

    return of_all_ranks


# Arguments of optimizers of optax that a rank computes from its own data.
_OF_ONE_RANK = ("value", "grad", "value_fn", "obj_fn", "grad_fn")


def _is_inexact(leaf: Any) -> bool:
    return isinstance(leaf, float) or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact))


def _is_same(one: Any, other: Any) -> bool:
    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(leaves) == len(others) and all(a is b for a, b in zip(leaves, others, strict=True))


def _replicated(params: Any, name: str, process_set: ProcessSet) -> Any:
    tree = Tree.of(params)
    if not tree.leaves:
        return params
    leaves = [jnp.asarray(leaf) for leaf in tree.leaves]
    names = Names(f"{name}.params", call_place(), tree.paths)
    return tree.with_leaves(replicated_p.bind(*leaves, names=names, how=How(process_set)))


def _with_power_sgd(
    wrapped: Any,
    compression: PowerSGD,
    op: ReduceOp,
    reduce: Callable[..., Any],
    of_all_ranks: Callable[..., dict[str, Any]],
    nan_check: bool,
    name: str,
    process_set: ProcessSet,
) -> Any:
    """The optimizer of optax whose state has that of PowerSGD beside its own."""
    if op not in (Average, Sum):
        raise ValueError(f"{compression!r} needs op=Average or op=Sum, not {op}")

    power_sgd = PowerSGDReduction(compression, process_set, reduce)

    def init(params: Any) -> PowerSGDState:
        return PowerSGDState(wrapped.init(params), power_sgd.init(params))

    def update(updates: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
        averages, kept = power_sgd.reduce(updates, state.power_sgd, weight)
        if nan_check and process_set.included():
            averages = _checked(updates, weight, averages, name, process_set)
        extra = of_all_ranks(extra, updates, averages, weight)
        if process_set.included():
            replicated = {"factors": state.power_sgd.factors, "state": state.inner, "params": params}
            averages = compared(averages, replicated, name, process_set)
        changes, inner = wrapped.update(averages, state.inner, params, **extra)
        return changes, PowerSGDState(inner, kept)

    return _taking_weight(wrapped)._replace(init=init, update=update)


def _taking_weight(optimizer: Any) -> Any:
    """Returns an optimizer of optax with a class whose `update` takes more arguments; others as they are."""
    optax = sys.modules.get("optax")
    if optax is not None and isinstance(optimizer, optax.GradientTransformation):
        return optax.GradientTransformationExtraArgs(*optimizer)
    return optimizer


# Horovod's name for it.
DistributedOptimizer = distribute


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    op: ReduceOp = Average,
    compression: AnyCompressor = Compression.none,
    prefix: str | None = None,
    process_set: ProcessSet = global_process_set,
    weight: Any = None,
) -> Callable[..., Any]:
    """As jax.value_and_grad, with the averages of the gradients over the ranks. The value is this rank's own.

    All ranks call it in the same order, or give a prefix. The other arguments are those of `distribute`.

    Args:
        weight: that of `allreduce`, for op=Average; or a function of the arguments of `fun` that returns it, such as
            `lambda params, batch: len(batch)`. With mean losses the gradients are then those of the mean over the
            samples of all ranks.
    """
    require_process_set(process_set, "gradients")
    name = prefix or _next_prefix(process_set)
    reduce = _reduction(op, compression, 1.0, False, name, process_set)
    if weight is not None and op != Average:
        require_weight(0, op, "gradients")
    of_rank = jax.value_and_grad(fun, argnums, has_aux)

    def value_and_averages(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        own = weight(*args, **kwargs) if callable(weight) else weight
        value, gradients = of_rank(*args, **kwargs)
        averages = reduce(gradients, own)
        if process_set.included():
            by = args[argnums] if isinstance(argnums, int) else [args[number] for number in argnums]
            averages = compared(averages, {"params": by}, name, process_set)
        return value, averages

    return value_and_averages


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    op: ReduceOp = Average,
    compression: AnyCompressor = Compression.none,
    prefix: str | None = None,
    process_set: ProcessSet = global_process_set,
    weight: Any = None,
) -> Callable[..., Any]:
    """As jax.grad, with the averages of the gradients over the ranks. The arguments are those of `value_and_grad`."""
    how: dict[str, Any] = {"op": op, "compression": compression, "prefix": prefix, "process_set": process_set}
    with_value = value_and_grad(fun, argnums, has_aux, weight=weight, **how)

    def averages(*args: Any, **kwargs: Any) -> Any:
        value, gradients = with_value(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return averages


def _reduction(
    op: ReduceOp,
    compression: AnyCompressor,
    predivide: float,
    nan_check: bool,
    name: str,
    process_set: ProcessSet,
) -> Callable[..., Any]:
    """Returns the function that averages the gradients of one optimizer, by weight if it gets one."""
    require_op(op)
    require_compressor(compression)
    predivide = require_predivide_factor(predivide)
    if predivide != 1 and op != Average:
        raise ValueError("gradient_predivide_factor splits the division of an average, so it needs op=Average")

    def reduce(gradients: Any, weight: Any = None) -> Any:
        if not process_set.included():
            return gradients
        factors = (1.0 / predivide, predivide)
        averages = allreduce(gradients, op, name, *factors, process_set, compression=compression, weight=weight)
        return _checked(gradients, weight, averages, name, process_set) if nan_check else averages

    return reduce


def _next_prefix(process_set: ProcessSet) -> str:
    # Counted per process set: a rank that is in other sets too has more optimizers than its peers.
    ranks = tuple(process_set.ranks or ())
    _taken[ranks] += 1
    return f"gradients{_taken[ranks] - 1}"


def _checked(gradients: Any, weight: Any, averages: Any, name: str, process_set: ProcessSet) -> Any:
    """The averages, once it is certain that the gradients of all ranks are finite."""
    tree, results = Tree.of(gradients), Tree.of(averages)
    size, place = process_set.size() or 1, process_set.rank() or 0
    if not tree.leaves:
        return averages
    own = [
        jnp.logical_not(jnp.isfinite(leaf).all()) if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.array(False)
        for leaf in map(jnp.asarray, tree.leaves)
    ]
    if weight is not None:
        own = [jnp.logical_and(flag, jnp.asarray(weight) != 0) for flag in own]  # what has no weight is not read
    # Of several ranks the first one, which is the largest number.
    flags = allreduce(jnp.stack(own) * jnp.int32(size - place), Max, f"{name}.<finite>", 1.0, 1.0, process_set)
    ranks = tuple(process_set.ranks or (0,))
    names = tuple(path.removeprefix(".") or name for path in tree.paths)
    first, *others = results.leaves
    return results.with_leaves([require_finite_p.bind(first, flags, names=names, ranks=ranks), *others])
