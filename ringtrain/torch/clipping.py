"""Clipping averaged gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ringtrain.torch.optimizer import synchronize_owners


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, of the averages over the ranks: waits for them first.

    Call it between backward() and step(), after `scaler.unscale_(optimizer)` if there is a GradScaler. All ranks call
    it and get the same norm. The gradients for op=Adasum, and within `no_sync`, are each rank's own.

    Raises:
        StepOrderError: a gradient was changed after backward().
        RingtrainError: a reduction failed; see ringtrain.errors.
    """
    several = [parameters] if torch.is_tensor(parameters) else list(parameters)
    synchronize_owners(several)
    return torch.nn.utils.clip_grad_norm_(several, max_norm, norm_type, error_if_nonfinite, foreach)
