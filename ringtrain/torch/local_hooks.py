"""The gradients of an optimizer whose rank averages with nobody."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ringtrain.torch.parameters import ParameterNames
from ringtrain.training.replicas import FiniteCheck


class LocalHooks:
    """As GradientHooks, of a rank that is the only one of its process set, or does not belong to it.

    Args:
        names: of the parameters.
        finite_check: looks at every gradient, or None.
    """

    all_contribute = True
    counts_contributors = False

    def __init__(self, names: ParameterNames, finite_check: FiniteCheck | None):
        self._names = names
        self._finite_check = finite_check
        self._parameters: dict[torch.Tensor, str] = {}
        self.is_synchronized = False

    def watch(self, param_groups: Sequence[dict[str, Any]]) -> None:
        if self._finite_check is not None:
            self._parameters = self._names.of(param_groups)

    def average(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def check_replicas(self) -> None:
        """There is no other replica."""

    def has_begun(self) -> bool:
        return False

    def is_due(self) -> bool:
        return False

    def owns_any(self, parameters: Sequence[torch.Tensor]) -> bool:
        return False

    def set_passes(self, passes: int) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forget_step(self) -> None: ...

    def submit_rest(self) -> None: ...

    def synchronize(self) -> None:
        """Raises NonFiniteError if a gradient is NaN or infinite, with nan_check."""
        if self._finite_check is not None:
            for parameter, name in self._parameters.items():
                if parameter.grad is not None:
                    self._finite_check.look_at(name, parameter.grad)
            self._finite_check.agree()
        self.is_synchronized = True
