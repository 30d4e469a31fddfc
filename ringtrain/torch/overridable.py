"""`_DistributedOptimizer` as Horovod has it, for code that overrides its methods. `DistributedOptimizer` has its own.

Such code makes a class of the methods (`type(name, (torch.optim.SGD,), dict(_DistributedOptimizer.__dict__))`), or a
subclass, and has its own `_allreduce_grad_async` or `synchronize`. One parameter is reduced after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ringtrain import ops
from ringtrain.compression import AnyCompressor, Compression
from ringtrain.errors import StepOrderError
from ringtrain.job import elastic_client
from ringtrain.ops import Average
from ringtrain.process_sets import ProcessSet, global_process_set
from ringtrain.torch.parameters import NamedParameters
from ringtrain.torch.sparse import sparse_allreduce_async


def _of_wrapped(optimizer: Any) -> Any:
    """The methods that those below override: of the next class after the last one that has them."""
    last = [one for one in type(optimizer).__mro__ if "_make_hook" in vars(one)][-1]
    return super(last, optimizer)


class _DistributedOptimizer(torch.optim.Optimizer):
    """Mirrors `horovod.torch.optimizer._DistributedOptimizer`; the arguments are those of `DistributedOptimizer`.

    `_handles` has, of each parameter whose gradient is on its way, the handle and what the compression has to know;
    `_allreduce_delay` how many backward passes are to come before that; `_requires_update` the parameters.
    """

    def __init__(
        self,
        params: Any,
        named_parameters: NamedParameters | None,
        compression: AnyCompressor = Compression.none,
        backward_passes_per_step: int = 1,
        op: Any = Average,
        gradient_predivide_factor: float = 1.0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ):
        _of_wrapped(self).__init__(params)
        named = list(named_parameters or ())
        if not named:
            named = [
                (f"allreduce.noname.{i}.{j}", parameter)
                for i, group in enumerate(self.param_groups)
                for j, parameter in enumerate(group["params"])
            ]
        self._compression = compression
        self._parameter_names = {parameter: name for name, parameter in named}
        self.backward_passes_per_step = backward_passes_per_step
        self._allreduce_delay = dict.fromkeys(self._parameter_names, backward_passes_per_step)
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._groups = groups
        self._handles: dict[torch.Tensor, tuple[Any, Any]] = {}
        self._grad_accs: list[Any] = []
        self._requires_update: set[torch.Tensor] = set()
        self._synchronized = False
        self._should_synchronize = True
        if process_set.included() and (process_set.size() != 1 or elastic_client.is_elastic()):
            self._register_hooks()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As of the wrapped optimizer; what is on its way is forgotten."""
        self._handles = {}
        self._synchronized = False
        self._should_synchronize = True
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        _of_wrapped(self).load_state_dict(*args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce with every n-th backward pass from now on."""
        self.backward_passes_per_step = passes
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = passes

    def _register_hooks(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
                    self._requires_update.add(parameter)
                    self._grad_accs.append(parameter.register_post_accumulate_grad_hook(self._make_hook(parameter)))

    def _make_hook(self, p: torch.Tensor) -> Callable[..., None]:
        """Returns the function to call when backward() has added to the gradient of a parameter."""

        def hook(*ignore: Any) -> None:
            if self._allreduce_delay[p] <= 0:
                raise StepOrderError(
                    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                    "backward_passes_per_step to accumulate gradients locally."
                )
            self._allreduce_delay[p] -= 1
            is_last = self._allreduce_delay[p] == 0
            self._handles[p] = self._allreduce_grad_async(p) if is_last else (None, None)

        return hook

    def _allreduce_grad_async(self, p: torch.Tensor) -> tuple[Any, Any]:
        """Submit the gradient of a parameter. Returns the handle, and what the compression has to know."""
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        name = self._parameter_names.get(p)
        if p.grad.is_sparse and not self.sparse_as_dense:
            return sparse_allreduce_async(p.grad, name=name, op=self.op, process_set=self.process_set), None
        if p.grad.is_sparse:
            p.grad = p.grad.to_dense()
        tensor, ctx = self._compression.compress(p.grad)
        factor = self.gradient_predivide_factor if self.op == Average else 1.0
        handle = ops.allreduce_async_(
            tensor,
            name=name,
            op=self.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=self.process_set,
        )
        return handle, ctx

    def synchronize(self) -> None:
        """Wait until all gradients are reduced."""
        if not self._requires_update:
            self._synchronized = True
            return
        waiting: Sequence[torch.Tensor] = [
            p for group in self.param_groups for p in group["params"] if p in self._requires_update
        ]
        for p in waiting:
            if self._handles.get(p, (None, None))[0] is None:
                self._handles[p] = self._allreduce_grad_async(p)
        try:
            for p in waiting:
                handle, ctx = self._handles[p]
                output = handle() if callable(handle) else handle.wait()
                p.grad = output if output.is_sparse else self._compression.decompress(output, ctx)
        finally:
            self._handles.clear()
            self.set_backward_passes_per_step(self.backward_passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step` within does not wait for the gradients: `synchronize` was called before."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients and update the parameters."""
        if self._should_synchronize:
            self.synchronize()
        self._synchronized = False
        return _of_wrapped(self).step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As of the wrapped optimizer. Raises StepOrderError between backward() and step()."""
        if self._handles:
            raise StepOrderError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        _of_wrapped(self).zero_grad(*args, **kwargs)
