"""`DistributedOptimizer`: any optimizer of torch, which averages the gradients over the ranks before its update.

Mirrors `horovod.torch.DistributedOptimizer` (horovod/torch/optimizer.py).
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch

from ringtrain import ops
from ringtrain._core import ReduceOp
from ringtrain.engine.compression import Compression, GradientCompression
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.requirements import require_process_set
from ringtrain.errors import StepOrderError
from ringtrain.failure import warn
from ringtrain.job import elastic_client, session
from ringtrain.ops import Adasum, Average
from ringtrain.ops.objects import broadcast_object
from ringtrain.record import steps
from ringtrain.timeline import recording
from ringtrain.torch.adasum import AdasumOptimizer
from ringtrain.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringtrain.torch.hooks import GradientHooks
from ringtrain.torch.local_hooks import LocalHooks
from ringtrain.torch.memory import SharedGradients
from ringtrain.torch.wrapped import (
    Groups,
    NamedParameters,
    ParameterNames,
    WrappedOptimizer,
    _DistributedOptimizer as _DistributedOptimizer,
    check_groups,
    own_groups,
    wrap,
)
from ringtrain.training.gradient_batch import GradientBatch
from ringtrain.training.replicas import FiniteCheck, default_lr_of

_Closure = Callable[[], Any]
_POWER_SGD = "powersgd"  # in state_dict()
_GradScaler: type = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)  # the former since torch 2.3

# Those that average gradients, in the order of their construction, which is the same on all ranks.
_optimizers: weakref.WeakValueDictionary[int, Distributed] = weakref.WeakValueDictionary()
_places = itertools.count()


def _begin_anew() -> None:
    """At the end of a generation: the ranks of the next one may have taken other steps until now."""
    for optimizer in list(_optimizers.values()):
        optimizer._gradient_hooks.forget_step()
        optimizer._steps_taken = 0


session.at_shutdown(_begin_anew)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: GradientCompression = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    gradient_as_shared_view: bool = False,
    check_every: int = 0,
    nan_check: bool = False,
) -> WrappedOptimizer:
    """The optimizer, averaging the gradients over the ranks before each update.

    Gradients are submitted while backward() goes on, and `step` waits for them. The result is an instance of a subclass
    of the optimizer's class and shares all of its state, so schedulers, GradScaler and checkpoints work as before; it
    has the methods of `WrappedOptimizer` too. Use it in place of the optimizer.

    `copy.deepcopy` makes a distributed optimizer over copies of the parameters; of model and optimizer together, over
    those of the copied model.

    Args:
        optimizer: any of torch.optim.
        named_parameters: such as model.named_parameters(), the same on all ranks: names for errors and the timeline.
            All parameters of the optimizer must be named; None names them by their places.
        compression: how gradients travel, such as Compression.fp16, or Compression.powersgd(rank=4).
        backward_passes_per_step: average only with every n-th backward pass, the sum of n gradients. 1 also stands for
            "as many as there are before the first step", which is when the first gradients travel.
        op: Average, Sum, or Adasum, which combines the changes that the ranks' updates make (arXiv 2006.02924).
        gradient_predivide_factor: f divides by f before the sum and multiplies by f / size after it; for Average only.
        num_groups: older spelling of `groups`, which wins where both are given.
        groups: reduce the gradients, or the changes, in that many groups, each all at once; or lists of the parameters
            of each group.
        sparse_as_dense: reduce sparse gradients as dense ones, which the optimizer then gets as sparse ones again;
            otherwise they are gathered. The changes of op=Adasum are dense in either case.
        process_set: the ranks that take part; the others update with their own gradients.
        gradient_as_shared_view: keep the gradients in memory that the ranks of a node share, which makes reducing
            them cheaper. `parameter.grad` is then a view of that memory, and stays the same tensor. The gradients of
            parameters on a GPU stay there, as without it. Not for op=Adasum.
        check_every: compare the parameters of all ranks after every n-th step, see `check_replicas`; 0 never. Within
            `Join` this is left out in steps that not all ranks take.
        nan_check: have `step` raise NonFiniteError on all ranks, instead of updating, if a gradient is NaN or infinite
            on some of them. Not with GradScaler, which expects such gradients.

    Raises:
        NotInitializedError: before init().
        TypeError: no optimizer of torch.
        ValueError: named_parameters does not fit the optimizer, or another argument is out of its range; the optimizer
            is distributed already.

    Examples:
        >>> import ringtrain.torch as hvd
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        >>> before = model.weight.detach().clone()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        >>> model(torch.full((1, 2), float(hvd.rank()))).sum().backward()
        >>> optimizer.step()  # on two ranks: the average of the gradients is 0.5
        >>> torch.allclose(before - model.weight, torch.full((1, 2), 0.5))
        True
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is not a torch.optim.Optimizer; "
            "for other arrays there is DistributedOptimizer of ringtrain"
        )
    if isinstance(optimizer, WrappedOptimizer) or hasattr(optimizer, "outer_step"):  # the latter of DiLoCo
        raise ValueError("this optimizer is distributed already")
    require_process_set(process_set, "DistributedOptimizer")
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not registered; see add_process_set")
    if check_every < 0:
        raise ValueError(f"check_every must not be negative, but is {check_every}")
    if op == Adasum and gradient_as_shared_view:
        raise ValueError("gradient_as_shared_view is not for op=Adasum, which reduces no gradients")
    if groups is None:
        groups = num_groups
    check_groups(groups)
    passes = _checked_passes(backward_passes_per_step)
    names = ParameterNames(named_parameters, optimizer.param_groups)
    batch = GradientBatch(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    finite_check = FiniteCheck(process_set, batch.full_name) if nan_check else None
    distribute = functools.partial(
        DistributedOptimizer,
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        gradient_as_shared_view=gradient_as_shared_view,
        check_every=check_every,
        nan_check=nan_check,
    )
    attributes = {
        "backward_passes_per_step": passes,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
        "_names_of_parameters": names,
        "_given_groups": groups,
        "_distribute": distribute,
        "_compares_every": check_every,
    }
    averages_alone = not process_set.included() or (process_set.size() == 1 and not elastic_client.is_elastic())
    if op == Adasum and not averages_alone:
        adasum: AdasumOptimizer = wrap(
            optimizer, AdasumOptimizer, _adasum_batch=batch, _adasum_check=finite_check, **attributes
        )
        return adasum
    reduction = (
        LocalHooks(names, finite_check, op)
        if averages_alone
        else GradientHooks(
            names,
            optimizer.param_groups,
            groups,
            batch,
            passes=None if passes == 1 else passes,
            sparse_as_dense=sparse_as_dense,
            shared=SharedGradients() if gradient_as_shared_view else None,
            finite_check=finite_check,
            default_lr=default_lr_of(optimizer) if op == Average else None,
        )
    )
    distributed: Distributed = wrap(optimizer, Distributed, _gradient_hooks=reduction, **attributes)
    register(distributed)
    return distributed


def register(optimizer: Distributed) -> None:
    """Has clipping wait for its averages."""
    _optimizers[next(_places)] = optimizer


def _checked_passes(passes: int) -> int:
    if not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an integer of at least 1, but is {passes}")
    return passes


class Distributed(WrappedOptimizer):
    """The methods of an optimizer that averages gradients; mixed into the class of the wrapped one."""

    _gradient_hooks: GradientHooks | LocalHooks
    _skips_synchronize = False

    # GradScaler looks at the gradients through `param_groups` alone, and has to find averages there: then it sees the
    # same overflow on all ranks. Other readers need not wait.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        if self._gradient_hooks.is_due() and _is_called_by_grad_scaler():
            self._average()
        return own_groups(self)

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._groups_property is None:
            vars(self)["param_groups"] = groups
        else:
            self._groups_property.__set__(self, groups)

    def __watch(self) -> None:
        self._gradient_hooks.watch(own_groups(self), self.state)

    def synchronize(self) -> None:
        """Wait until all gradients are averages over the ranks. `step` then does not do it again.

        A parameter that got no gradient contributes zeros, with one warning.

        Raises:
            StepOrderError: a gradient was changed after backward().
            RingtrainError: a reduction failed; see ringtrain.errors.
        """
        self._synchronize()
        self._gradient_hooks.was_told = True

    def _synchronize(self) -> None:
        self.__watch()
        self._gradient_hooks.synchronize()
        self._gradient_hooks.was_told = False
        steps.begin(self._gradient_hooks.all_contribute)

    def _submit_rest(self) -> None:
        self.__watch()
        self._gradient_hooks.submit_rest()

    def _average(self) -> None:
        """For a caller that looks at the gradients before `step`, such as clipping."""
        self._synchronize()
        self._gradient_hooks.keep_averages()

    def step(self, closure: _Closure | None = None) -> Any:
        """Wait for the averages and update the parameters.

        Args:
            closure: computes the loss and the gradients anew, as often as the wrapped optimizer calls it; the loss that
                it returns is averaged over the ranks, so that all come to the same decisions.

        Raises:
            StepOrderError: within `skip_synchronize` and there was no `synchronize`.
            NonFiniteError: a gradient is NaN or infinite, with nan_check; nothing was updated.
            ReplicaError: the parameters are not the same on all ranks, with check_every.
            RingtrainError: a reduction failed; see ringtrain.errors.
        """
        result = self.__step(closure)
        self._gradient_hooks.end_step()
        if self._is_time_to_compare() and self._gradient_hooks.all_contribute:
            self._gradient_hooks.check_replicas()
        return result

    # Optimizer.load_state_dict would wrap it for the profiler, as the step of the wrapped class is already.
    step.hooked = True  # type: ignore[attr-defined]

    def __step(self, closure: _Closure | None) -> Any:
        if closure is not None:
            return super().step(lambda: self.__synchronized(closure))
        if self._skips_synchronize:
            if self._gradient_hooks.has_begun():
                raise StepOrderError("step() in skip_synchronize(), but the gradients were not synchronized before it")
        elif not self._gradient_hooks.is_synchronized or self._gradient_hooks.is_due():
            self._synchronize()
        elif self._gradient_hooks.was_told:
            warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Horovod would average once more here; ringtrain does not."
            )
        return super().step()

    def __synchronized(self, closure: _Closure) -> Any:
        with torch.enable_grad():
            loss = closure()
        self._synchronize()
        return self._gradient_hooks.average(loss) if torch.is_tensor(loss) else loss

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self._skips_synchronize = True
        try:
            yield
        finally:
            self._skips_synchronize = False

    def no_sync(self) -> AbstractContextManager[None]:
        return self._gradient_hooks.no_sync()

    def state_dict(self) -> dict[str, Any]:
        """As of the wrapped optimizer; with PowerSGD also what it keeps of each gradient, under "powersgd".

        The errors are those of this rank: to resume with the same bits each rank saves its own.
        """
        return self._state_dict(with_errors=True)

    def replicated_state_dict(self) -> dict[str, Any]:
        """Return the part of `state_dict` that is the same on all ranks: without the errors of PowerSGD."""
        return self._state_dict(with_errors=False)

    def _state_dict(self, with_errors: bool) -> dict[str, Any]:
        content = super().state_dict()
        of_compression = self._gradient_hooks.compression_state(with_errors)
        return content if of_compression is None else {**content, _POWER_SGD: of_compression}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of the wrapped optimizer. PowerSGD begins anew if the state has none of it.

        Raises ValueError if the state is of something else.
        """
        self._gradient_hooks.load_compression_state(state_dict.get(_POWER_SGD))
        super().load_state_dict({name: value for name, value in state_dict.items() if name != _POWER_SGD})

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = _checked_passes(passes)
        self._gradient_hooks.set_passes(passes)

    def set_weight(self, weight: float | None) -> None:
        """Weigh the gradients of this rank from now on, until the next call: give the number of samples of its step.

        The averages are then sum(weight * gradient) / sum(weight) over the ranks, so with mean losses they are the
        gradients of the mean over all samples. All ranks call it before backward() of the same step; 0 leaves the
        gradients of a rank out. None weighs all ranks the same again. With several backward passes for each step it is
        for the sum of their gradients. The loss of a closure is averaged by weight, too.

        Raises:
            StepOrderError: between backward() and step().
            ValueError: without op=Average, or the weight is negative, NaN or infinite.
            TypeError: not a number.

        Examples:
            >>> import ringtrain.torch as hvd
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
            >>> inputs = torch.full(([3, 1][hvd.rank()], 1), 4.0 * hvd.rank())  # batches of 3 samples and of 1
            >>> optimizer.set_weight(len(inputs))
            >>> model(inputs).mean().backward()
            >>> optimizer.step()  # on two ranks: the gradient is the mean of 0, 0, 0 and 4
            >>> model.weight.grad.item()
            1.0
        """
        self._gradient_hooks.set_weight(weight)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the wrapped optimizer. After a backward pass that has raised an error, it drops the step.

        All ranks drop it together: each waits until the gradients that are on their way have arrived.

        Raises:
            StepOrderError: between backward() and step(), where it would throw away what is being averaged; or other
                ranks do not drop the step. These get it from what they wait in, and no rank has updated.
        """
        hooks = self._gradient_hooks
        if hooks.has_failed():
            self.__watch()
            hooks.synchronize(drops=True)
        elif hooks.has_begun():
            raise StepOrderError(
                "zero_grad() after backward() and before step() or synchronize(), while the gradients are being "
                "averaged. For a backward pass whose gradients are not wanted use `with optimizer.no_sync():`, or call "
                "synchronize() before zero_grad(), on all ranks"
            )
        self.__watch()
        hooks.begin_step()
        super().zero_grad(set_to_none)


