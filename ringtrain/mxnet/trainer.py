"""`DistributedOptimizer` for Module and `DistributedTrainer` for Gluon: they average gradients before the update.

Mirrors both of horovod.mxnet (horovod/mxnet/__init__.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mxnet
import numpy as np

from ringtrain import ops
from ringtrain._core import OpKind
from ringtrain.arrays.numpy import sum_rows
from ringtrain.engine.compression import Compression, GradientCompression, PowerSGD, QuantizingCompressor
from ringtrain.engine.handles import synchronize
from ringtrain.engine.process_sets import ProcessSet, global_process_set
from ringtrain.engine.requirements import require_weight
from ringtrain.errors import NonFiniteError
from ringtrain.failure import warn
from ringtrain.job import session
from ringtrain.mxnet.engine import averaging, push, raise_failure, takes
from ringtrain.mxnet.fresh_gradients import FreshGradients
from ringtrain.mxnet.library import forwarded
from ringtrain.ops.exchanges import after_join
from ringtrain.record import steps
from ringtrain.training.gradient_batch import GradientBatch
from ringtrain.training.optimizer import split_evenly
from ringtrain.training.replicas import Start, StartCheck, check_replicas, some_elements


class Gradient(NamedTuple):
    """`array` is on this rank, and becomes the average."""

    name: str
    array: Any
    priority: int


class Averaging:
    """How the gradients of one optimizer become averages over the ranks, in place.

    Args:
        gradient_predivide_factor: f divides by f before the sum and multiplies by f / size after it.
        num_groups: reduce in that many groups, each all at once; 0 leaves that to the core.
        compression: how gradients travel, such as Compression.fp16, or Compression.powersgd(rank=4).
        sparse_as_dense: reduce row_sparse gradients as dense ones.
        process_set: the ranks that take part; the others keep their own gradients.

    Raises:
        ValueError: a factor that is not positive, or a negative number of groups; groups with PowerSGD.
    """

    def __init__(
        self,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        compression: GradientCompression = Compression.none,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if num_groups < 0:
            raise ValueError(f"num_groups must not be negative, but is {num_groups}")
        self._reduction = averaging(gradient_predivide_factor)
        self._num_groups = num_groups
        self._factored: GradientBatch | None = None
        if isinstance(compression, PowerSGD):
            self._factored = GradientBatch("powersgd", compression, process_set=process_set)
            if num_groups:
                self._factored.require_groups()
            compression = Compression.none
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set

    def set_weight(self, weight: Any) -> None:
        """Weigh the gradients of this rank from now on; None: those of all ranks alike. Raises as `require_weight`."""
        if weight is not None:
            weight = require_weight(weight, self._reduction.op, "set_weight")
        if self._factored is not None:
            self._factored.set_weight(weight)
        self._reduction = self._reduction._replace(weight=weight)

    @property
    def is_weighted(self) -> bool:
        return self._reduction.weight is not None

    def average(self, gradients: Sequence[Gradient]) -> None:
        """Begin it for all of a step; reading a gradient waits.

        Raises RingtrainError where the engine has ended, as when another rank is lost.
        """
        raise_failure()
        if not self._process_set.included() or self._process_set.size() == 1:
            return
        dense = [one for one in gradients if one.array.stype == "default"]
        rows = [one for one in gradients if one.array.stype != "default"]
        if self._factored is not None:
            _average_as_factors(dense, self._factored)
        elif isinstance(self._compression, QuantizingCompressor) or not takes([one.array for one in dense]):
            self._wait_for_all(dense)
        elif self._num_groups:
            for group in _groups_of(dense, self._num_groups):
                self._push(f"{group[0].name}:{group[-1].name}", group)
        else:
            for one in dense:
                self._push(one.name, [one])
        for one in rows:
            self._average_rows(one)

    def _push(self, name: str, group: Sequence[Gradient]) -> None:
        sent = [self._compression.compress(one.array) for one in group]
        priority = max(one.priority for one in group)
        arrays = [array for array, _ in sent]
        push(OpKind.ALLREDUCE, (), arrays, name, self._process_set, priority, self._reduction)
        for one, (array, context) in zip(group, sent, strict=True):
            if array is not one.array:
                self._compression.decompress(array, context).copyto(one.array)

    def _wait_for_all(self, gradients: Sequence[Gradient]) -> None:
        how = self._reduction
        handles = [
            ops.allreduce_async_(
                *(one.array, None, one.name, how.op, how.prescale, how.postscale, self._process_set),
                compression=self._compression,
                priority=one.priority,
                weight=how.weight,
            )
            for one in gradients
        ]
        for handle in handles:
            synchronize(handle)

    def _average_rows(self, one: Gradient) -> None:
        if not self._sparse_as_dense:
            if self.is_weighted:
                raise ValueError(
                    f'the gradient of "{one.name}" is row_sparse and has no weight; use sparse_as_dense=True'
                )
            average_rows(one.array, one.name, self._process_set)
            return
        dense = one.array.tostype("default")
        if self._factored is not None:
            _average_as_factors([one._replace(array=dense)], self._factored)
        else:
            self._push(one.name, [one._replace(array=dense)])
        dense.tostype(one.array.stype).copyto(one.array)


def _average_as_factors(gradients: Sequence[Gradient], batch: GradientBatch) -> None:
    """Waits for the gradients, and averages copies of them in the memory of the host."""
    copies = [one.array.asnumpy() for one in gradients]
    for one, values in zip(gradients, copies, strict=True):
        batch.ready(one.name, values, one.priority)
    batch.wait()
    for one, values in zip(gradients, copies, strict=True):
        one.array[:] = values


def _groups_of(gradients: Sequence[Gradient], count: int) -> Iterator[list[Gradient]]:
    """As many as are wanted, with one dtype each, so that what is alike is joined."""
    for part in split_evenly(gradients, count):
        by_dtype: dict[Any, list[Gradient]] = {}
        for one in part:
            by_dtype.setdefault(one.array.dtype, []).append(one)
        yield from by_dtype.values()


def average_rows(gradient: Any, name: str, process_set: ProcessSet) -> None:
    """Make a row_sparse gradient that of all ranks: each row that some rank has is the average over all of them.

    Waits for the gradient, and for the other ranks. All of them get the same bits.
    """
    numbers = gradient.indices.asnumpy().astype(np.int64)
    rows = gradient.data.asnumpy()
    if not numbers.size:  # MXNet says that these have no dimensions
        rows = np.zeros((0, *gradient.shape[1:]), gradient.dtype)
    of_all = ops.allgather(numbers, f"{name}.indices", process_set)
    rows_of_all = ops.allgather(np.ascontiguousarray(rows), f"{name}.rows", process_set)
    merged, total = sum_rows(of_all, rows_of_all, 1 / (process_set.size() or 1))
    if merged.size:
        average = mxnet.nd.sparse.row_sparse_array(
            (total, merged), shape=gradient.shape, dtype=gradient.dtype, ctx=gradient.context
        )
    else:
        average = mxnet.nd.sparse.zeros("row_sparse", gradient.shape, ctx=gradient.context, dtype=gradient.dtype)
    average.copyto(gradient)


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
            raise TypeError(f"{type(optimizer).__qualname__} is not an mxnet.optimizer.Optimizer")
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

    @property
    def learning_rate(self) -> Any:
        return self._optimizer.learning_rate

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

    def set_weight(self, weight: float | None) -> None:
        """As `DistributedTrainer.set_weight`; the `rescale_grad` of the wrapped optimizer is to be 1."""
        self._averaging.set_weight(weight)


# Python finds the methods of the base class before it calls __getattr__.
for _name in (
    *("create_state", "create_state_multi_precision", "set_learning_rate", "set_lr_mult", "set_wd_mult"),
    *("set_lr_scale", "_set_current_context", "_update_count", "_get_lrs", "_get_lr", "_get_wds", "_get_wd"),
):
    setattr(DistributedOptimizer, _name, forwarded("_optimizer", _name))


class _Generation:
    """From one init() or join() to the next: trainers without a prefix are numbered as they are first used."""

    def __init__(self) -> None:
        self.trainers = 0


_generation = _Generation()


def _begin_anew() -> None:
    global _generation
    _generation = _Generation()


session.at_init(lambda _settings: _begin_anew())
after_join(lambda _process_set: _begin_anew())


class DistributedTrainer(mxnet.gluon.Trainer):  # type: ignore[misc]
    """As `gluon.Trainer`, with averages over the ranks for gradients: `step(batch)` takes the batch of this rank.

    Gradients are submitted by `step` and averaged as they are computed; MXNet's engine updates each parameter when its
    average is there, while the script goes on.

    Args:
        params: a ParameterDict, or a dict or list of parameters: the same on all ranks.
        optimizer: its name, or an optimizer.
        optimizer_params: with a name, its arguments.
        compression: how gradients travel, such as Compression.fp16, or Compression.powersgd(rank=4), whose state is in
            no file of `save_states`.
        gradient_predivide_factor: f divides by f before the sum and multiplies by f / size after it.
        prefix: of the names of the gradients; without one trainers are numbered as they are first used.
        num_groups: reduce the gradients in that many groups, each all at once.
        process_set: the ranks that take part; the others update with their own gradients.
        sparse_as_dense: reduce row_sparse gradients as dense ones; otherwise their rows are gathered.
        check_every: compare the parameters of all ranks after every n-th step, see `check_replicas`; 0 never.
        nan_check: have `step` wait for the averages, and raise NonFiniteError on all ranks, instead of updating, if one
            is NaN or infinite.

    Raises:
        ValueError: parameters on several contexts (a rank has one), or an argument that is out of its range.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        compression: GradientCompression = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        *,
        sparse_as_dense: bool = False,
        check_every: int = 0,
        nan_check: bool = False,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            optimizer = optimizer._optimizer
            warn("DistributedTrainer averages gradients itself: it takes the optimizer out of the DistributedOptimizer")
        if check_every < 0:
            raise ValueError(f"check_every must not be negative, but is {check_every}")
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        if len(self._contexts) > 1:
            raise ValueError(
                f"these parameters are on {len(self._contexts)} contexts: start a rank for each, with ctx=[one]"
            )
        self._averaging = Averaging(
            gradient_predivide_factor, num_groups, compression, sparse_as_dense, process_set=process_set
        )
        self._process_set = process_set
        self._given_prefix = prefix
        self._prefix = prefix or ""
        self._generation: _Generation | None = None  # in which it was used last
        self._start_check = StartCheck(process_set, lambda name: f"{self._prefix}{name}")
        self._fresh = FreshGradients(process_set)
        self._lacking: list[Any] = []  # parameters whose gradients only other ranks have in this step
        self._has_warned = False
        self._check_every = check_every
        self._nan_check = nan_check
        self._steps = 0

    def set_weight(self, weight: float | None) -> None:
        """Weigh the gradients of this rank from the next step on, until the next call: give its number of samples.

        The averages are then sum(weight * gradient) / sum(weight) over the ranks. For the mean over all samples take
        the gradients of the mean loss of this rank, `loss.mean().backward()`, and call `step(1)`. All ranks call it
        before the same step; 0 leaves the gradients of a rank out. None weighs all ranks the same again.

        Raises:
            ValueError: the weight is negative, NaN or infinite. TypeError: not a number.
        """
        self._averaging.set_weight(weight)

    def step(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Average the gradients and update the parameters, divided by the batch of this rank.

        A rank without a backward pass in this step calls it, too, and contributes zeros. All ranks update the
        parameters of which some rank has a gradient.

        Args:
            batch_size: of this rank.
            ignore_stale_grad: leave alone the parameters of which no rank has a gradient; else they are an error.

        Raises:
            UserWarning: no rank has a gradient of a parameter, as of gluon.Trainer, on all ranks.
            ValueError: with a weight, for another batch_size than 1: ranks with other batches would update by other
                gradients.
            RingtrainError: a rank is lost, or has failed: as soon as this rank knows. Reading a parameter or what
                is computed of it raises it, too.
            NonFiniteError, ReplicaError: see nan_check and check_every.
        """
        if self._averaging.is_weighted and batch_size != 1:
            raise ValueError(
                f"step({batch_size}) after set_weight(): take the gradients of the mean loss, loss.mean().backward(), "
                "and call step(1)"
            )
        steps.begin(self._process_set is global_process_set)
        super().step(batch_size, ignore_stale_grad)
        self._steps += 1
        if self._check_every and self._steps % self._check_every == 0 and self._process_set.included():
            check_replicas({parameter.name: parameter.data() for parameter in self._params}, self._process_set)

    def _allreduce_grads(self) -> None:
        raise_failure()
        trained = [(number, one) for number, one in enumerate(self._params) if one.grad_req != "null"]
        parameters = [one for _, one in trained]
        if self._generation is not _generation:
            self._begin(parameters)
        takes_part = self._process_set.included() and self._process_set.size() != 1
        lacking = self._fresh.submit(parameters, f"{self._prefix}<fresh>") if takes_part else []
        self._averaging.average(
            [Gradient(f"{self._prefix}{number}", one.list_grad()[0], -number) for number, one in trained]
        )
        self._lacking = self._fresh.take(parameters, lacking)
        if self._nan_check:
            self._require_finite(parameters)

    def _update(self, ignore_stale_grad: bool = False) -> None:
        if self._lacking and not ignore_stale_grad and not self._has_warned:
            self._has_warned = True
            names = ", ".join(f'"{one.name}"' for one in self._lacking[:3])
            warn(
                f"this rank has no gradient of {names}{', ...' if len(self._lacking) > 3 else ''} in this step, others "
                "have; it contributes zeros. If that is meant to be so, call step(..., ignore_stale_grad=True)"
            )
        try:
            super()._update(ignore_stale_grad)
        finally:
            self._fresh.end_step([one for one in self._params if one.grad_req != "null"])

    def _begin(self, trained: Sequence[Any]) -> None:
        """At the first step of a generation, before the first gradient is an average."""
        self._generation = _generation
        self._fresh.forget()
        if self._given_prefix is None:
            self._prefix = f"trainer {_generation.trainers}: gradient "
            _generation.trainers += 1
        if not self._process_set.included() or self._process_set.size() == 1:
            return
        of_gradients = _beginnings([parameter.list_grad()[0] for parameter in trained])
        self._start_check.compare(
            Start(
                names=[str(number) for number, one in enumerate(self._params) if one.grad_req != "null"],
                parameters=_beginnings([one.data() for one in trained if one._stype == "default"]),
                gradients=of_gradients if any(of_gradients) else b"",
                default_lr=_default_lr_of(self._optimizer),
                broadcast_of="net.collect_params()",
                part_of_data="DataLoader(dataset.shard(hvd.size(), hvd.rank()), batch_size)",
            )
        )

    def _require_finite(self, parameters: Sequence[Any]) -> None:
        for parameter in parameters:
            gradient = parameter.list_grad()[0].tostype("default")
            if not bool(mxnet.nd.contrib.isfinite(gradient).min().asscalar()):
                self._fresh.end_step(parameters)
                raise NonFiniteError(
                    f'the average of the gradients of "{parameter.name}" is NaN or infinite, as one of them is on some '
                    "rank; no parameter was updated"
                )


def _beginnings(arrays: Sequence[Any]) -> bytes:
    """`some_elements` of the dense ones. Cuts them first: an array of MXNet comes to the host as a whole."""
    return some_elements([one.reshape(-1)[:64] for one in arrays if one.stype == "default"])


def _default_lr_of(optimizer: Any) -> tuple[float, str] | None:
    """Its learning rate and whose this is, if another one of its class that is made without arguments has the same."""
    kind = type(optimizer)
    try:
        default = kind().learning_rate
    except TypeError:  # it needs arguments
        return None
    return (default, f"the default of {kind.__name__}") if optimizer.learning_rate == default else None
