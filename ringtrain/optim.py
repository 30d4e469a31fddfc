"""SGD, Adam and AdamW for NumPy and CuPy arrays, by the formulas of torch.optim.

Each has two faces: `step(params, grads)` keeps the state of a whole list of parameters; `create_state` and `update`
are MXNet's, for a caller that keeps the state of each parameter itself, as a parameter server does.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = sorted(["SGD", "Adam", "AdamW", "Optimizer"])


def __dir__() -> list[str]:
    """Lists the public names, which completion shows."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


# Of one parameter: "step", the number of updates so far, and the arrays that its optimizer remembers.
State = dict[str, Any]


class Optimizer(ABC):
    """Updates parameters in place. float16 and bfloat16 parameters are computed, and remembered, in float32.

    A subclass keeps its hyperparameters as public attributes, which may be changed between steps (a learning rate
    schedule is an assignment to `lr`).
    """

    lr: float
    weight_decay: float

    def __init__(self) -> None:
        self._states: list[State] = []

    def step(self, params: Sequence[Any], grads: Sequence[Any]) -> None:
        """Update each array of params in place with the gradient at the same position.

        Args:
            params: floating-point arrays; the same ones in the same order at every step.
            grads: arrays of the same shapes.

        Raises:
            ValueError: another number of parameters than gradients, or than at the last step, or other shapes.
            TypeError: a parameter is not floating-point, or is read-only.
        """
        if len(params) != len(grads):
            raise ValueError(f"step: {len(params)} parameters but {len(grads)} gradients")
        if not self._states:
            self._states = [self.create_state(index, param) for index, param in enumerate(params)]
        if len(params) != len(self._states):
            raise ValueError(f"step: {len(params)} parameters, but the state is that of {len(self._states)}")
        self.update(range(len(params)), params, grads, self._states)

    def create_state(self, index: Any, weight: Any) -> State:
        """Return the state that `update` needs for this parameter: zeros of its shape, on its device."""
        if weight.dtype.name not in _COMPUTE_DTYPE:
            raise TypeError(
                f"parameter {index} is {weight.dtype.name}, but only floating-point parameters can be updated: "
                f"{', '.join(_COMPUTE_DTYPE)}"
            )
        if not getattr(weight.flags, "writeable", True):
            raise TypeError(
                f"parameter {index} is read-only, so it cannot be updated; a single number needs a 0-d array"
            )
        namespace = namespace_of(weight)
        dtype = _COMPUTE_DTYPE[weight.dtype.name]
        remembered = {name: namespace.zeros_like(weight, dtype=dtype) for name in self.remembers()}
        return {"step": 0, **remembered}

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update weight and state in place. All four may be lists of the same length.

        Args:
            index: the key of the parameter, used in messages only.
            weight: a floating-point array.
            grad: an array of the same shape.
            state: what `create_state` returned for this parameter.
        """
        if not isinstance(index, (list, tuple, range)):
            self._update_one(index, weight, grad, state)
            return
        for one in zip(index, weight, grad, state, strict=True):
            self._update_one(*one)

    def _update_one(self, index: Any, weight: Any, grad: Any, state: State) -> None:
        if weight.shape != grad.shape:
            raise ValueError(f"parameter {index} has shape {weight.shape}, but its gradient {grad.shape}")
        dtype = _COMPUTE_DTYPE[weight.dtype.name]
        computed = weight.astype(dtype, copy=False)
        state["step"] += 1
        self.apply(computed, grad.astype(dtype, copy=False), state)
        if computed is not weight:
            weight[...] = computed

    def state_dict(self) -> dict[str, Any]:
        """Return the hyperparameters and the states of the parameters of `step`: a copy that can be pickled."""
        return copy.deepcopy({"hyperparameters": self.hyperparameters(), "states": self._states})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, here or in another process.

        Raises:
            ValueError: it was made by another kind of optimizer.
        """
        hyperparameters = state_dict["hyperparameters"]
        if hyperparameters.keys() != self.hyperparameters().keys():
            raise ValueError(f"load_state_dict: {sorted(hyperparameters)} are not those of {type(self).__name__}")
        remembered = {"step", *type(self)(**hyperparameters).remembers()}
        if any(state.keys() != remembered for state in state_dict["states"]):
            raise ValueError(f"load_state_dict: each state of {type(self).__name__} must have {sorted(remembered)}")
        vars(self).update(hyperparameters)
        self._states = copy.deepcopy(state_dict["states"])

    def hyperparameters(self) -> dict[str, Any]:
        """Return what it was told, by the names of the arguments."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @abstractmethod
    def remembers(self) -> tuple[str, ...]:
        """Return the names of the arrays in the state of one parameter."""

    @abstractmethod
    def apply(self, weight: Any, grad: Any, state: State) -> None:
        """Update weight and state in place, after "step" was counted; all arrays have one dtype. Tensors do, too."""


_COMPUTE_DTYPE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}


def namespace_of(array: Any) -> Any:
    """Return the namespace of an array's library: numpy, cupy or torch."""
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules[type(array).__module__.partition(".")[0]]


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, but is {value}")


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov's too; the formulas are torch.optim.SGD's.

    Args:
        lr: learning rate.
        momentum: share of the last direction that is kept.
        dampening: share of the gradient that is left out of the direction, from the second step on.
        weight_decay: L2 penalty, added to the gradient.
        nesterov: look ahead along the direction; needs momentum and no dampening.

    Raises:
        ValueError: a value is negative, or nesterov without momentum or with dampening.
    """

    def __init__(
        self,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__()
        _check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(f"nesterov needs momentum > 0 and dampening 0, but they are {momentum} and {dampening}")
        self.lr = lr
        self.momentum = momentum
        self.dampening = dampening
        self.weight_decay = weight_decay
        self.nesterov = nesterov

    def remembers(self) -> tuple[str, ...]:
        return ("direction",) if self.momentum else ()

    def apply(self, weight: Any, grad: Any, state: State) -> None:
        if self.weight_decay:
            grad = grad + self.weight_decay * weight
        if self.momentum:
            dampening = self.dampening if state["step"] > 1 else 0.0
            direction = state["direction"]
            direction *= self.momentum
            direction += (1 - dampening) * grad
            grad = grad + self.momentum * direction if self.nesterov else direction
        weight -= self.lr * grad


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015, arXiv:1412.6980); the formulas are torch.optim.Adam's.

    Args:
        lr: learning rate.
        betas: how much of the running mean of the gradient, and of its square, each step keeps.
        eps: added to the denominator.
        weight_decay: L2 penalty, added to the gradient. Adam rescales it with the gradient; AdamW does not.
        amsgrad: divide by the largest mean square so far (Reddi et al., 2018, arXiv:1904.09237).

    Raises:
        ValueError: a value is negative, or a beta is not in [0, 1).
    """

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        super().__init__()
        _check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), but are {betas}")
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.amsgrad = amsgrad

    def remembers(self) -> tuple[str, ...]:
        return ("mean", "mean_square", "largest_mean_square") if self.amsgrad else ("mean", "mean_square")

    def apply(self, weight: Any, grad: Any, state: State) -> None:
        if self.weight_decay:
            grad = grad + self.weight_decay * weight
        self._move(weight, grad, state)

    def _move(self, weight: Any, grad: Any, state: State) -> None:
        mean_beta, square_beta = self.betas
        mean, mean_square = state["mean"], state["mean_square"]
        mean *= mean_beta
        mean += (1 - mean_beta) * grad
        mean_square *= square_beta
        mean_square += (1 - square_beta) * (grad * grad)
        namespace = namespace_of(weight)
        if self.amsgrad:
            largest = state["largest_mean_square"]
            largest[...] = namespace.maximum(largest, mean_square)
            mean_square = largest
        # Both means start at zero; dividing by 1 - beta ** step takes that bias away.
        mean_bias = 1 - mean_beta ** state["step"]
        square_bias = 1 - square_beta ** state["step"]
        weight -= (self.lr / mean_bias) * mean / (namespace.sqrt(mean_square) / square_bias**0.5 + self.eps)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv:1711.05101), as torch.optim.AdamW.

    Args and errors are those of Adam; weight_decay shrinks the weights by lr * weight_decay at each step.
    """

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay, amsgrad)

    def apply(self, weight: Any, grad: Any, state: State) -> None:
        weight *= 1 - self.lr * self.weight_decay
        self._move(weight, grad, state)
