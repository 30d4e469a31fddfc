"""What an optimizer was told, in plain numbers: read from ringtrain's optimizers, from MXNet's, or from a name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringtrain import optim

# The updates of MXNet by the names under which it creates them, with their own numbers. Some names of 1.9.1 are
# missing: what needs norms of whole arrays, or random numbers, is no update of each element by itself.
_MXNET: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.0},
    "nag": {"momentum": 0.0},
    "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "adamw": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "correct_bias": True},
    "rmsprop": {
        "learning_rate": 0.001,
        "gamma1": 0.9,
        "gamma2": 0.9,
        "epsilon": 1e-8,
        "centered": False,
        "clip_weights": None,
    },
    "adagrad": {"eps": 1e-7},
    "signum": {"momentum": 0.9, "wd_lh": 0.0},
    "test": {},
}
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
# Both say how MXNet does it, and neither changes a number here: weights of 16 bits always have a float32 master, and
# no gradient is sparse.
_WITHOUT_EFFECT = ("multi_precision", "lazy_update")
# MXNet's attributes whose names differ from those of the arguments, and those that tell nothing about an update.
_ARGUMENT_OF = {"lr": "learning_rate", "idx2name": "param_idx2name", "float_stable_eps": "eps"}
_NOT_OF_THE_UPDATE = ("num_update", "aggregate_num", "allow_np_array", "sym_info", "use_fused_step")
_SYNONYMS = {"mxnet": {"lr": "learning_rate"}, "torch": {"learning_rate": "lr", "wd": "weight_decay"}}
_OPTIM = {optim.SGD: "sgd", optim.Adam: "adam", optim.AdamW: "adamw"}


@dataclass(frozen=True)
class Recipe:
    """One update of each element, and the rates of each key. `given` are the arguments from which it was made."""

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
        """The learning rate of a key; `num_update` is that of the key with the most updates, as in MXNet."""
        lr = self.lr if self.schedule is None else float(self.schedule(num_update))
        return lr * self.lr_mult.get(key, 1.0)

    def wd_of(self, key: str) -> float:
        return self.wd * self.wd_mult.get(key, 1.0)

    def changed(self, **numbers: Any) -> Recipe:
        """The same with other numbers; `lr` and `learning_rate` mean the same.

        Raises:
            ValueError: it has no such number, or the number is out of range.
        """
        renamed = {_SYNONYMS[self.form].get(name, name): value for name, value in numbers.items()}
        if self.schedule is not None and "learning_rate" in renamed and "lr_scheduler" not in renamed:
            raise ValueError(f"{self.name} has an lr_scheduler, which decides the learning rate: change that instead")
        _refuse_unknown(self.name, renamed, self.given)
        given = {**self.given, **renamed}
        return from_name(self.name, given) if self.form == "mxnet" else _from_hyperparameters(self.name, given)

    def described(self) -> dict[str, Any]:
        """What can be compared with another rank's, and written down: numbers, texts and dicts of them."""
        told = {name: value for name, value in self.given.items() if name not in _OF_EACH_KEY}
        if self.schedule is not None:
            told["lr_scheduler"] = _description_of(self.schedule)
        if self.form == "mxnet":
            told |= {"lr_mult": self.lr_mult, "wd_mult": self.wd_mult}
        return {"optimizer": self.name, "form": self.form, **told}


def is_of_optim(optimizer: Any) -> bool:
    """Whether it is one of ringtrain.optim itself. What is derived from one may compute something else."""
    return type(optimizer) in _OPTIM


def is_of_mxnet(optimizer: Any) -> bool:
    """Whether it is one of MXNet itself, which is not imported for this."""
    return type(optimizer).__module__.partition(".")[0] == "mxnet"


def from_optim(optimizer: optim.Optimizer) -> Recipe:
    """That of an optimizer of ringtrain.optim, which follows the formulas of torch."""
    return _from_hyperparameters(_OPTIM[type(optimizer)], optimizer.hyperparameters())


def optim_of(recipe: Recipe) -> optim.Optimizer:
    """The optimizer of ringtrain.optim that computes a recipe in the form of torch."""
    return _make_optim(recipe.name, recipe.given)


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
    """That of an optimizer of MXNet, by the name of its class and its public attributes.

    Raises:
        TypeError: it is none of those that the store knows.
        ValueError: it has an attribute that the store does not know.
    """
    name = type(optimizer).__name__.lower()
    if name not in _MXNET:
        raise TypeError(
            f"the store cannot run MXNet's {type(optimizer).__name__}; it knows {', '.join(_MXNET)}, and any object "
            "with create_state and update that works on the arrays of the store"
        )
    attributes = {key: value for key, value in vars(optimizer).items() if not key.startswith("_")}
    given = {_ARGUMENT_OF.get(key, key): value for key, value in attributes.items() if key not in _NOT_OF_THE_UPDATE}
    if given.get("lr_scheduler") is not None:
        del given["learning_rate"]  # the scheduler has it already
    return from_name(name, given)


def from_name(name: str, given: Mapping[str, Any]) -> Recipe:
    """That of a name of MXNet, which follows MXNet's formulas, with MXNet's arguments and their defaults.

    Raises:
        ValueError: there is no such name or argument, or a number is out of range.
    """
    name = name.lower()
    if name not in _MXNET:
        raise ValueError(
            f'there is no optimizer "{name}" in the store; it knows {", ".join(_MXNET)} in the form of MXNet, the '
            "optimizers of ringtrain.optim, and any object with create_state and update"
        )
    known = {**_COMMON, **_MXNET[name]}
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
    """A number of NumPy as one of Python, which can be compared and written down."""
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
    """The factors of a rate by the names that the store has for the keys; found as MXNet finds them."""
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
