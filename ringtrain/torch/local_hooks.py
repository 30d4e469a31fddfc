"""Stands in the place of GradientHooks on a rank that averages with nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ringtrain._core import ReduceOp
from ringtrain.engine.requirements import require_weight
from ringtrain.torch.wrapped import ParameterNames
from ringtrain.training.replicas import FiniteCheck


class LocalHooks:
    """As GradientHooks, of a rank that is the only one of its process set, or does not belong to it.

    Args:
        names: of the parameters.
        finite_check: looks at every gradient, or None.
        op: of the optimizer.
    """

    all_contribute = True
    counts_contributors = False
    was_told = False

    def __init__(self, names: ParameterNames, finite_check: FiniteCheck | None, op: ReduceOp):
        self._op = op
        self._names = names
        self._finite_check = finite_check
        self._parameters: dict[torch.Tensor, str] = {}
        self.is_synchronized = False

    def watch(self, param_groups: Sequence[dict[str, Any]], state: Mapping[Any, Any]) -> None:
        if self._finite_check is not None:
            self._parameters = self._names.of(param_groups)

    def average(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def check_replicas(self) -> None:
        """Does nothing: this rank has the only replica."""

    def has_begun(self) -> bool:
        return False

    def has_failed(self) -> bool:
        return False

    def is_due(self) -> bool:
        return False

    def is_untouched(self) -> bool:
        return False

    def keep_averages(self) -> None: ...

    def keep_clipped(self) -> None: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None:
        self.is_synchronized = self.was_told = False

    def compression_state(self, with_errors: bool) -> dict[str, Any] | None:
        return None

    def load_compression_state(self, state: dict[str, Any] | None) -> None:
        """Does nothing: this rank sends no gradients."""

    def owns_any(self, parameters: Sequence[torch.Tensor]) -> bool:
        return False

    def set_passes(self, passes: int) -> None: ...

    def set_weight(self, weight: Any) -> None:
        """Checks the weight, which changes nothing for the only rank."""
        if weight is not None:
            require_weight(weight, self._op, "DistributedOptimizer")

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forget_step(self) -> None: ...

    def submit_rest(self) -> None: ...

    def synchronize(self, drops: bool = False) -> None:
        """Raises NonFiniteError if a gradient is NaN or infinite, with nan_check."""
        if self._finite_check is not None:
            for parameter, name in self._parameters.items():
                if parameter.grad is not None:
                    self._finite_check.look_at(name, parameter.grad)
            self._finite_check.agree()
        self.is_synchronized = True
