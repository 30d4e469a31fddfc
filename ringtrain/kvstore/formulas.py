"""Updates of whole arrays of NumPy, CuPy and torch: for GPUs, and as what the kernels of the core must equal.

The formulas of torch are those of ringtrain.optim; those of MXNet are here.

g is the gradient, w the weight. The names of the numbers are those of MXNet's arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ringtrain.kvstore import recipes
from ringtrain.kvstore.recipes import Recipe
from ringtrain.optim import namespace_of

_Arrays = Sequence[Any]


class Rates(NamedTuple):
    """What comes with each update. `num_update` counts from 1."""

    num_update: int
    lr: float
    wd: float


def _prepared(g: Any, numbers: Mapping[str, float]) -> Any:
    return _clipped(numbers["rescale_grad"] * g, numbers.get("clip_gradient"))


def _clipped(values: Any, limit: float | None) -> Any:
    return values if limit is None else namespace_of(values).clip(values, -limit, limit)


def _rest(share: float) -> float:
    """1 - share as MXNet has it, in float32: of 0.999 that leaves four digits."""
    return float(np.float32(1) - np.float32(share))


def _sgd(w: Any, g: Any, states: _Arrays, numbers: Mapping[str, float], rates: Rates) -> None:
    g = _prepared(g, numbers) + rates.wd * w
    if not states:
        w -= rates.lr * g
        return
    (momentum,) = states
    momentum *= numbers["momentum"]
    momentum -= rates.lr * g
    w += momentum


def _nag(w: Any, g: Any, states: _Arrays, numbers: Mapping[str, float], rates: Rates) -> None:
    if not states:
        _sgd(w, g, states, numbers, rates)
        return
    (momentum,) = states
    kept = numbers["momentum"]
    g = _prepared(g, numbers)
    momentum *= kept
    w += (kept + 1) * (momentum - rates.lr * (g + rates.wd * w)) - momentum
    # The decay of the weight that was just changed, as MXNet's kernel has it.
    momentum -= rates.lr * (g + rates.wd * w)


def _keep_means(g: Any, states: _Arrays, numbers: Mapping[str, float]) -> None:
    mean, mean_square = states
    mean *= numbers["beta1"]
    mean += _rest(numbers["beta1"]) * g
    mean_square *= numbers["beta2"]
    mean_square += _rest(numbers["beta2"]) * (g * g)


def _adam_direction(states: _Arrays, numbers: Mapping[str, float]) -> Any:
    mean, mean_square = states
    return mean / (namespace_of(mean).sqrt(mean_square) + numbers["epsilon"])


def _without_bias(numbers: Mapping[str, float], num_update: int) -> float:
    """Both means start at zero; this factor of the learning rate takes that bias away."""
    return math.sqrt(1 - numbers["beta2"] ** num_update) / (1 - numbers["beta1"] ** num_update)


def _adam(w: Any, g: Any, states: _Arrays, numbers: Mapping[str, float], rates: Rates) -> None:
    g = _clipped(numbers["rescale_grad"] * g + rates.wd * w, numbers.get("clip_gradient"))
    _keep_means(g, states, numbers)
    w -= (rates.lr * _without_bias(numbers, rates.num_update)) * _adam_direction(states, numbers)


def _adamw(w: Any, g: Any, states: _Arrays, numbers: Mapping[str, float], rates: Rates) -> None:
    _keep_means(_prepared(g, numbers), states, numbers)
    lr = rates.lr * (_without_bias(numbers, rates.num_update) if numbers["correct_bias"] else 1.0)
    w -= lr * (_adam_direction(states, numbers) + rates.wd * w)


def _rmsprop(w: Any, g: Any, states: _Arrays, numbers: Mapping[str, float], rates: Rates) -> None:
    kept = numbers["gamma1"]
    g = _clipped(numbers["rescale_grad"] * g + rates.wd * w, numbers.get("clip_gradient"))
    mean_square = states[0]
    mean_square *= kept
    mean_square += _rest(kept) * (g * g)
    if numbers["centered"]:
        mean, direction = states[1:]
        mean *= kept
        mean += _rest(kept) * g
        direction *= numbers["gamma2"]
        direction -= rates.lr * (g / namespace_of(g).sqrt(mean_square - mean * mean + numbers["epsilon"]))
        w += direction
    else:
        w -= rates.lr * (g / namespace_of(g).sqrt(mean_square + numbers["epsilon"]))
    if "clip_weights" in numbers:
        w[...] = _clipped(w, numbers["clip_weights"])


def _adagrad(w: Any, g: Any, states: _Arrays, numbers: Mapping[str, float], rates: Rates) -> None:
    g = _prepared(g, numbers)
    (history,) = states
    history += g * g
    w -= rates.lr * (g / namespace_of(g).sqrt(history + numbers["eps"]) + rates.wd * w)


def _signum(w: Any, g: Any, states: _Arrays, numbers: Mapping[str, float], rates: Rates) -> None:
    g = _prepared(g, numbers)
    sign = namespace_of(g).sign
    if not states:
        w *= 1 - rates.lr * rates.wd
        w -= rates.lr * sign(g)
        return
    (direction,) = states
    direction *= numbers["momentum"]
    direction -= _rest(numbers["momentum"]) * (g + rates.wd * w)
    w *= 1 - rates.lr * numbers["wd_lh"]
    w += rates.lr * sign(direction)


def _test(w: Any, g: Any, states: _Arrays, numbers: Mapping[str, float], rates: Rates) -> None:
    w += numbers["rescale_grad"] * g


@dataclass(frozen=True)
class _Formula:
    update: Callable[[Any, Any, _Arrays, Mapping[str, float], Rates], None]
    state_names: Callable[[Mapping[str, float]], tuple[str, ...]]


def _if_momentum(name: str) -> Callable[[Mapping[str, float]], tuple[str, ...]]:
    return lambda numbers: (name,) if numbers["momentum"] else ()


def _two_means(numbers: Mapping[str, float]) -> tuple[str, ...]:
    return ("mean", "mean_square")


_FORMULAS = {
    "sgd": _Formula(_sgd, _if_momentum("momentum")),
    "nag": _Formula(_nag, _if_momentum("momentum")),
    "adam": _Formula(_adam, _two_means),
    "adamw": _Formula(_adamw, _two_means),
    "rmsprop": _Formula(
        _rmsprop, lambda numbers: ("mean_square", "mean", "direction") if numbers["centered"] else ("mean_square",)
    ),
    "adagrad": _Formula(_adagrad, lambda numbers: ("square_sum",)),
    "signum": _Formula(_signum, _if_momentum("direction")),
    "test": _Formula(_test, lambda numbers: ()),
}


class MxnetFormula:
    """The update of a recipe in the form of MXNet."""

    def __init__(self, recipe: Recipe) -> None:
        self._numbers = recipe.numbers
        self._formula = _FORMULAS[recipe.name]
        self.state_names = self._formula.state_names(recipe.numbers)

    def update(self, weight: Any, grad: Any, states: _Arrays, rates: Rates) -> None:
        self._formula.update(weight, grad, states, self._numbers, rates)


class TorchFormula:
    """The update of a recipe in the form of torch."""

    def __init__(self, recipe: Recipe) -> None:
        self._optimizer = recipes.optim_of(recipe)
        self.state_names = self._optimizer.remembers()

    def update(self, weight: Any, grad: Any, states: _Arrays, rates: Rates) -> None:
        self._optimizer.lr, self._optimizer.weight_decay = rates.lr, rates.wd
        named = dict(zip(self.state_names, states, strict=True))
        self._optimizer.apply(weight, grad, {"step": rates.num_update, **named})


def formula_of(recipe: Recipe) -> MxnetFormula | TorchFormula:
    """What updates a weight and its states in place. All have one library, dtype and shape; states begin as zeros."""
    return MxnetFormula(recipe) if recipe.form == "mxnet" else TorchFormula(recipe)
