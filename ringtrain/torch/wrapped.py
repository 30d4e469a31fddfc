"""Making a distributed optimizer of one of torch: the names of its parameters, and the classes mixed into it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ringtrain import ops
from ringtrain._core import ReduceOp
from ringtrain.arrays.torch import coalesced
from ringtrain.engine.compression import AnyCompressor, Compression
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.requirements import require_compressor
from ringtrain.errors import StepOrderError
from ringtrain.job import elastic_client
from ringtrain.ops import Average
from ringtrain.torch.ops import sparse_allreduce_async
from ringtrain.training.optimizer import check_names, check_number_of_groups, split_evenly

# --- the names of parameters ------------------------------------------------------------------------------------------


NamedParameters = Iterable[tuple[str, torch.Tensor]]
Groups = int | Sequence[Sequence[torch.Tensor]] | None


class ParameterNames:
    """Names of parameters, found by the tensor itself.

    Args:
        named_parameters: such as model.named_parameters(); None names each parameter by its places in the optimizer.
        param_groups: of the optimizer.

    Raises:
        ValueError: no pairs of name and parameter, a name twice, or a parameter of the optimizer without a name.
    """

    def __init__(self, named_parameters: NamedParameters | None, param_groups: Sequence[dict[str, Any]]) -> None:
        self.is_by_place = named_parameters is None
        pairs = list(named_parameters) if named_parameters is not None else []
        _check_pairs(pairs)
        self._name_of = {parameter: name for name, parameter in pairs}
        unnamed = [place for place, parameter in _by_place(param_groups) if parameter not in self._name_of]
        if unnamed and not self.is_by_place:
            raise ValueError(
                f"named_parameters does not name all parameters of the optimizer: those at {', '.join(unnamed)} "
                "(parameter group.place) are missing"
            )

    def of(self, param_groups: Sequence[dict[str, Any]]) -> dict[torch.Tensor, str]:
        """The name of every parameter that the optimizer has now, in its order; later ones are named by their place."""
        return {parameter: self._name_of.get(parameter, place) for place, parameter in _by_place(param_groups)}


def _by_place(param_groups: Sequence[dict[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{group}.{place}", parameter)
        for group, options in enumerate(param_groups)
        for place, parameter in enumerate(options["params"])
    ]


def _check_pairs(pairs: list[Any]) -> None:
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ValueError("named_parameters must be pairs of a name and a parameter, such as model.named_parameters()")
    check_names([name for name, _ in pairs])


def check_groups(groups: Groups) -> None:
    """Raises ValueError for a negative number or a parameter in two groups, TypeError for anything else."""
    if groups is None:
        return
    if isinstance(groups, int):
        check_number_of_groups(groups)
        return
    if not all(isinstance(group, (list, tuple)) and all(map(torch.is_tensor, group)) for group in groups):
        raise TypeError("groups must be a number of groups, or lists of the parameters that form one")
    members = [id(parameter) for group in groups for parameter in group]
    if len(set(members)) < len(members):
        raise ValueError("groups: each parameter must be in one group only")


def groups_of(groups: Groups, names: dict[torch.Tensor, str]) -> list[list[str]]:
    """The names of the members of each group, of the parameters in `names`."""
    if groups is None:
        return []
    if isinstance(groups, int):
        return split_evenly(list(names.values()), groups) if groups else []
    return [[names[parameter] for parameter in group if parameter in names] for group in groups]


# --- one more object over the same state, and copies of it ------------------------------------------------------------


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
    _groups_property: Any = None  # `param_groups` of the class of the wrapped optimizer, if it has one

    def synchronize(self) -> None:
        """Wait until the gradients are averages over the ranks, so that they can be read or clipped before `step`."""
        raise NotImplementedError

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """`step` within does not wait for the averages: `synchronize` was called before. As in Horovod."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes within only accumulate gradients on this rank. Mirrors DistributedDataParallel.no_sync.

        The sum is averaged with the first backward pass after it, or in `step`.
        """
        raise NotImplementedError

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Average the gradients with every n-th backward pass from now on. As in Horovod."""
        raise NotImplementedError

    def set_weight(self, weight: float | None) -> None:
        """Weigh the gradients of this rank, with its number of samples, from now on."""
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


def wrap(optimizer: torch.optim.Optimizer, mixin: type[torch.optim.Optimizer], **attributes: Any) -> Any:
    """The optimizer once more, with the methods of `mixin` before its own. Both share all their attributes."""
    cls: Any = type(type(optimizer).__name__, (mixin, type(optimizer)), {"__doc__": type(optimizer).__doc__})
    distributed: torch.optim.Optimizer = cls.__new__(cls)
    distributed.__dict__ = vars(optimizer)
    groups_property = inspect.getattr_static(type(optimizer), "param_groups", None)
    if not issubclass(type(optimizer), WrappedOptimizer):
        attributes["_groups_property"] = groups_property
    vars(optimizer).update(attributes, _steps_taken=0)
    if "step" in vars(optimizer):  # a learning rate scheduler that came before has put it there, see LRScheduler
        vars(optimizer)["step"] = _observed_step(distributed)
    return distributed


def own_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The parameter groups, without waiting for averages."""
    of_class = vars(optimizer).get("_groups_property")
    groups: list[dict[str, Any]] = vars(optimizer)["param_groups"] if of_class is None else of_class.__get__(optimizer)
    return groups


def _class_of_wrapped(distributed: WrappedOptimizer) -> Any:
    return type(distributed).__bases__[1]


def _observed_step(distributed: torch.optim.Optimizer) -> Callable[..., Any]:
    """A step that tells learning rate schedulers that it was called."""

    def step(*args: Any, **kwargs: Any) -> Any:
        vars(distributed)["_opt_called"] = True
        return type(distributed).step(distributed, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


# --- `_DistributedOptimizer` as Horovod has it, for code that overrides its methods -----------------------------------

# `DistributedOptimizer` has its own. Such code makes a class of the methods (`type(name, (torch.optim.SGD,),
# dict(_DistributedOptimizer.__dict__))`), or a subclass, and has its own `_allreduce_grad_async` or `synchronize`.
# One parameter is reduced after another.


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
        require_compressor(compression)
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
            p.grad = coalesced(p.grad).to_dense()
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
