"""Submits the gradients of one optimizer while backward() runs, and waits for them before the update."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable
from torch.utils.weak import WeakIdKeyDictionary

from ringtrain import ops
from ringtrain.arrays.torch import coalesced
from ringtrain.errors import MismatchError, StepOrderError
from ringtrain.failure import warn
from ringtrain.job import session
from ringtrain.record.logger import logger
from ringtrain.torch.gradients import (
    Gradient,
    LeftGradients,
    as_real,
    content_of_leaf,
    digest_of_all,
    in_memory_order,
    some_elements,
)
from ringtrain.torch.memory import SharedGradients
from ringtrain.torch.ops import SparseHandle, agree_on_sparse, empty_sparse, sparse_allreduce_async
from ringtrain.torch.wrapped import Groups, ParameterNames, groups_of
from ringtrain.training.gradient_batch import GradientBatch
from ringtrain.training.replicas import FiniteCheck, Start, StartCheck, check_replicas
from ringtrain.training.update_check import UpdateCheck, are_equal, content_of, equality_terms, numbers_among

# The hook of each parameter, and the reduction that it calls: of the optimizer that was made last for it.
_hooks = WeakIdKeyDictionary()


class _Marks(NamedTuple):
    """Facts that each rank sends beside its gradients, as 0 or 1."""

    is_idle: int = 0  # nothing has happened on this rank since the last step
    drops: int = 0  # backward() has failed here, and zero_grad() drops the step
    has_new: int = 0  # there is a gradient for a parameter for which no rank has had one
    has_clipped_stale: int = 0  # is idle, and has clipped what the last step has left


class GradientHooks:
    """Averages the gradients of one optimizer over the ranks.

    A hook of each parameter submits its gradient after the last backward pass of a step. How many passes that are is
    known from `passes`, or else from the first step, of the rank with most. In that step nothing is submitted before
    `submit_rest`, where the ranks agree on which gradients there are, and which of them are sparse: a rank that has
    none for a parameter must know it. A parameter for which no rank has had a gradient does not take part.

    A step depends only on facts that all ranks know: a rank may have had no backward pass, or failed in one. So the
    first call that needs averages begins them on all ranks (`is_due`), and `_Marks` travel beside the gradients.

    Hooks run in the thread of backward(), everything else in that of the training loop, one at a time.

    Args:
        names: of the parameters.
        param_groups: of the optimizer.
        groups: which gradients are reduced together; see ringtrain.torch.wrapped.
        batch: has the operation, the compression and the process set.
        passes: backward passes for each step, or None.
        sparse_as_dense: reduce sparse gradients as dense ones.
        shared: moves the gradients to shared memory; None leaves them where autograd has put them.
        finite_check: looks at every gradient, or None.
        default_lr: the learning rate of an optimizer for which nobody chooses one, and whose it is; or None.
    """

    def __init__(
        self,
        names: ParameterNames,
        param_groups: Sequence[dict[str, Any]],
        groups: Groups,
        batch: GradientBatch,
        passes: int | None,
        sparse_as_dense: bool,
        shared: SharedGradients | None,
        finite_check: FiniteCheck | None,
        default_lr: tuple[float, str] | None = None,
    ):
        self._names = names
        self._groups = groups
        self._batch = batch
        self._given_passes = passes
        self._passes = passes
        self._sparse_as_dense = sparse_as_dense
        self._shared = shared
        self._finite_check = finite_check
        # A gradient, if its batch does.
        self._takes_it_plain = shared is None and finite_check is None and batch.power_sgd is None
        self._default_lr = default_lr
        self._start_check = StartCheck(batch.process_set, batch.full_name)
        self._known: dict[torch.Tensor, Gradient] = {}  # of all parameters that ever required a gradient
        self._gradients: dict[torch.Tensor, Gradient] = {}  # of those that do now
        self._begun: list[Gradient] = []  # by a backward pass, and not yet synchronized
        self._sparse: list[tuple[Gradient, SparseHandle]] = []
        self._of_last_step: dict[torch.Tensor, Gradient] = {}  # `_gradients` then
        self._frozen: list[Gradient] = []  # since the last step, with a gradient on some rank
        self._is_local = False  # in `no_sync`
        self._is_in_backward = False  # or it has failed
        self._left = LeftGradients()
        self._has_looked_for_zero_grad = False
        self._stale: dict[Gradient, torch.Tensor | None] | None = None  # gradients of the last step, of an idle rank
        self._update_check = UpdateCheck(
            batch.process_set,
            batch.full_name,
            "hvd.broadcast_optimizer_state(optimizer, root_rank=0)",
            marks=len(_Marks._fields),
        )
        self._replaced_by: weakref.ref[GradientHooks] | None = None
        self._has_warned = False
        self.counts_contributors = False  # averages are over the ranks that have not joined
        self.was_told = False  # by the script to average, with `synchronize`
        self.all_contribute = True  # in the last `synchronize`
        self.is_synchronized = False
        self._state: Mapping[Any, Any] = {}  # of the optimizer
        self._compared_state: Mapping[Any, Any] = self._state
        self.watch(param_groups, self._state)

    def average(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of all ranks."""
        average: torch.Tensor = ops.allreduce(
            loss.detach(),
            name=self._batch.full_name("<loss>"),
            process_set=self._batch.process_set,
            weight=self._batch.weight,
        )
        return average

    def watch(self, param_groups: Sequence[dict[str, Any]], state: Mapping[Any, Any]) -> None:
        """Follow the parameters that the optimizer has now and that require a gradient now, and its state."""
        self._param_groups = param_groups
        self._state = state
        names = {parameter: name for parameter, name in self._names.of(param_groups).items() if parameter.requires_grad}
        if self._replaced_by is not None and self._replaced_by() is None:
            self._known, self._gradients, self._replaced_by = {}, {}, None
        if names.keys() == self._gradients.keys():
            return
        for place, (parameter, name) in enumerate(names.items()):
            if parameter not in self._known:
                # Early parameters first: the next forward pass starts with them.
                self._known[parameter] = gradient = Gradient(parameter, name, -place)
                _set_hook(self, gradient)
        self._gradients = {parameter: self._known[parameter] for parameter in names}
        self._group()

    def _group(self) -> None:
        names = {of.parameter: of.name for of in self._gradients.values() if of.is_sparse is not None}
        self._batch.group(groups_of(self._groups, names))

    def check_replicas(self) -> None:
        """Raises ReplicaError if the parameters are not the same on all ranks."""
        parameters = {gradient.name: gradient.parameter for gradient in self._gradients.values()}
        check_replicas(parameters, self._batch.process_set)

    def has_begun(self) -> bool:
        """Whether there was a backward pass since the last `synchronize`."""
        return bool(self._begun)

    def compression_state(self, with_errors: bool) -> dict[str, Any] | None:
        """Returns the state of PowerSGD, see `PowerSGDGradients.state_dict`; None without it."""
        power_sgd = self._batch.power_sgd
        return None if power_sgd is None else power_sgd.state_dict(with_errors)

    def load_compression_state(self, state: dict[str, Any] | None) -> None:
        """Continue from what `compression_state` has returned; from None begin anew."""
        power_sgd = self._batch.power_sgd
        if power_sgd is not None:
            power_sgd.load_state_dict(state) if state is not None else power_sgd.forget()

    def has_failed(self) -> bool:
        """Whether a backward pass has raised an error since the last `synchronize`."""
        return self._is_in_backward

    def is_due(self) -> bool:
        """Whether the gradients of this step are still to be averaged: the same on all ranks, outside of `no_sync`.

        A script may go on to the next step without `step`, as where a norm is NaN. Then no gradient is left in place.
        """
        if self._is_local or not self.is_synchronized:
            return not self._is_local
        return self._left.are_gone([parameter.grad for parameter in self._gradients])

    def owns_any(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether it averages the gradient of one of them."""
        return self._replaced_by is None and any(parameter in self._gradients for parameter in parameters)

    def set_passes(self, passes: int) -> None:
        self._given_passes = self._passes = passes

    def set_weight(self, weight: Any) -> None:
        self._batch.set_weight(weight)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within only accumulate."""
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    def on_backward(self, gradient: Gradient) -> None:
        """Called when a backward pass has added to a gradient."""
        if self._left.has_stepped and not self._has_looked_for_zero_grad:
            self._look_for_zero_grad(gradient)
        self.is_synchronized = self.was_told = self._left.has_stepped = False
        if self._is_local:
            return
        grad = gradient.parameter.grad
        assert grad is not None
        requires_grad = grad.requires_grad
        if requires_grad and torch.is_grad_enabled():
            raise StepOrderError(
                f'the gradient of "{gradient.name}" cannot be averaged in place while backward(create_graph=True) '
                "keeps its graph. Take the gradients of a penalty with torch.autograd.grad, or call this backward() "
                "in `with optimizer.no_sync():`"
            )
        if not self._is_in_backward:
            self._is_in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
        if gradient.passes == 0:
            self._begun.append(gradient)
        gradient.passes = passes = gradient.passes + 1
        if self._passes is not None and passes > self._passes:
            raise StepOrderError(
                f'the gradient of "{gradient.name}" was computed {passes} times without a step(), and '
                f"{self._passes} backward passes for each step were expected. Call "
                "set_backward_passes_per_step, or accumulate in `with optimizer.no_sync():`"
            )
        is_last = passes == self._passes and len(self._begun) == len(self._gradients)
        if is_last and self._batch.is_in_use() and not self._update_check.is_submitted() and self._watches_all():
            self._submit_marks()  # before the last gradient, so that they travel with it
        if passes != self._passes:
            gradient.see(grad)
        # Called for every gradient in every step, so the shortest way is tried first. A gradient as in the step before
        # is neither sparse nor complex nor out of order.
        elif (
            self._takes_it_plain
            and not requires_grad
            and self._batch.ready_again(gradient.name, grad, gradient.priority)
        ):
            gradient.is_submitted = True
            gradient.seen = grad
            gradient.version = grad._version
        elif gradient.is_sparse is not None and self._batch.is_in_use():
            self._submit(gradient, grad)
        else:
            gradient.see(grad)

    def _look_for_zero_grad(self, gradient: Gradient) -> None:
        self._has_looked_for_zero_grad = True
        grad = gradient.parameter.grad
        if session.rank() == 0 and grad is not None and self._left.was_added_to(grad):
            logger.info(
                "backward() has added to the averages of the step before: call optimizer.zero_grad() in every step, "
                "unless that is meant. This is said once"
            )

    def _watches_all(self) -> bool:
        """Whether there is no parameter that has begun to require a gradient since `watch`, such as in forward()."""
        of_groups = (parameter for group in self._param_groups for parameter in group["params"])
        return all(parameter in self._gradients for parameter in of_groups if parameter.requires_grad)

    def _end_backward(self) -> None:
        self._is_in_backward = False

    def synchronize(self, drops: bool = False) -> None:
        """Submit what is not yet submitted, and wait for everything: the gradients are the averages afterwards.

        Args:
            drops: nobody is to use these averages, since backward() has failed on this rank.

        Raises:
            StepOrderError: a gradient was changed after backward(), a later optimizer has the parameters, or other
                ranks do not drop the step.
            MismatchError: the ranks have the same parameters in different orders.
            RingtrainError: a reduction failed.
        """
        try:
            self.submit_rest(drops)
            changed = [gradient.name for gradient in self._all() if gradient.was_changed]
            dropped = [gradient.name for gradient in self._all() if gradient.was_dropped] if changed else []
            contributors, marks = self._wait()
        finally:
            self._update_check.settle()
            self._sparse.clear()
            self._begun.clear()
            for gradient in self._all():
                gradient.forget()
            self._frozen, self._stale = [], None
            self._is_in_backward = False
        if marks.drops:
            self._require_all_drop(contributors, marks.drops)
            return
        if marks.has_clipped_stale and marks.is_idle < contributors:
            raise StepOrderError(
                f"{marks.has_clipped_stale} of {contributors} ranks have neither called backward() nor zero_grad() in "
                "this step, and have clipped the gradients of the step before: call zero_grad() on all ranks in every "
                "step, also without a batch. No rank has updated"
            )
        if self._finite_check is not None:
            self._finite_check.agree()
        if dropped:
            raise StepOrderError(
                f"the gradient of {_listed(dropped)} was set to None between backward() and step(), as "
                "model.zero_grad() does: call zero_grad() before backward() or after step()"
            )
        if changed:
            raise StepOrderError(
                f"the gradient of {_listed(changed)} was changed between backward() and step(), before it was the "
                "average over the ranks. Call optimizer.synchronize() first; hvd.clip_grad_norm_ does so by itself"
            )
        self.is_synchronized = True
        self._left.forget()

    def keep_averages(self) -> None:
        """After `synchronize`: remember the averages, to see when the script goes on to another step without `step`."""
        self._left.keep(self._grads())

    def end_step(self) -> None:
        """After the update."""
        self.is_synchronized = self.was_told = False
        self._left.end_step(self._grads())

    def is_untouched(self) -> bool:
        """Whether this rank has its gradients from the last step, and nothing has happened to them since."""
        return self._left.are_untouched(self._grads())

    def keep_clipped(self) -> None:
        """After gradients that were untouched were clipped."""
        self._left.keep_clipped(self._grads())

    def begin_step(self) -> None:
        """At zero_grad(). Averages of an explicit `synchronize` stay valid."""
        self._left.has_stepped = False
        if not self.was_told:
            self.is_synchronized = False

    def _grads(self) -> list[torch.Tensor]:
        return [grad for parameter in self._gradients if (grad := parameter.grad) is not None]

    def _all(self) -> list[Gradient]:
        """Returns the gradients of this step, also those whose parameters were frozen after backward()."""
        return [*self._gradients.values(), *self._frozen]

    def _wait(self) -> tuple[int, _Marks]:
        """Waits for the averages. Returns the number of ranks that have not joined, and the sums of their marks."""
        self._wait_for_submitted()
        contributors, *marks = self._update_check.wait(self._content_of_state)
        self._compared_state = self._state
        sums = _Marks(*marks)
        if sums.has_new:
            self._average_more()
        self.all_contribute = contributors == self._batch.process_set.size() or not self.counts_contributors
        if self._stale is not None and sums.is_idle == contributors and self._are_averages(self._stale, sums):
            return contributors, sums
        if self.counts_contributors:
            self._average_over(contributors)
        self._make_sparse_again()
        return contributors, sums

    def _are_averages(self, stale: Mapping[Gradient, torch.Tensor | None], sums: _Marks) -> bool:
        """Gives back the gradients of the last step if all ranks are idle, for a step() with them once more.

        These are the same on all ranks, unless the scripts have written others past autograd, as by
        `p.grad.data.copy_()`, which no rank notices alone. Such gradients are averaged.
        """
        for gradient, grad in stale.items():
            gradient.parameter.grad = grad
            if self._shared is not None and grad is not None and grad.is_cpu and not grad.is_sparse:
                self._shared.take(gradient.parameter, grad)
        digest = digest_of_all([grad for grad in stale.values() if grad is not None])
        terms = torch.tensor(equality_terms(digest), device="cpu")
        name = self._batch.full_name("<last gradients>")
        if are_equal(ops.allreduce(terms, op=ops.Sum, name=name, process_set=self._batch.process_set).tolist()):
            return True
        if sums.has_clipped_stale:
            raise StepOrderError(
                f"{sums.has_clipped_stale} of {sums.is_idle} ranks have clipped gradients that are not averages, and "
                "were written past autograd, as by p.grad.data.copy_(): call optimizer.synchronize() before clipping, "
                "or optimizer.zero_grad() before they are written. No rank has updated"
            )
        for gradient in stale:
            gradient.is_submitted = False
        self._average_more()
        return False

    def _average_more(self) -> None:
        """Averages what is not yet submitted, also of parameters for which no rank has had a gradient before."""
        undecided = self._undecided()
        if undecided:
            self._decide(undecided)
        self._submit_all([gradient for gradient in self._gradients.values() if gradient.is_sparse is not None])
        self._wait_for_submitted()
        self._group()

    def _wait_for_submitted(self) -> None:
        self._batch.wait()
        for gradient, handle in self._sparse:
            gradient.parameter.grad = handle.wait()
        self._sparse.clear()

    def _require_all_drop(self, contributors: int, dropping: int) -> None:
        if self._finite_check is not None:
            self._finite_check.forget()
        if dropping < contributors:
            raise StepOrderError(
                f"backward() failed on {dropping} of {contributors} ranks, which called zero_grad() and drop the step, "
                "and the others did not: no rank has updated. Agree on it, for example by an allreduce of a flag, and "
                "then let all ranks either end or call zero_grad()"
            )

    def forget_step(self) -> None:
        """Forget the reductions that have begun: a rank was lost, and they will not end."""
        self._sparse.clear()
        self._begun.clear()
        self._update_check.forget()
        self.is_synchronized = self.was_told = self._left.has_stepped = self._is_in_backward = False
        self._frozen, self._stale, self._of_last_step = [], None, {}
        for gradient in self._known.values():
            gradient.forget()
        if self._shared is not None:
            self._shared.forget()

    def submit_rest(self, drops: bool = False) -> None:
        """Submit what backward() has not. `synchronize` does so by itself.

        Raises:
            StepOrderError: a later optimizer has the parameters.
        """
        if self._replaced_by is not None:
            raise StepOrderError(
                "another DistributedOptimizer was made for these parameters after this one, and averages their "
                "gradients; make a new one to go back"
            )
        for gradient in self._gradients.values():
            is_due = gradient.is_submitted or self._passes is None or gradient.passes >= self._passes
            if is_due and gradient.has_changed():
                gradient.was_changed = True
                gradient.was_dropped = gradient.parameter.grad is None
        self._set_stale_apart()
        self._begin_use()
        self._find_frozen()
        self._submit_all([gradient for gradient in self._all() if gradient.is_sparse is not None])
        if not self._update_check.is_submitted():
            self._submit_marks(drops)

    def _submit_all(self, gradients: list[Gradient]) -> None:
        rest = [gradient for gradient in gradients if not gradient.is_submitted]
        self._make_zeros([gradient for gradient in rest if gradient.parameter.grad is None])
        for gradient in rest:
            grad = gradient.parameter.grad
            assert grad is not None
            self._submit(gradient, grad)

    def _submit_marks(self, drops: bool = False) -> None:
        has_new = any(gradient.parameter.grad is not None for gradient in self._undecided())
        is_idle = self._stale is not None
        marks = _Marks(is_idle, drops, has_new, is_idle and self._left.were_clipped)
        options = [numbers_among(group) for group in self._param_groups]
        self._update_check.submit(options, self._state is not self._compared_state, marks)

    def _set_stale_apart(self) -> None:
        """An idle rank contributes zeros, and not what the last step has left, if other ranks are not idle."""
        if self._stale is None and self.is_untouched():
            self._stale = {gradient: gradient.parameter.grad for gradient in self._gradients.values()}
            for gradient, grad in self._stale.items():
                if self._shared is not None and grad is not None:
                    self._stale[gradient] = grad.clone()  # the zeros take its place
                gradient.parameter.grad = None

    def _find_frozen(self) -> None:
        """Parameters that were frozen since the last step take part once more if some rank has a gradient for them."""
        last, self._of_last_step = self._of_last_step, self._gradients
        frozen = {parameter: of for parameter, of in last.items() if parameter not in self._gradients}
        frozen.update((of.parameter, of) for of in self._begun if of.parameter not in self._gradients)
        if frozen:
            self._frozen = [of for of, sparse in self._agreement(list(frozen.values())) if sparse is not None]

    def _undecided(self) -> list[Gradient]:
        return [gradient for gradient in self._gradients.values() if gradient.is_sparse is None]

    def _decide(self, undecided: list[Gradient]) -> None:
        """Agrees on which gradients there are, and which of them are sparse."""
        for gradient, is_sparse in self._agreement(undecided):
            gradient.is_sparse = is_sparse

    def _agreement(self, gradients: list[Gradient]) -> list[tuple[Gradient, bool | None]]:
        name = self._batch.full_name(f"<layout of {gradients[0].name}>")
        grads = [gradient.parameter.grad for gradient in gradients]
        return list(zip(gradients, agree_on_sparse(grads, name, self._batch.process_set), strict=True))

    def _begin_use(self) -> None:
        """In the first step after init() or join(): agree with ranks for which it is the first one."""
        if self._batch.is_in_use():
            return
        for gradient in self._known.values():
            gradient.is_sparse = None  # there may be ranks that do not know
        try:
            have_same_parameters = self._start_check.compare(self._start())
        except MismatchError:
            self._batch.end_use()  # a script that goes on gets the error in the next step, too
            raise
        if have_same_parameters:
            options = [numbers_among(group) for group in self._param_groups]
            self._update_check.begin_anew(options, self._content_of_state())
        self._compared_state = self._state
        if self._given_passes is None:
            self._passes = self._most_passes()
        if self._gradients:
            self._decide(list(self._gradients.values()))
            self._group()

    def _most_passes(self) -> int | None:
        """Returns how many backward passes the rank with most has had in this step; None if no rank had one."""
        own = max((gradient.passes for gradient in self._begun), default=0)
        of_ranks = torch.zeros(self._batch.process_set.size() or 1, dtype=torch.int64, device="cpu")
        of_ranks[self._batch.process_set.rank() or 0] = own
        name = self._batch.full_name("<passes>")
        of_ranks = ops.allreduce(of_ranks, op=ops.Sum, name=name, process_set=self._batch.process_set)
        return int(of_ranks.max()) or None

    def _content_of_state(self) -> bytes:
        """Returns bytes that depend on the whole state of the optimizer: that of its parameters, then all else."""
        parameters = self._names.of(self._param_groups)
        parts = [content_of(self._state.get(parameter, {}), content_of_leaf) for parameter in parameters]
        others = {key: value for key, value in self._state.items() if not torch.is_tensor(key)}
        return b"".join([*parts, content_of(others, content_of_leaf)])

    def _start(self) -> Start:
        """Before the first update, and before the first gradient is an average."""
        of_gradients = some_elements(self._grads())
        chosen = [group.get("initial_lr", group.get("lr")) for group in self._param_groups]  # before any schedule
        is_default_lr = self._default_lr and all(lr == self._default_lr[0] for lr in chosen)
        return Start(
            names=[gradient.name for gradient in self._gradients.values()],
            parameters=content_of([*self._names.of(self._param_groups)], content_of_leaf),  # frozen ones as well
            gradients=of_gradients if any(of_gradients) else b"",
            unused=[gradient.name for parameter, gradient in self._gradients.items() if parameter.grad is None],
            default_lr=self._default_lr if is_default_lr else None,
        )

    def _average_over(self, contributors: int) -> None:
        """Make averages over all ranks those over some: the others had contributed zeros."""
        size = self._batch.process_set.size()
        if self._batch.op == ops.Average and self._batch.weight is None and size and contributors < size:
            torch._foreach_mul_(self._grads(), size / contributors)

    def _make_zeros(self, without: list[Gradient]) -> None:
        for gradient in without:
            make = empty_sparse if gradient.is_sparse else torch.zeros_like
            gradient.parameter.grad = make(gradient.parameter.detach(), dtype=gradient.dtype)
        never_had = [gradient.name for gradient in without if gradient.seen is None]
        if never_had and not self._has_warned:
            self._has_warned = True
            names = _listed(never_had)
            warn(
                f"backward() gave no gradient to {names}; this rank contributes zeros. If that is meant to be so on "
                "all ranks, requires_grad_(False) saves the way. This is said once."
            )

    def _submit(self, gradient: Gradient, grad: torch.Tensor) -> None:
        if self._finite_check is not None and self._batch.weight != 0:
            self._finite_check.look_at(gradient.name, grad)
        if grad.requires_grad:  # the graph of a pass in no_sync keeps its values
            grad = grad.detach().clone()
        if gradient.is_sparse and not self._sparse_as_dense:
            self._submit_sparse(gradient, grad if grad.is_sparse else grad.to_sparse(1))
            return
        if grad.is_sparse:
            grad = coalesced(grad).to_dense()
        if self._shared is not None and grad.is_cpu:
            grad = self._shared.take(gradient.parameter, grad)
        if grad.is_complex():
            grad = grad.resolve_conj()
        dense = grad if grad.is_contiguous() else in_memory_order(grad)
        if dense is None:
            dense = grad = grad.contiguous()
        self._put(gradient, grad)
        self._batch.ready(gradient.name, as_real(dense) if dense.is_complex() else dense, gradient.priority)

    def _submit_sparse(self, gradient: Gradient, grad: torch.Tensor) -> None:
        if self._batch.has_group(gradient.name):
            raise ValueError(
                f'the gradient of "{gradient.name}" is sparse and cannot be in a group; use sparse_as_dense=True'
            )
        if self._batch.weight is not None:
            raise ValueError(f'the gradient of "{gradient.name}" is sparse and has no weight; use sparse_as_dense=True')
        self._put(gradient, grad)
        handle = sparse_allreduce_async(
            grad, self._batch.full_name(gradient.name), self._batch.op, self._batch.process_set
        )
        self._sparse.append((gradient, handle))

    def _put(self, gradient: Gradient, grad: torch.Tensor) -> None:
        """Store the gradient in its parameter, and remember it to notice a change that is too early."""
        if grad is not gradient.parameter.grad:
            gradient.parameter.grad = grad
        gradient.is_submitted = True
        gradient.dtype = grad.dtype
        gradient.seen = grad
        gradient.version = grad._version

    def _make_sparse_again(self) -> None:
        """Make sparse gradients that were reduced as dense ones sparse again: the optimizer may take no others."""
        if self._sparse_as_dense:
            for gradient in self._all():
                grad = gradient.parameter.grad
                if gradient.is_sparse and grad is not None:
                    gradient.parameter.grad = grad.to_sparse(1)


def _set_hook(reduction: GradientHooks, gradient: Gradient) -> None:
    """Register the hook of a parameter, instead of an earlier one. The hook does not keep the reduction alive."""
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


def _listed(names: list[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