def _is_called_by_grad_scaler() -> bool:
    """Whether a method of a GradScaler is among the callers; it may be of a project's own subclass."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        code = frame.f_code
        if code.co_argcount and isinstance(frame.f_locals.get(code.co_varnames[0]), _GradScaler):
            return True
        frame = frame.f_back
    return False


def _average(optimizers: list[Distributed]) -> None:
    """Begins the averages of all, and then waits for them: ranks may have gradients of different ones."""
    for optimizer in optimizers:
        optimizer._submit_rest()
    for optimizer in optimizers:
        optimizer._average()


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, of the averages over the ranks: waits for them first.

    Call it between backward() and step(), after `scaler.unscale_(optimizer)` if there is a GradScaler. All ranks call
    it and get the same norm; a rank without backward() in this step, too, and it contributes zeros. The gradients for
    op=Adasum, and within `no_sync`, are each rank's own. After `step` there is nothing to wait for.

    Raises:
        StepOrderError: a gradient was changed after backward().
        RingtrainError: a reduction failed; see ringtrain.errors.

    Examples:
        >>> import ringtrain.torch as hvd
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> float(hvd.clip_grad_norm_(model.parameters(), 1.0))  # waits for the averages first
        5.0
        >>> optimizer.step()
    """
    several = [parameters] if torch.is_tensor(parameters) else list(parameters)
    owners = [one for one in list(_optimizers.values()) if one._gradient_hooks.owns_any(several)]
    waiting = [one for one in owners if one._gradient_hooks.is_due()]
    after_step = [one for one in waiting if one._gradient_hooks.is_untouched()]
    _average([one for one in waiting if one not in after_step])
    norm = torch.nn.utils.clip_grad_norm_(several, max_norm, norm_type, error_if_nonfinite, foreach)
    for optimizer in after_step:
        optimizer._gradient_hooks.keep_clipped()
    return norm


