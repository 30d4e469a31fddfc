"""Making a distributed optimizer of one of torch's: one more object over the same state, and copies of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ringtrain._core import ReduceOp
from ringtrain.process_sets import ProcessSet
from ringtrain.torch.parameters import Groups, ParameterNames


class WrappedOptimizer(torch.optim.Optimizer):
    """A distributed optimizer of PyTorch: mixed into the class of the wrapped optimizer.

    Its own names are such that no optimizer has them.
    """

    # As in Horovod. Set by `set_backward_passes_per_step`, otherwise what DistributedOptimizer was given.
    backward_passes_per_step: int
    op: ReduceOp
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet

    _names_of_parameters: ParameterNames
    _given_groups: Groups
    _distribute: Callable[..., Any]  # DistributedOptimizer with all arguments but those that belong to the parameters
    _compares_every: int
    _steps_taken: int

    def synchronize(self) -> None:
        """Wait until the gradients are averages over the ranks, so that they can be read or clipped before `step`."""
        raise NotImplementedError

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """`step` within does not wait for the averages: `synchronize` was called before. As in Horovod."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes within only accumulate gradients. Mirrors DistributedDataParallel.no_sync."""
        raise NotImplementedError

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Average the gradients with every n-th backward pass from now on. As in Horovod."""
        raise NotImplementedError

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """As in Horovod: the name of every parameter."""
        return self._names_of_parameters.of(self.param_groups)

    def _is_time_to_compare(self) -> bool:
        """At the end of each step: whether the parameters of all ranks are to be compared."""
        self._steps_taken += 1
        return self._compares_every > 0 and self._steps_taken % self._compares_every == 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A distributed optimizer over copies of the parameters: those that the memo has, as of a copied model."""
        plain = _class_of_wrapped(self).__new__(_class_of_wrapped(self))
        plain.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        named = [(name, copy.deepcopy(parameter, memo)) for parameter, name in self._parameter_names.items()]
        copied = self._distribute(
            plain,
            named_parameters=None if self._names_of_parameters.is_by_place else named,
            groups=copy.deepcopy(self._given_groups, memo),
            backward_passes_per_step=self.backward_passes_per_step,
        )
        copied._steps_taken = self._steps_taken
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a distributed optimizer can be neither pickled nor copied by copy.copy: save its state_dict(), or use "
            "copy.deepcopy"
        )


def wrap(optimizer: torch.optim.Optimizer, mixin: type[WrappedOptimizer], **attributes: Any) -> Any:
    """The optimizer once more, with the methods of `mixin` before its own. Both share all their attributes."""
    cls: Any = type(type(optimizer).__name__, (mixin, type(optimizer)), {"__doc__": type(optimizer).__doc__})
    distributed: torch.optim.Optimizer = cls.__new__(cls)
    distributed.__dict__ = vars(optimizer)
    vars(optimizer).update(attributes, _steps_taken=0)
    if "step" in vars(optimizer):  # a learning rate scheduler that came before has put it there, see LRScheduler
        vars(optimizer)["step"] = _observed_step(distributed)
    return distributed


def _class_of_wrapped(distributed: WrappedOptimizer) -> Any:
    return type(distributed).__bases__[1]


def _observed_step(distributed: torch.optim.Optimizer) -> Callable[..., Any]:
    """A step that tells learning rate schedulers that it was called."""

    def step(*args: Any, **kwargs: Any) -> Any:
        vars(distributed)["_opt_called"] = True
        return type(distributed).step(distributed, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step
