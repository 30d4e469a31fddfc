"""Adaptive summation of what the ranks' updates change (Maleki et al., arXiv 2006.02924).

Mirrors `horovod.torch.DistributedOptimizer(op=Adasum)`: each rank updates with its own gradients, and what is combined
are the differences that the updates make. So the learning rate need not be scaled with the number of ranks, and any
optimizer keeps its own state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ringtrain import ops
from ringtrain.errors import StepOrderError
from ringtrain.record import steps
from ringtrain.torch.gradients import as_real
from ringtrain.torch.wrapped import WrappedOptimizer, groups_of
from ringtrain.training.gradient_batch import GradientBatch
from ringtrain.training.replicas import FiniteCheck, check_replicas


class AdasumOptimizer(WrappedOptimizer):
    """The methods of an optimizer with op=Adasum; mixed into the class of the wrapped one."""

    _adasum_batch: GradientBatch
    _adasum_check: FiniteCheck | None
    # Set by GradScaler before `step` and deleted after it.
    found_inf: torch.Tensor | None
    grad_scale: torch.Tensor | None

    # Has GradScaler call `step` also where this rank's gradients overflowed, with `found_inf` and `grad_scale` set.
    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with this rank's gradients and combine the changes with those of the other ranks.

        Under a GradScaler no rank updates if the gradients of any rank overflowed.

        Raises:
            NonFiniteError: a gradient is NaN or infinite, with nan_check; nothing was updated. Of a closure that is
                called several times, the gradients of the first call.
            ReplicaError: the parameters are not the same on all ranks, with check_every.
            RingtrainError: a reduction failed; see ringtrain.errors.
        """
        if hasattr(self, "found_inf") and self._adasum_overflows_anywhere():
            return None
        names = self._parameter_names
        parameters = [parameter.detach() for parameter in names]
        before = [parameter.clone() for parameter in parameters]
        loss = self._adasum_update(closure)
        torch._foreach_sub_(parameters, before)
        self._adasum_batch.group(groups_of(self._given_groups, names))
        for place, (name, change) in enumerate(zip(names.values(), parameters, strict=True)):
            self._adasum_batch.ready(name, as_real(change), -place)
        self._adasum_batch.wait()
        steps.begin()
        torch._foreach_add_(parameters, before)
        if self._is_time_to_compare():
            check_replicas({name: parameter for parameter, name in names.items()}, self.process_set)
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # see Distributed.step

    def _adasum_update(self, closure: Callable[[], Any] | None) -> Any:
        """The step of the wrapped optimizer, after the check of the gradients."""
        if closure is None:
            self._adasum_require_finite()
            return super().step()
        checks = [self._adasum_require_finite]  # only once: some ranks may call the closure more often than others

        def checked_closure() -> Any:
            with torch.enable_grad():
                loss = closure()
            while checks:
                checks.pop()()
            return loss

        return super().step(checked_closure)

    def _adasum_require_finite(self) -> None:
        if self._adasum_check is not None:
            for parameter, name in self._parameter_names.items():
                if parameter.grad is not None:
                    self._adasum_check.look_at(name, parameter.grad)
            self._adasum_check.agree()

    def _adasum_overflows_anywhere(self) -> bool:
        overflow = ops.allreduce(
            torch.as_tensor(self.found_inf, dtype=torch.float32),
            name=self._adasum_batch.full_name("<overflow>"),
            op=ops.Sum,
            process_set=self.process_set,
        )
        if overflow.item() > 0:
            return True
        if self.grad_scale is not None:
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_div_(grads, self.grad_scale)
        self.grad_scale = self.found_inf = None  # the wrapped optimizer has nothing to do with them any more
        return False

    def synchronize(self) -> None:
        """Does nothing, as in Horovod: `step` combines the changes."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Raises StepOrderError, as in Horovod: `step` is what combines the changes."""
        raise StepOrderError("skip_synchronize() is not for op=Adasum, where step() combines the changes of the ranks")

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing special: no backward pass averages gradients."""
        return nullcontext()

    def set_weight(self, weight: float | None) -> None:
        """Raises ValueError for a weight: Adasum is not an average."""
        self._adasum_batch.set_weight(weight)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing special: gradients accumulate until `step` is called."""
        self.backward_passes_per_step = passes
