"""Wrap any optimizer so that it updates with the averages of the gradients over the ranks."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ringtrain import ops
from ringtrain.engine.compression import Compression, GradientCompression
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.requirements import require_passes
from ringtrain.job import session
from ringtrain.record import steps
from ringtrain.training.gradient_batch import GradientBatch
from ringtrain.training.power_sgd import PowerSGDGradients
from ringtrain.training.replicas import (
    FiniteCheck,
    Start,
    StartCheck,
    all_elements,
    check_replicas,
    default_lr_of,
    some_elements,
)
from ringtrain.training.update_check import UpdateCheck, bytes_of_number, content_of, numbers_among


class _Accumulator:
    """Sums the gradients of several backward passes. One sum for each tuple of names that are added together."""

    def __init__(self, passes: int) -> None:
        self._passes = passes
        self._sums: dict[tuple[str, ...], tuple[int, list[Any]]] = {}

    def forget(self) -> None:
        self._sums.clear()

    def add(self, names: Sequence[str], gradients: list[Any]) -> list[Any] | None:
        """Return the sums on the last pass, None before it. The sums are new arrays if there are several passes."""
        if self._passes == 1:
            return gradients
        key = tuple(names)
        passes, sums = self._sums.pop(key, (0, []))
        if not sums:
            sums = [gradient.copy() for gradient in gradients]
        else:
            for position, gradient in enumerate(gradients):
                sums[position] += gradient
        if passes + 1 == self._passes:
            return sums
        self._sums[key] = (passes + 1, sums)
        return None


_optimizers: weakref.WeakSet[DistributedOptimizer] = weakref.WeakSet()


class DistributedOptimizer:
    """An optimizer that averages the gradients over the ranks before each update of the optimizer that it wraps.

    The wrapped one has MXNet's `update(index, weight, grad, state)` (and maybe `update_multi_precision`), whose
    arguments may be lists, or `step(params, grads)`. All its other attributes are read and set through the wrapper.
    `update` leaves the averages in the gradients; `step` does so where these can be written. With several backward
    passes per step the gradients stay as they are.

    Args:
        optimizer: the optimizer to wrap.
        named_parameters: (name, parameter) pairs, or a dict, in the order of the parameters; the names replace the
            indices in errors and the timeline.
        compression: how gradients travel, such as Compression.fp16, or Compression.powersgd(rank=4).
        backward_passes_per_step: update only at every n-th call, with the sum of the gradients of n calls.
        op: Average, Sum, ...
        gradient_predivide_factor: f divides by f before the sum and multiplies by f / size after it, which keeps
            low-precision sums in range; for Average only.
        num_groups: older spelling of `groups`, which wins where both are given.
        groups: reduce the gradients in that many groups, each all at once; or lists of the names or indices of the
            gradients that form a group. 0 or None: as they come.
        average_aggregated_gradients: divide by backward_passes_per_step too. Off, as in Horovod.
        process_set: the ranks that take part; the others update with their own gradients.
        check_every: compare the parameters of all ranks after every n-th `step`, see `check_replicas`; 0 never. For
            optimizers with `step`.
        nan_check: look for NaN and infinity in every gradient before it is sent; raises NonFiniteError on all ranks,
            and nothing is updated.

    Raises:
        TypeError: optimizer has none of the methods.
        ValueError: the optimizer is one of DiLoCo; an argument is out of its range, or names are repeated or unknown.

    Examples:
        >>> from ringtrain import optim
        >>> optimizer = hvd.DistributedOptimizer(optim.SGD(lr=0.5))
        >>> weights, gradients = [np.ones(2)], [np.full(2, float(hvd.rank()))]
        >>> optimizer.step(weights, gradients)  # on two ranks: the average of the gradients is 0.5
        >>> weights[0].tolist()
        [0.75, 0.75]
    """

    _optimizer: Any
    _names: list[str]
    _groups: int | list[list[str]]
    _accumulator: _Accumulator
    _process_set: ProcessSet
    _batch: GradientBatch
    _check_every: int
    _finite_check: FiniteCheck | None
    _start_check: StartCheck
    _update_check: UpdateCheck
    _last_states: Any
    _steps: int

    def __init__(
        self,
        optimizer: Any,
        named_parameters: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        compression: GradientCompression = Compression.none,
        backward_passes_per_step: int = 1,
        op: Any = ops.Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[str | int]] | None = None,
        average_aggregated_gradients: bool = False,
        process_set: ProcessSet = global_process_set,
        check_every: int = 0,
        nan_check: bool = False,
    ) -> None:
        _check_is_optimizer(optimizer)
        if check_every < 0 or (check_every and not hasattr(optimizer, "step")):
            raise ValueError(f"check_every must not be negative, and needs step(params, grads), but is {check_every}")
        require_passes(backward_passes_per_step)
        names = _names_of(named_parameters)
        batch = GradientBatch(
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            scale=1.0 / backward_passes_per_step if average_aggregated_gradients else 1.0,
            process_set=process_set,
        )
        checked_groups = _checked_groups(num_groups, groups, names)
        if checked_groups:
            batch.require_groups()
        # Straight into __dict__: an assignment would reach for the wrapped optimizer, see __setattr__.
        vars(self).update(
            _optimizer=optimizer,
            _names=names,
            _groups=checked_groups,
            _accumulator=_Accumulator(backward_passes_per_step),
            _process_set=process_set,
            _batch=batch,
            _check_every=check_every,
            _finite_check=FiniteCheck(process_set, batch.full_name) if nan_check else None,
            _start_check=StartCheck(process_set, batch.full_name),
            _update_check=UpdateCheck(
                process_set,
                batch.full_name,
                "optimizer.load_state_dict(hvd.broadcast_object(optimizer.state_dict(), root_rank=0))",
            ),
            _last_states=None,
            _steps=0,
        )
        _optimizers.add(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN_ATTRIBUTES:
            # copy and pickle ask for these before the wrapper has its attributes.
            raise AttributeError(name)
        power_sgd = self._batch.power_sgd
        if power_sgd is not None and name in _STATE_METHODS and hasattr(self._optimizer, "state_dict"):
            return getattr(_StateWithPowerSGD(self._optimizer, power_sgd), name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_ATTRIBUTES:
            vars(self)[name] = value
        else:
            setattr(self._optimizer, name, value)

    def set_weight(self, weight: float | None) -> None:
        """Weigh the gradients of this rank from the next update on, until the next call: give its number of samples.

        The averages are then sum(weight * gradient) / sum(weight) over the ranks, so with gradients of mean losses they
        are those of the mean over all samples. All ranks call it before the same update; 0 leaves the gradients of a
        rank out. None weighs all ranks the same again. With backward_passes_per_step it is for the sum of the passes.

        Raises:
            ValueError: without op=Average, or the weight is negative, NaN or infinite. TypeError: not a number.
        """
        self._batch.set_weight(weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average grad over the ranks, in place, and update weight; lists as in MXNet."""
        self._reduce_and_update(self._optimizer.update, index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As `update`, for weights in low precision with a state that holds them in float32."""
        self._reduce_and_update(self._optimizer.update_multi_precision, index, weight, grad, state)

    def step(self, params: Sequence[Any], grads: Sequence[Any]) -> Any:
        """Average grads over the ranks and update params; returns what the wrapped `step` returns.

        Raises:
            ValueError: another number of parameters than of gradients or of names.
            NonFiniteError, ReplicaError: see nan_check and check_every.
        """
        if len(params) != len(grads):
            raise ValueError(f"step: {len(params)} parameters but {len(grads)} gradients")
        if self._names and len(params) != len(self._names):
            raise ValueError(f"step: {len(params)} parameters, but named_parameters names {len(self._names)}")
        # The sum over a whole array is a NumPy scalar, no array.
        arrays = [np.asarray(gradient) if isinstance(gradient, np.generic) else gradient for gradient in grads]
        in_place = [_is_writable(gradient) for gradient in arrays]
        averages = self._reduce(range(len(arrays)), arrays, in_place, params)
        if averages is None:
            return None
        result = self._optimizer.step(params, averages)
        self._steps += 1
        self._last_states = self._states_of_wrapped()
        if self._check_every and self._steps % self._check_every == 0 and self._process_set.included():
            is_new = isinstance(result, (list, tuple)) and len(result) == len(params)
            names = [_name_of(place, self._names) for place in range(len(params))]
            check_replicas(dict(zip(names, result if is_new else params, strict=True)), self._process_set)
        return result

    def _reduce_and_update(self, update: Callable[..., None], index: Any, weight: Any, grad: Any, state: Any) -> None:
        is_list = isinstance(index, (list, tuple))
        indices, gradients = (list(index), list(grad)) if is_list else ([index], [grad])
        if len(indices) != len(gradients):
            raise ValueError(f"update: {len(indices)} indices but {len(gradients)} gradients")
        averages = self._reduce(indices, gradients, in_place=[True] * len(gradients))
        if averages is not None:
            update(index, weight, averages if is_list else averages[0], state)

    def _reduce(
        self, indices: Sequence[Any], gradients: list[Any], in_place: list[bool], params: Sequence[Any] | None = None
    ) -> list[Any] | None:
        """Return the averages, or None if more backward passes will follow. `params` are all parameters, if known."""
        names = [_name_of(index, self._names) for index in indices]
        summed = self._accumulator.add(names, gradients)
        if summed is None:
            return None
        steps.begin()
        has_replicas = params is not None and self._process_set.included() and self._process_set.size() != 1
        if params is not None and has_replicas:
            self._begin_comparison(names, params, summed)
        if self._finite_check is not None and self._batch.weight != 0:
            for name, gradient in zip(names, summed, strict=True):
                self._finite_check.look_at(name, gradient)
        try:
            averages = self._average(names, indices, summed, in_place)
        except BaseException:
            self._update_check.settle()
            raise
        if has_replicas:
            self._update_check.wait(self._content_of_state)
        if self._finite_check is not None:
            self._finite_check.agree()
        return averages

    def _begin_comparison(self, names: Sequence[str], params: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Compares what decides the next update, beside the gradients."""
        public = {name: value for name, value in vars(self._optimizer).items() if not name.startswith("_")}
        options = [numbers_among(public)]
        if not self._batch.is_in_use() and self._have_same_start(names, params, gradients):
            self._update_check.begin_anew(options, self._content_of_state())
        is_loaded = self._steps > 0 and self._states_of_wrapped() is not self._last_states
        self._update_check.submit(options, is_loaded)

    def _states_of_wrapped(self) -> Any:
        """Returns the states of an optimizer of ringtrain.optim, which load_state_dict() replaces; None for others."""
        return getattr(self._optimizer, "_states", None)

    def _content_of_state(self) -> bytes:
        state_dict = getattr(self._optimizer, "state_dict", None)
        if state_dict is None:
            return b""
        parts = (part for name, part in state_dict().items() if name != "hyperparameters")
        return b"".join(content_of(part, _content_of_leaf) for part in parts)

    def _have_same_start(self, names: Sequence[str], params: Sequence[Any], gradients: Sequence[Any]) -> bool:
        """Before the first update, and before the first gradient is an average."""
        default_lr = default_lr_of(self._optimizer) if self._batch.op == ops.Average else None
        # The ranks match gradients by name, so they may have them in different orders.
        places = sorted(range(len(names)), key=names.__getitem__)
        of_gradients = some_elements([gradients[place] for place in places])
        return self._start_check.compare(
            Start(
                names=[names[place] for place in places],
                parameters=all_elements([params[place] for place in places]),
                gradients=of_gradients if any(of_gradients) else b"",
                default_lr=default_lr if default_lr and default_lr[0] == getattr(self._optimizer, "lr", None) else None,
                broadcast_of="params",
                part_of_data="data[hvd.rank() :: hvd.size()]",
            )
        )

    def _average(
        self, names: list[str], indices: Sequence[Any], gradients: list[Any], in_place: list[bool]
    ) -> list[Any]:
        if not self._process_set.included():
            return gradients
        self._batch.group(_groups_among(names, self._groups))
        # Early parameters first: the next forward pass starts with them.
        priorities = [-index if isinstance(index, int) else -position for position, index in enumerate(indices)]
        return self._batch.reduce(names, gradients, priorities, in_place)


_OWN_ATTRIBUTES = tuple(DistributedOptimizer.__annotations__)


class _StateWithPowerSGD:
    """The state of the wrapped optimizer, and with it what PowerSGD keeps of each gradient, under "powersgd"."""

    def __init__(self, optimizer: Any, power_sgd: PowerSGDGradients) -> None:
        self._optimizer = optimizer
        self._power_sgd = power_sgd

    def state_dict(self) -> dict[str, Any]:
        return {**self._optimizer.state_dict(), "powersgd": self._power_sgd.state_dict()}

    def replicated_state_dict(self) -> dict[str, Any]:
        """Returns the part that is the same on all ranks."""
        return {**self._optimizer.state_dict(), "powersgd": self._power_sgd.state_dict(with_errors=False)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues; begins anew with the factors if the state has none."""
        if "powersgd" in state_dict:
            self._power_sgd.load_state_dict(state_dict["powersgd"])
        else:
            self._power_sgd.forget()
        self._optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != "powersgd"})


def _content_of_leaf(leaf: Any) -> bytes:
    return all_elements([leaf]) if hasattr(leaf, "shape") else bytes_of_number(leaf)


_STATE_METHODS = ("state_dict", "replicated_state_dict", "load_state_dict")


def _is_writable(array: Any) -> bool:
    """Whether it is a NumPy or CuPy array that may be overwritten; CuPy's cannot be made read-only."""
    return hasattr(array, "flags") and getattr(array.flags, "writeable", True)


def _check_is_optimizer(optimizer: Any) -> None:
    if hasattr(optimizer, "param_groups"):
        raise TypeError("this is a torch optimizer; wrap it with DistributedOptimizer of ringtrain.torch")
    if hasattr(type(optimizer), "outer_step"):
        raise ValueError("this optimizer is of DiLoCo, which averages the gradients inside its islands itself")
    if not any(hasattr(optimizer, method) for method in ("update", "update_multi_precision", "step")):
        raise TypeError(
            f"{type(optimizer).__name__} is not an optimizer: it has neither update(index, weight, grad, state) "
            "nor step(params, grads)"
        )


def _names_of(named_parameters: Mapping[str, Any] | Iterable[tuple[str, Any]] | None) -> list[str]:
    if named_parameters is None:
        return []
    pairs = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    names = [name for name, _ in pairs]
    check_names(names)
    return names


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError for a repeated name of named_parameters."""
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"named_parameters has more than one parameter named {', '.join(map(str, repeated))}")


def _name_of(index: Any, names: list[str]) -> str:
    if not names or not isinstance(index, int):
        return str(index)
    if not 0 <= index < len(names):
        raise ValueError(f"there is no parameter {index}: named_parameters names {len(names)}")
    return names[index]


def _checked_groups(
    num_groups: int, groups: int | Sequence[Sequence[str | int]] | None, names: list[str]
) -> int | list[list[str]]:
    """Return the number of groups, or the names of the members of each."""
    if num_groups < 0:
        raise ValueError(f"num_groups must not be negative, but is {num_groups}")
    if groups is None:
        return num_groups
    if isinstance(groups, int):
        check_number_of_groups(groups)
        return groups
    members = [[_name_of(member, names) for member in group] for group in groups]
    counts = collections.Counter(name for group in members for name in group)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(f"groups: {', '.join(repeated)} must be in one group only")
    unknown = [name for name in counts if names and name not in names]
    if unknown:
        raise ValueError(f"groups: named_parameters has no {', '.join(unknown)}")
    return members


def check_number_of_groups(groups: int) -> None:
    """Raises ValueError for a negative number."""
    if groups < 0:
        raise ValueError(f"groups must not be negative, but is {groups}")


def _groups_among(names: list[str], groups: int | list[list[str]]) -> list[list[str]]:
    """Return the groups of the gradients of one call."""
    if isinstance(groups, int):
        return split_evenly(names, groups) if groups else []
    present = set(names)
    return [[name for name in group if name in present] for group in groups]


def split_evenly(items: Sequence[Any], parts: int) -> list[Any]:
    """Split into consecutive parts whose lengths differ by at most one, the longer ones first."""
    shorter, longer_parts = divmod(len(items), parts)
    starts = [part * shorter + min(part, longer_parts) for part in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(starts)]


def _begin_anew() -> None:
    """At the end of a generation: the ranks of the next one may have taken other steps until now."""
    for optimizer in list(_optimizers):
        optimizer._accumulator.forget()
        optimizer._update_check.forget()
        optimizer._steps = 0


session.at_shutdown(_begin_anew)
