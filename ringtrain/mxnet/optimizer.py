"""`DistributedOptimizer`: any optimizer of MXNet, which averages the gradients over the ranks before its update.

Mirrors `horovod.mxnet.DistributedOptimizer` (horovod/mxnet/__init__.py).
"""

from __future__ import annotations

from typing import Any

import mxnet

from ringtrain.mxnet.gradients import Averaging, Gradient
from ringtrain.process_sets import ProcessSet, global_process_set

_OWN = ("_optimizer", "_arguments", "_averaging")


class DistributedOptimizer(mxnet.optimizer.Optimizer):  # type: ignore[misc]
    """The optimizer, averaging gradients over the ranks: for Module, and for gluon.Trainer with kvstore=None.

    Its attributes are those of the optimizer, also where they are set. Gradients become averages in the core, so what
    divides by the batch is the batch of this rank.

    Args:
        optimizer: any of mxnet.optimizer.
        gradient_predivide_factor: f divides by f before the sum and multiplies by f / size after it.
        num_groups: of optimizers that update several weights together: reduce them in that many groups.
        process_set: the ranks that take part; the others update with their own gradients.

    Raises:
        ValueError: a factor that is not positive, or a negative number of groups.
        TypeError: no optimizer of MXNet.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if not isinstance(optimizer, mxnet.optimizer.Optimizer):
            raise TypeError(f"{type(optimizer).__qualname__} is no mxnet.optimizer.Optimizer")
        self._optimizer = optimizer
        self._arguments = (gradient_predivide_factor, num_groups, process_set)
        self._averaging = Averaging(gradient_predivide_factor, num_groups, process_set=process_set)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __reduce__(self) -> Any:
        return DistributedOptimizer, (self._optimizer, *self._arguments)

    # What the base class has is found before __getattr__ is asked.

    @property
    def learning_rate(self) -> Any:
        return self._optimizer.learning_rate

    def create_state(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._average(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        self._average(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def _average(self, index: Any, grad: Any) -> None:
        indices, grads = (index, grad) if isinstance(index, (tuple, list)) else ([index], [grad])
        self._averaging.average(
            [
                Gradient(str(one), array, -one if isinstance(one, int) else 0)
                for one, array in zip(indices, grads, strict=True)
            ]
        )

    def set_learning_rate(self, lr: float) -> None:
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Any) -> None:
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Any) -> None:
        self._optimizer.set_wd_mult(args_wd_mult)

    def set_lr_scale(self, args_lrscale: Any) -> None:
        self._optimizer.set_lr_scale(args_lrscale)

    def _set_current_context(self, device_id: int) -> None:
        self._optimizer._set_current_context(device_id)

    def _update_count(self, index: Any) -> None:
        self._optimizer._update_count(index)

    def _get_lrs(self, indices: Any) -> Any:
        return self._optimizer._get_lrs(indices)

    def _get_lr(self, index: Any) -> Any:
        return self._optimizer._get_lr(index)

    def _get_wds(self, indices: Any) -> Any:
        return self._optimizer._get_wds(indices)

    def _get_wd(self, index: Any) -> Any:
        return self._optimizer._get_wd(index)
