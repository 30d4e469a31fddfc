"""The gradients of one optimizer on their way: submitted while backward() goes on, waited for before the update."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ringtrain import ops
from ringtrain.checks import FiniteCheck, check_replicas
from ringtrain.errors import StepOrderError
from ringtrain.handles import Handle
from ringtrain.reducer import GradientReducer
from ringtrain.torch.parameters import Groups, ParameterNames, groups_of
from ringtrain.torch.shared_gradients import SharedGradients
from ringtrain.torch.sparse import SparseHandle, sparse_allreduce_async

# The hook of each parameter, and the reduction that it calls: of the optimizer that was made last for it.
_hooks = WeakIdKeyDictionary()


class _Gradient:
    """What is known of the gradient of one parameter since the last update."""

    __slots__ = ("name", "parameter", "passes", "priority", "submitted", "version")

    def __init__(self, parameter: torch.Tensor, name: str, priority: int):
        self.parameter = parameter
        self.name = name
        self.priority = priority
        self.forget()

    def forget(self) -> None:
        self.passes = 0  # of backward()
        self.submitted: torch.Tensor | None = None
        self.version = 0  # of `submitted`, at that time

    def has_changed(self) -> bool:
        """Whether somebody else wrote to the gradient, or put another one in its place, since it was submitted."""
        return self.submitted is not None and (
            self.parameter.grad is not self.submitted or self.submitted._version != self.version
        )


class GradientReduction:
    """Averages the gradients of one optimizer over the ranks.

    A hook of each parameter submits its gradient after the last backward pass of a step. How many passes that are is
    known from `passes`, or else from the first step, in which nothing is submitted before `synchronize`.

    Hooks run in the thread of backward(), everything else in that of the training loop, one at a time.

    Args:
        names: of the parameters.
        param_groups: of the optimizer.
        groups: which gradients are reduced together; see ringtrain.torch.parameters.
        reducer: has the operation, the compression and the process set.
        passes: backward passes for each step, or None.
        sparse_as_dense: make sparse gradients dense.
        shared: where the gradients are to lie, or None for where autograd has put them.
        finite_check: looks at every gradient, or None.
    """

    def __init__(
        self,
        names: ParameterNames,
        param_groups: Sequence[dict[str, Any]],
        groups: Groups,
        reducer: GradientReducer,
        passes: int | None,
        sparse_as_dense: bool,
        shared: SharedGradients | None,
        finite_check: FiniteCheck | None,
    ):
        self._names = names
        self._groups = groups
        self._reducer = reducer
        self._passes = passes
        self._sparse_as_dense = sparse_as_dense
        self._shared = shared
        self._finite_check = finite_check
        self._known: dict[torch.Tensor, _Gradient] = {}  # of all parameters that ever required a gradient
        self._gradients: dict[torch.Tensor, _Gradient] = {}  # of those that do now
        self._begun: list[_Gradient] = []  # by a backward pass, and not yet synchronized
        self._sparse: list[tuple[_Gradient, SparseHandle]] = []
        self._is_local = False
        self._replaced_by: weakref.ref[GradientReduction] | None = None
        self._has_warned = False
        # Whether averages are over the ranks that have not joined.
        self.counts_contributors = False
        self.is_synchronized = False
        self.watch(param_groups)

    def average(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of all ranks."""
        average: torch.Tensor = ops.allreduce(
            loss.detach(), name=self._reducer.full_name("<loss>"), process_set=self._reducer.process_set
        )
        return average

    def watch(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Follow the parameters that the optimizer has now and that require a gradient now."""
        names = {parameter: name for parameter, name in self._names.of(param_groups).items() if parameter.requires_grad}
        if self._replaced_by is not None and self._replaced_by() is None:
            self._known, self._gradients, self._replaced_by = {}, {}, None
        if names.keys() == self._gradients.keys():
            return
        for place, (parameter, name) in enumerate(names.items()):
            if parameter not in self._known:
                # Early parameters first: the next forward pass starts with them.
                self._known[parameter] = gradient = _Gradient(parameter, name, -place)
                _set_hook(self, gradient)
        self._gradients = {parameter: self._known[parameter] for parameter in names}
        self._reducer.group(groups_of(self._groups, names))

    def check_replicas(self) -> None:
        """Raises ReplicaError if the parameters are not the same on all ranks."""
        parameters = {gradient.name: gradient.parameter for gradient in self._gradients.values()}
        check_replicas(parameters, self._reducer.process_set)

    def has_begun(self) -> bool:
        """Whether there was a backward pass since the last `synchronize`."""
        return bool(self._begun)

    def owns_any(self, parameters: Sequence[torch.Tensor]) -> bool:
        return any(parameter in self._gradients for parameter in parameters)

    def set_passes(self, passes: int) -> None:
        self._passes = passes

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within only accumulate."""
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    def on_backward(self, gradient: _Gradient) -> None:
        """Called when a backward pass has added to a gradient."""
        self.is_synchronized = False
        if self._is_local:
            return
        if gradient.passes == 0:
            self._begun.append(gradient)
        gradient.passes = passes = gradient.passes + 1
        if passes == self._passes:
            self._submit(gradient)
        elif self._passes is not None and passes > self._passes:
            raise StepOrderError(
                f'the gradient of "{gradient.name}" was computed {passes} times without a step(), and '
                f"{self._passes} backward passes for each step were expected. Call "
                "set_backward_passes_per_step, or accumulate in `with optimizer.no_sync():`"
            )

    def synchronize(self) -> None:
        """Submit what is not yet submitted, and wait for everything: the gradients are the averages afterwards.

        Raises:
            StepOrderError: a gradient was changed after it was submitted, or a later optimizer has the parameters.
            RingtrainError: a reduction failed.
        """
        if self._replaced_by is not None:
            raise StepOrderError(
                "another DistributedOptimizer was made for these parameters after this one, and averages their "
                "gradients; make a new one to go back"
            )
        if self._passes is None and self._begun:
            self._passes = max(gradient.passes for gradient in self._begun)
        try:
            self._submit_rest()
            changed = [gradient.name for gradient in self._gradients.values() if gradient.has_changed()]
            contributors = self._count_contributors() if self.counts_contributors else None
            self._reducer.wait()
            for gradient, handle in self._sparse:
                gradient.parameter.grad = handle.wait()
            if contributors is not None:
                self._average_over(int(contributors.wait().item()))
        finally:
            self._sparse.clear()
            self._begun.clear()
            for gradient in self._gradients.values():
                gradient.forget()
        if self._finite_check is not None:
            self._finite_check.agree()
        if changed:
            raise StepOrderError(
                f"the gradient of {_listed(changed)} was changed between backward() and step(), while it was being "
                "averaged. Call optimizer.synchronize() first; hvd.clip_grad_norm_ does so by itself"
            )
        self.is_synchronized = True

    def _count_contributors(self) -> Handle:
        name = self._reducer.full_name("<contributors>")
        return ops.allreduce_async(
            torch.ones(1, device="cpu"), name=name, op=ops.Sum, process_set=self._reducer.process_set
        )

    def _average_over(self, contributors: int) -> None:
        """Make averages over all ranks those over some: the others had contributed zeros."""
        size = self._reducer.process_set.size()
        if self._reducer.op == ops.Average and size and contributors < size:
            torch._foreach_mul_([p.grad for p in self._gradients if p.grad is not None], size / contributors)

    def _submit_rest(self) -> None:
        rest = [gradient for gradient in self._gradients.values() if gradient.submitted is None]
        without = [gradient for gradient in rest if gradient.parameter.grad is None]
        for gradient in without:
            gradient.parameter.grad = torch.zeros_like(gradient.parameter)
        if without and not self._has_warned:
            self._has_warned = True
            names = _listed([gradient.name for gradient in without])
            warnings.warn(
                f"backward() gave no gradient to {names}; this rank contributes zeros. If that is meant to be so on "
                "all ranks, requires_grad_(False) saves the way. This is said once.",
                stacklevel=5,
            )
        for gradient in rest:
            self._submit(gradient)

    def _submit(self, gradient: _Gradient) -> None:
        grad = gradient.parameter.grad
        assert grad is not None
        if self._finite_check is not None:
            self._finite_check.look_at(gradient.name, grad)
        if grad.is_sparse:
            if not self._sparse_as_dense:
                self._submit_sparse(gradient, grad)
                return
            grad = gradient.parameter.grad = grad.to_dense()
        if self._shared is not None and grad.is_cpu:
            grad = self._shared.take(gradient.parameter, grad)
        dense = grad if grad.is_contiguous() else _in_memory_order(grad)
        if dense is None:
            dense = grad = gradient.parameter.grad = grad.contiguous()
        gradient.submitted = grad
        gradient.version = grad._version
        self._reducer.ready(gradient.name, dense, gradient.priority)

    def _submit_sparse(self, gradient: _Gradient, grad: torch.Tensor) -> None:
        if self._reducer.has_group(gradient.name):
            raise ValueError(
                f'the gradient of "{gradient.name}" is sparse and cannot be in a group; use sparse_as_dense=True'
            )
        gradient.submitted = grad
        gradient.version = grad._version
        handle = sparse_allreduce_async(
            grad, self._reducer.full_name(gradient.name), self._reducer.op, self._reducer.process_set
        )
        self._sparse.append((gradient, handle))


class LocalReduction:
    """Of a rank that averages with nobody: it is the only one of its process set, or does not belong to it."""

    is_synchronized = True
    counts_contributors = False

    def watch(self, param_groups: Sequence[dict[str, Any]]) -> None: ...

    def average(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def check_replicas(self) -> None: ...

    def has_begun(self) -> bool:
        return False

    def owns_any(self, parameters: Sequence[torch.Tensor]) -> bool:
        return False

    def set_passes(self, passes: int) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self) -> None: ...


def _set_hook(reduction: GradientReduction, gradient: _Gradient) -> None:
    """Have backward() call the reduction, as long as there is one, and nobody else."""
    dead_or_alive = weakref.ref(reduction)

    def hook(parameter: torch.Tensor) -> None:
        alive = dead_or_alive()
        if alive is not None:
            alive.on_backward(gradient)

    if gradient.parameter in _hooks:
        registration, other = _hooks[gradient.parameter]
        registration.remove()
        if other() is not None:
            other()._replaced_by = dead_or_alive
    registration = gradient.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    _hooks[gradient.parameter] = registration, dead_or_alive


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor | None:
    """A view whose elements lie in memory one after the other, as of a channels-last tensor; None if there is none."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: (-strides[dimension], dimension))
    view = tensor.permute(order)
    return view if view.is_contiguous() else None


def _listed(names: list[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