def count_on_from(rank: int, optimizers: Sequence[Distributed]) -> None:
    """Continue the count of steps from that of one rank; all ranks call it together."""
    counts = broadcast_object([steps.count(), *(optimizer._steps_taken for optimizer in optimizers)], rank)
    recording.count_on_from(counts[0])
    for optimizer, taken in zip(optimizers, counts[1:], strict=True):
        optimizer._steps_taken = taken


# --- `Join`: epochs in which the ranks have different numbers of batches ----------------------------------------------


class Join:
    """A context in which each rank trains until its own data end: `with hvd.Join(optimizer): for batch in loader: ...`

    A rank that leaves it early waits at its end and contributes nothing to the reductions of the others, whose averages
    are over the ranks that still train. At the end all ranks have the parameters and the state of the one that trained
    longest. Mirrors torch.distributed.algorithms.Join on `hvd.join`.

    Within it, the other operations of the ranks that still train may be allreduces with Sum and Average, to which the
    others contribute zeros, and barriers. SyncBatchNorm and nan_check work; sparse gradients need sparse_as_dense=True.

    Args:
        optimizers: distributed, over all ranks of the job, with op=Average or Sum.

    Attributes:
        last_rank: after the context, the rank that trained longest; the one to broadcast the buffers of a model from,
            such as running statistics.

    Raises:
        TypeError: an optimizer that is not distributed, or one with op=Adasum.
    """

    def __init__(self, *optimizers: Any):
        for optimizer in optimizers:
            if not isinstance(optimizer, Distributed) or hasattr(optimizer, "outer_step"):
                raise TypeError(f"Join takes what DistributedOptimizer returned, not {type(optimizer).__name__}")
        self._optimizers = optimizers
        self.last_rank: int | None = None

    def __enter__(self) -> Join:
        for optimizer in self._optimizers:
            optimizer._gradient_hooks.counts_contributors = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for optimizer in self._optimizers:
            optimizer._gradient_hooks.counts_contributors = False
        if error is not None:
            return  # the others learn it when this rank ends; waiting for them would only hide it
        self.last_rank = last = ops.join()
        if session.size() == 1:
            return
        count_on_from(last, self._optimizers)
        for optimizer in self._optimizers:
            broadcast_parameters([group["params"] for group in optimizer.param_groups], last)
            broadcast_optimizer_state(optimizer, last)
