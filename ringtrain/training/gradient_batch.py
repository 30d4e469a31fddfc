"""Averages many gradients over the ranks at the same time, for every DistributedOptimizer."""

from __future__ import annotations

import collections
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import ringtrain._core as _core
from ringtrain import ops
from ringtrain._core import OpKind
from ringtrain.arrays.adapter import adapter_for
from ringtrain.engine.compression import Compression, GradientCompression, PowerSGD
from ringtrain.engine.handles import Handle, current_point, report_failure
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.requirements import require_predivide_factor, require_process_set, require_weight
from ringtrain.engine.submission import Operation, Prepared, PreparedAllreduces, Reduction, start
from ringtrain.errors import StepOrderError
from ringtrain.job import session
from ringtrain.ops.exchanges import after_join
from ringtrain.training.power_sgd import Factors, PowerSGDGradients


class _Numbers:
    """Counts the batches of one process set that are in use, until the ranks begin anew.

    They do so after init(), as a rank that is new to the job does, and after join(), as a rank that had nothing to do.
    """

    def __init__(self, are_valid: bool = True) -> None:
        self.taken = 0
        self.are_valid = are_valid


_numbers: dict[tuple[int, ...], _Numbers] = collections.defaultdict(_Numbers)  # by the ranks of the process set


def _begin_anew(process_set: ProcessSet) -> None:
    """Begins anew with all ranks of the process set, and with those of any other if it is the global one."""
    is_of_all = process_set is global_process_set
    for ranks in list(_numbers) if is_of_all else [tuple(process_set.ranks or ())]:
        if ranks in _numbers:
            _numbers.pop(ranks).are_valid = False


_batches: weakref.WeakSet[GradientBatch] = weakref.WeakSet()


def _forget_what_is_under_way() -> None:
    """At the end of a generation, whose operations have ended with it."""
    for batch in list(_batches):
        batch.forget()


session.at_shutdown(_forget_what_is_under_way)
session.at_init(lambda _settings: _begin_anew(global_process_set))
after_join(_begin_anew)


class _Gradient(NamedTuple):
    name: str
    array: Any
    priority: int
    in_place: bool
    made: _core.GpuPoint | None  # when its values are ready, on a GPU


class _Queued(NamedTuple):
    """A gradient that waits for the others of its step; `factors` is None if it travels whole."""

    gradient: _Gradient
    factors: Factors | None


# Gradients of up to so many elements wait for the factors with PowerSGD: each message of its own is a round trip.
_FEW_ELEMENTS = 1 << 16

_InFlight = tuple[Handle[Any] | Prepared, str | list[_Gradient]]  # of one name, or of a group


