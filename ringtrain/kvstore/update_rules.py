"""The updates that are built in: recipes, which hold what an optimizer was told, and formulas on whole arrays.

A recipe is made from an optimizer of ringtrain.optim, from one of MXNet, or from a name. The formulas update arrays on
GPUs, and are what the kernels of the core must equal: those of torch are in ringtrain.optim, those of MXNet here. In
them g is the gradient and w the weight; the names of the numbers are those of MXNet's arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ringtrain import optim
from ringtrain.optim import namespace_of

_OF_EACH_KEY = ("lr_mult", "wd_mult", "param_idx2name", "param_dict")
_COMMON: dict[str, Any] = {
    "learning_rate": 0.01,
    "wd": 0.0,
    "rescale_grad": 1.0,
    "clip_gradient": None,
    "lr_scheduler": None,
    "begin_num_update": 0,
    **dict.fromkeys(_OF_EACH_KEY),
}
# Options of MXNet's implementation that change no number here: weights of 16 bits always have a float32 master, and no
# gradient is sparse.
_WITHOUT_EFFECT = ("multi_precision", "lazy_update")
# Attributes of MXNet whose names differ from the arguments, and attributes that do not describe an update.
_ARGUMENT_OF = {"lr": "learning_rate", "idx2name": "param_idx2name", "float_stable_eps": "eps"}
_NOT_OF_THE_UPDATE = ("num_update", "aggregate_num", "allow_np_array", "sym_info", "use_fused_step")
_SYNONYMS = {"mxnet": {"lr": "learning_rate"}, "torch": {"learning_rate": "lr", "wd": "weight_decay"}}
_OPTIM = {optim.SGD: "sgd", optim.Adam: "adam", optim.AdamW: "adamw"}


@dataclass(frozen=True)
class Recipe:
    """An update rule of each element, and the rates of each key. `given` are the arguments that it was made from."""

    name: str
    form: str
    lr: float
    wd: float
    numbers: dict[str, float]
    given: dict[str, Any]
    schedule: Callable[[int], float] | None = None
    lr_mult: dict[str, float] = field(default_factory=dict)
    wd_mult: dict[str, float] = field(default_factory=dict)
    begin_num_update: int = 0

    def lr_of(self, key: str, num_update: int) -> float:
        """Returns the learning rate of a key; `num_update` is that of the key with the most updates, as in MXNet."""
        lr = self.lr if self.schedule is None else float(self.schedule(num_update))
        return lr * self.lr_mult.get(key, 1.0)

    def wd_of(self, key: str) -> float:
        return self.wd * self.wd_mult.get(key, 1.0)

    def changed(self, **numbers: Any) -> Recipe:
        """Returns the recipe with other numbers; `lr` and `learning_rate` mean the same.

        Raises:
            ValueError: a number is unknown or out of range.
        """
        renamed = {_SYNONYMS[self.form].get(name, name): value for name, value in numbers.items()}
        if self.schedule is not None and "learning_rate" in renamed and "lr_scheduler" not in renamed:
            raise ValueError(f"{self.name} has an lr_scheduler, which decides the learning rate: change that instead")
        _refuse_unknown(self.name, renamed, self.given)
        given = {**self.given, **renamed}
        return from_name(self.name, given) if self.form == "mxnet" else _from_hyperparameters(self.name, given)

    def described(self) -> dict[str, Any]:
        """Returns numbers, texts and dicts of them, to compare with another rank or to save."""
        told = {name: value for name, value in self.given.items() if name not in _OF_EACH_KEY}
        if self.schedule is not None:
            told["lr_scheduler"] = _description_of(self.schedule)
        if self.form == "mxnet":
            told |= {"lr_mult": self.lr_mult, "wd_mult": self.wd_mult}
        return {"optimizer": self.name, "form": self.form, **told}


def is_of_optim(optimizer: Any) -> bool:
    """Whether it is an optimizer of ringtrain.optim. A derived class may compute something else."""
    return type(optimizer) in _OPTIM


def is_of_mxnet(optimizer: Any) -> bool:
    """Whether it is an optimizer of MXNet or of a class derived from one. MXNet is not imported to find out."""
    return any(map(_is_class_of_mxnet, type(optimizer).__mro__))


def _is_class_of_mxnet(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "mxnet"


def from_optim(optimizer: optim.Optimizer) -> Recipe:
    """Returns the recipe of an optimizer of ringtrain.optim, which follows the formulas of torch."""
    return _from_hyperparameters(_OPTIM[type(optimizer)], optimizer.hyperparameters())


def _make_optim(name: str, given: dict[str, Any]) -> optim.Optimizer:
    kind: Callable[..., optim.Optimizer] = next(kind for kind, kind_name in _OPTIM.items() if kind_name == name)
    return kind(**given)


def _from_hyperparameters(name: str, given: dict[str, Any]) -> Recipe:
    _make_optim(name, given)  # refuses what is out of range
    numbers = {key: value for key, value in given.items() if key not in ("lr", "weight_decay")}
    if "betas" in numbers:
        numbers["beta1"], numbers["beta2"] = numbers.pop("betas")
    floats = {key: float(value) for key, value in numbers.items()}
    return Recipe(name, "torch", float(given["lr"]), float(given["weight_decay"]), floats, given)


def from_mxnet(optimizer: Any) -> Recipe:
    """Returns the recipe of an optimizer of MXNet, by the name of its class and its public attributes.

    Raises:
        TypeError: the store does not know its class. A derived class may compute something else.
        ValueError: the store does not know one of its attributes.
    """
    kind = type(optimizer)
    name = kind.__name__.lower()
    if name not in _MXNET or not _is_class_of_mxnet(kind):
        whose = "MXNet's" if _is_class_of_mxnet(kind) else "the optimizer of MXNet"
        raise TypeError(
            f"the store cannot run {whose} {kind.__name__}; it knows {', '.join(_MXNET)}, and any object with "
            "create_state and update that works on the arrays of the store; a store that mx.kv.create makes after "
            "ringtrain.mxnet.replace_kvstore() runs all of MXNet"
        )
    attributes = {key: value for key, value in vars(optimizer).items() if not key.startswith("_")}
    given = {_ARGUMENT_OF.get(key, key): value for key, value in attributes.items() if key not in _NOT_OF_THE_UPDATE}
    if given.get("lr_scheduler") is not None:
        del given["learning_rate"]  # the scheduler has it already
    return from_name(name, given)


def from_name(name: str, given: Mapping[str, Any]) -> Recipe:
    """Returns the recipe of a name of MXNet, with MXNet's formulas, arguments and defaults.

    Raises:
        ValueError: the name or an argument is unknown, or a number is out of range.
    """
    name = name.lower()
    if name not in _MXNET:
        raise ValueError(
            f'there is no optimizer "{name}" in the store; it knows {", ".join(_MXNET)} in the form of MXNet, the '
            "optimizers of ringtrain.optim, and any object with create_state and update"
        )
    known = {**_COMMON, **_MXNET[name].defaults}
    _refuse_unknown(name, given, [*known, *_WITHOUT_EFFECT])
    told = {key: _plain(given.get(key, default)) for key, default in known.items()}
    schedule = told["lr_scheduler"]
    if schedule is not None and given.get("learning_rate") is not None:
        _begin_at(schedule, given["learning_rate"])
    _check(name, told)
    not_of_the_rule = ("learning_rate", "wd", "lr_scheduler", "begin_num_update", *_OF_EACH_KEY)
    numbers = {key: float(value) for key, value in told.items() if key not in not_of_the_rule and value is not None}
    return Recipe(
        name,
        "mxnet",
        float(told["learning_rate"]),
        float(told["wd"]),
        numbers,
        told,
        schedule,
        _factors(told, "lr_mult"),
        _factors(told, "wd_mult"),
        int(told["begin_num_update"]),
    )


def _refuse_unknown(name: str, given: Mapping[str, Any], known: Any) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        hint = "; the formulas of torch come with the optimizers of ringtrain.optim" if "lr" in unknown else ""
        raise ValueError(f"{name} has no argument {', '.join(unknown)}; it has {', '.join(known)}{hint}")


def _plain(value: Any) -> Any:
    """Converts a number of NumPy to Python."""
    return value.item() if isinstance(value, np.generic) else value


def _begin_at(schedule: Any, lr: float) -> None:
    if not hasattr(schedule, "base_lr"):
        raise ValueError("learning_rate and an lr_scheduler that is a function: give one of them, the function decides")
    schedule.base_lr = lr


def _check(name: str, told: Mapping[str, Any]) -> None:
    if told["lr_scheduler"] is not None and not callable(told["lr_scheduler"]):
        raise ValueError(f"lr_scheduler of {name} must be a function of num_update, not {told['lr_scheduler']!r}")
    for key, value in told.items():
        if key in ("lr_scheduler", *_OF_EACH_KEY) or (value is None and key.startswith("clip_")):
            continue
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{key} of {name} must be a number, but is {value!r}")
        if key != "rescale_grad" and value < 0:
            raise ValueError(f"{key} of {name} must not be negative, but is {value}")
        if key.startswith("clip_") and value == 0:
            raise ValueError(f"{key} of {name} is 0, which would clip everything away; None is without")


def _factors(told: Mapping[str, Any], which: str) -> dict[str, float]:
    """Returns the factors of a rate by the names of the keys in the store; found as MXNet finds them."""
    names, given, parameters = told["param_idx2name"] or {}, told[which] or {}, told["param_dict"] or {}
    if which == "wd_mult":
        spared = {name: 0.0 for name in names.values() if not name.endswith(("_weight", "_gamma"))}
        given = {**spared, **given}
    by_name = {str(index): given[name] for index, name in names.items() if name in given}
    by_key = {str(key): factor for key, factor in given.items()}
    by_parameter = {str(index): getattr(parameter, which) for index, parameter in parameters.items()}
    return {key: float(factor) for key, factor in {**by_name, **by_key, **by_parameter}.items()}


def _description_of(schedule: Any) -> Any:
    if hasattr(schedule, "__qualname__"):
        return f"{schedule.__module__}.{schedule.__qualname__}"
    numbers = {key: value for key, value in vars(schedule).items() if isinstance(value, (int, float, str, list))}
    return {"schedule": type(schedule).__name__, **numbers}


_Arrays = Sequence[Any]


class Rates(NamedTuple):
    """The numbers of one update. `num_update` begins with 1."""

    num_update: int
    lr: float
    wd: float


def _prepared(g: Any, numbers: Mapping[str, float]) -> Any:
    return _clipped(numbers["rescale_grad"] * g, numbers.get("clip_gradient"))


def _clipped(values: Any, limit: float | None) -> Any:
    return values if limit is None else namespace_of(values).clip(values, -limit, limit)


def _rest(share: float) -> float:
    """Returns 1 - share in float32, as MXNet does: of 0.999 that leaves four digits."""
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
    # With the weight that was just changed, as in MXNet's kernel.
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
    """Returns the factor of the learning rate that removes the bias of means that start at zero."""
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


def _if_momentum(name: str) -> Callable[[Mapping[str, float]], tuple[str, ...]]:
    return lambda numbers: (name,) if numbers["momentum"] else ()


def _two_means(numbers: Mapping[str, float]) -> tuple[str, ...]:
    return ("mean", "mean_square")


class _Rule(NamedTuple):
    """An update rule of MXNet."""

    update: Callable[[Any, Any, _Arrays, Mapping[str, float], Rates], None]
    state_names: Callable[[Mapping[str, float]], tuple[str, ...]]
    defaults: dict[str, Any]  # of its own numbers


# The updates of MXNet by the names under which it creates them. Some names of 1.9.1 are missing: an update that needs
# norms of whole arrays, or random numbers, does not treat each element by itself.
_MXNET = {
    "sgd": _Rule(_sgd, _if_momentum("momentum"), {"momentum": 0.0}),
    "nag": _Rule(_nag, _if_momentum("momentum"), {"momentum": 0.0}),
    "adam": _Rule(_adam, _two_means, {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}),
    "adamw": _Rule(
        _adamw,
        _two_means,
        {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "correct_bias": True},
    ),
    "rmsprop": _Rule(
        _rmsprop,
        lambda numbers: ("mean_square", "mean", "direction") if numbers["centered"] else ("mean_square",),
        {
            "learning_rate": 0.001,
            "gamma1": 0.9,
            "gamma2": 0.9,
            "epsilon": 1e-8,
            "centered": False,
            "clip_weights": None,
        },
    ),
    "adagrad": _Rule(_adagrad, lambda numbers: ("square_sum",), {"eps": 1e-7}),
    "signum": _Rule(_signum, _if_momentum("direction"), {"momentum": 0.9, "wd_lh": 0.0}),
    "test": _Rule(_test, lambda numbers: (), {}),
}


class Formula(NamedTuple):
    """The update of a recipe, for arrays of one library, dtype and shape."""

    state_names: tuple[str, ...]  # arrays of the shape of the weight, which begin as zeros
    update: Callable[[Any, Any, _Arrays, Rates], None]  # of a weight by a gradient, in place, with its states


def formula_of(recipe: Recipe) -> Formula:
    """Returns what updates a weight in place as the core does, on any device."""
    if recipe.form == "mxnet":
        rule, numbers = _MXNET[recipe.name], recipe.numbers
        return Formula(
            rule.state_names(numbers),
            lambda weight, grad, states, rates: rule.update(weight, grad, states, numbers, rates),
        )
    optimizer = _make_optim(recipe.name, recipe.given)
    names = optimizer.remembers()

    def update(weight: Any, grad: Any, states: _Arrays, rates: Rates) -> None:
        optimizer.lr, optimizer.weight_decay = rates.lr, rates.wd
        optimizer.apply(weight, grad, {"step": rates.num_update, **dict(zip(names, states, strict=True))})

    return Formula(names, update)