class GradientBatch:
    """Averages many named gradients at the same time: `ready` submits each one as soon as it is known, `wait` ends all.

    Called by one thread at a time, not always the same: autograd threads
    call `ready`, the training loop calls `wait`.

    Args:
        prefix: put before all names; None numbers the batches of a process set in the order in which they are first
            used, which therefore must be the same on all its ranks. A batch that is never used has
            no number, so some ranks may have more of them.
        compression: how gradients travel, such as Compression.fp16.
        op: ops.Average, ops.Sum, ...
        gradient_predivide_factor: f divides by f before the sum and multiplies by f / size after it; for Average only.
        scale: multiplied into the result.
        process_set: the ranks that take part.

    Raises:
        ValueError: a gradient_predivide_factor that is not positive, or one other than 1 without Average; PowerSGD
            without Average or Sum.
    """

    def __init__(
        self,
        prefix: str | None = None,
        compression: GradientCompression = Compression.none,
        op: Any = ops.Average,
        gradient_predivide_factor: float = 1.0,
        scale: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        require_process_set(process_set, "DistributedOptimizer")
        gradient_predivide_factor = require_predivide_factor(gradient_predivide_factor)
        if gradient_predivide_factor != 1 and op != ops.Average:
            raise ValueError("gradient_predivide_factor splits the division of an average, so it needs op=Average")
        self.power_sgd: PowerSGDGradients | None = None
        if isinstance(compression, PowerSGD):
            if op not in (ops.Average, ops.Sum):
                raise ValueError(f"{compression!r} needs op=Average or op=Sum, not {op}")
            self.power_sgd = PowerSGDGradients(compression)
            compression = Compression.none
        self._queued: list[_Queued] = []
        self.op = op
        self.process_set = process_set
        self._given_prefix = prefix
        self._prefix = ""
        self._numbers = _Numbers(are_valid=False)  # while they are valid, `_prefix` is
        self.weight: float | None = None  # of this rank, in the averages
        self._how = (op, None, 1.0 / gradient_predivide_factor, gradient_predivide_factor * scale, compression)
        self._reduction = Reduction.of(*self._how)
        self._group_of: dict[str, tuple[str, ...]] = {}
        self._tensors = PreparedAllreduces(prepares_new=True)  # of gradients in no group
        self._gathered: dict[tuple[str, ...], dict[str, _Gradient]] = {}
        self._in_flight: list[_InFlight] = []
        _batches.add(self)

    def set_weight(self, weight: Any) -> None:
        """Weigh the gradients of this rank from now on, until the next call; None weighs those of all ranks the same.

        Raises:
            StepOrderError: gradients are on their way.
            ValueError: without op=Average, or the weight is negative, NaN or infinite. TypeError: not a number.
        """
        if self._in_flight or self._gathered or self._queued:
            raise StepOrderError(
                "set_weight() while the gradients are being averaged: call it before backward(), or after step()"
            )
        self.weight = None if weight is None else require_weight(weight, self.op, "DistributedOptimizer")
        self._reduction = self._reduction._replace(weight=self.weight)

    def forget(self) -> None:
        """Forget the gradients that are ready, since a rank was lost."""
        self._gathered, self._in_flight, self._queued = {}, [], []

    def is_in_use(self) -> bool:
        """Whether it was used since the ranks have begun anew, by init() or by join()."""
        return self._numbers.are_valid

    def end_use(self) -> None:
        """The next use is a first one again."""
        self._numbers = _Numbers(are_valid=False)

    def _begin_use(self) -> None:
        # Counted per process set: a rank that is in other sets too uses more batches than its peers.
        self._numbers = numbers = _numbers[tuple(self.process_set.ranks or ())]
        self._prefix = f"gradients{numbers.taken}" if self._given_prefix is None else self._given_prefix
        self._tensors = PreparedAllreduces(f"{self._prefix}.", prepares_new=True)
        numbers.taken += self._given_prefix is None

    def group(self, groups: Iterable[Iterable[str]]) -> None:
        """Reduces the gradients of each group of names together, once the last of them is ready.

        A gradient that waits for the others of an earlier group moves to its new one.

        Raises ValueError with PowerSGD.
        """
        groups = list(groups)
        if groups:
            self.require_groups()
        self._tensors.known.clear()
        self._group_of = {name: names for names in map(tuple, groups) if len(names) > 1 for name in names}
        waiting, self._gathered = self._gathered, {}
        for gathered in waiting.values():
            for gradient in gathered.values():
                _let_current_stream_wait(gradient)
                self.ready(gradient.name, gradient.array, gradient.priority, gradient.in_place)

    def require_groups(self) -> None:
        """Raises ValueError with PowerSGD."""
        if self.power_sgd is not None:
            raise ValueError("groups are not for Compression.powersgd, whose factors are joined as they come")

    def has_group(self, name: str) -> bool:
        """Whether the gradient is reduced together with others."""
        return name in self._group_of

    def full_name(self, name: str) -> str:
        """Returns the name by which the ranks match the gradient."""
        if not self._numbers.are_valid:
            self._begin_use()
        return f"{self._prefix}.{name}"

    def ready(self, name: str, gradient: Any, priority: int = 0, in_place: bool = True) -> None:
        """Submit a gradient, or keep it until its group is complete. Leave it alone until `wait` has returned.

        Args:
            name: the same on all ranks; once between two calls of `wait`.
            gradient: an array of the same dtype and shape on all ranks.
            priority: what is higher is reduced first.
            in_place: overwrite gradient with the average; otherwise only `wait` hands it out, in a new array.
        """
        if self.power_sgd is not None:
            factors = self.power_sgd.take(name, gradient, self.weight)
            if factors is not None or math.prod(gradient.shape) <= _FEW_ELEMENTS:
                made = current_point(adapter_for(gradient), gradient)
                self._queued.append(_Queued(_Gradient(name, gradient, priority, in_place, made), factors))
                return
        if in_place and self.ready_again(name, gradient, priority):
            return
        if name in self._group_of:
            made = current_point(adapter_for(gradient), gradient)
            self._gather(self._group_of[name], _Gradient(name, gradient, priority, in_place, made))
            return
        if not in_place:
            self._in_flight.append((self._start(gradient, self.full_name(name), priority, False), name))
            return
        if not self._numbers.are_valid:
            self._begin_use()
        key = name, *self._how, self.process_set, priority
        self._in_flight.append((self._tensors.submit(gradient, key, self.weight), name))

    def ready_again(self, name: str, gradient: Any, priority: int = 0) -> bool:
        """As `ready`, in place, of a gradient that was ready before and has changed only its values and address.

        Returns False, and does nothing, for any other gradient. Called for every gradient in every step. With PowerSGD
        only `ready` knows which gradients travel whole.
        """
        prepared = self._tensors.known.get(name)
        if not isinstance(prepared, Prepared) or not self._numbers.are_valid:
            return False
        if not prepared.is_repeated_with(self.process_set.process_set_id, priority, self.weight):
            return False
        try:
            if not prepared.begin(gradient, False, "", None):
                return False
        except Exception as error:
            report_failure(error)
            raise
        self._in_flight.append((prepared, name))
        return True

    def wait(self) -> dict[str, Any]:
        """Wait for all that is submitted and return the averages by name.

        Raises:
            RuntimeError: a group is incomplete; the message says what is missing.
            RingtrainError: the first failure, after all the others have ended too, so that the names are free again.
        """
        for group, gathered in self._gathered.items():
            missing = [name for name in group if name not in gathered]
            raise RuntimeError(f"the gradients {list(gathered)} wait for {missing} of the same group, never made ready")
        in_flight, self._in_flight = self._in_flight, []
        if self._queued:
            return self._wait_for_factors(in_flight)
        averages, error = _end(in_flight)
        if error is not None:
            raise error
        return averages

    def _wait_for_factors(self, in_flight: list[_InFlight]) -> dict[str, Any]:
        """Submits what is queued, waits for it and for what is in flight, and returns the averages."""
        queued, self._queued = self._queued, []
        factored = [(one.gradient, one.factors) for one in queued if one.factors is not None]
        whole = [one.gradient for one in queued if one.factors is None]
        firsts = [of._replace(array=factors.first, in_place=True) for of, factors in factored]
        of_firsts, error = _end(self._submit_joined([*firsts, *whole]))
        second_names = {of.name: factors.name_of_second for of, factors in factored}
        seconds: list[_InFlight] = []
        if error is None:
            arrays = [factors.second(of_firsts[of.name]) for of, factors in factored]
            seconds = self._submit_joined(
                [
                    of._replace(name=second_names[of.name], array=array, in_place=True)
                    for (of, _), array in zip(factored, arrays, strict=True)
                ]
            )
            for _, factors in factored:
                factors.compute_error()  # while the others travel
        averages, error_of_whole = _end(in_flight)
        of_seconds, error_of_seconds = _end(seconds)
        error = error or error_of_whole or error_of_seconds
        if error is not None:
            raise error
        averages.update((of.name, of_firsts[of.name]) for of in whole)
        for of, factors in factored:
            adapter = adapter_for(of.array)
            averages[of.name] = target = of.array if of.in_place else adapter.empty_like(of.array)
            adapter.assign(target, factors.result(of_seconds[second_names[of.name]]).reshape(of.array.shape))
        return averages

    def _submit_joined(self, gradients: list[_Gradient]) -> list[_InFlight]:
        """Submits all in one group for each dtype and place; ranks may have them in another order."""
        alike: dict[tuple[str, int], list[_Gradient]] = {}
        for gradient in sorted(gradients, key=lambda one: one.name):
            adapter = adapter_for(gradient.array)
            kind = adapter.dtype_name(gradient.array), adapter.device(gradient.array)
            alike.setdefault(kind, []).append(gradient)
        return [self._submit_group(group) for group in alike.values()]

    def reduce(
        self, names: Sequence[str], gradients: Sequence[Any], priorities: Sequence[int], in_place: Sequence[bool]
    ) -> list[Any]:
        """Make all gradients ready and wait; return the averages in the same order."""
        for name, gradient, priority, overwrite in zip(names, gradients, priorities, in_place, strict=True):
            self.ready(name, gradient, priority, overwrite)
        averages = self.wait()
        return [averages[name] for name in names]

    def _gather(self, group: tuple[str, ...], gradient: _Gradient) -> None:
        gathered = self._gathered.setdefault(group, {})
        gathered[gradient.name] = gradient
        if len(gathered) == len(group):
            del self._gathered[group]
            self._in_flight.append(self._submit_group([gathered[member] for member in group]))

    def _submit_group(self, gradients: list[_Gradient]) -> _InFlight:
        for gradient in gradients:
            _let_current_stream_wait(gradient)
        is_in_place = all(gradient.in_place for gradient in gradients)
        arrays = [gradient.array for gradient in gradients]
        name = self.full_name(f"{gradients[0].name}:{gradients[-1].name}")
        priority = max(gradient.priority for gradient in gradients)
        return self._start(arrays, name, priority, is_in_place), gradients

    def _start(self, arrays: Any, name: str, priority: int, in_place: bool) -> Handle[Any]:
        is_group = isinstance(arrays, list)
        return start(
            Operation(
                OpKind.ALLREDUCE,
                arrays if is_group else [arrays],
                name,
                self.process_set,
                self._reduction,
                priority=priority,
                is_group=is_group,
                in_place=in_place,
            )
        )


def _end(in_flight: Sequence[_InFlight]) -> tuple[dict[str, Any], Exception | None]:
    """Waits for all, and returns the averages by name and the first error."""
    averages: dict[str, Any] = {}
    first_error = None
    for handle, of in in_flight:
        try:
            output = handle.wait()
        except Exception as error:
            first_error = first_error or error
        else:
            if isinstance(of, list):
                averages.update(_averages(of, output))
            else:
                averages[of] = output
    return averages, first_error


def _let_current_stream_wait(gradient: _Gradient) -> None:
    """Waits for the gradient, which another stream may have made: an operation follows the current stream alone."""
    if gradient.made is None:
        return
    stream = adapter_for(gradient.array).stream(gradient.array)
    if stream is not None:
        gradient.made.follow(stream)


def _averages(gradients: list[_Gradient], outputs: list[Any]) -> dict[str, Any]:
    """The averages of a group by name."""
    averages = {}
    for gradient, average in zip(gradients, outputs, strict=True):
        if gradient.in_place and average is not gradient.array:
            # It was in a group with one that cannot be overwritten.
            gradient.array[...] = average
        averages[gradient.name] = gradient.array if gradient.in_place else average
    return averages
