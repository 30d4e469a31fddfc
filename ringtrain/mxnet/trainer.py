"""`DistributedTrainer`: gluon's Trainer, which averages the gradients over the ranks before its update.

Mirrors `horovod.mxnet.DistributedTrainer` (horovod/mxnet/__init__.py).
"""

from __future__ import annotations

from typing import Any

import mxnet

from ringtrain import ops
from ringtrain.compression import AnyCompressor, Compression
from ringtrain.errors import NonFiniteError
from ringtrain.failure.call_sites import warn
from ringtrain.job import session
from ringtrain.mxnet.engine import raise_failure
from ringtrain.mxnet.gradients import Averaging, Gradient
from ringtrain.mxnet.optimizer import DistributedOptimizer
from ringtrain.process_sets import ProcessSet, global_process_set
from ringtrain.timeline import recording
from ringtrain.training.replicas import check_replicas


class _Generation:
    """From one init() or join() to the next: trainers without a prefix are numbered as they are first used."""

    def __init__(self) -> None:
        self.trainers = 0


_generation = _Generation()


def _begin_anew() -> None:
    global _generation
    _generation = _Generation()


session.at_init(lambda _settings: _begin_anew())
ops.after_join(lambda _process_set: _begin_anew())


class DistributedTrainer(mxnet.gluon.Trainer):  # type: ignore[misc]
    """As `gluon.Trainer`, with averages over the ranks for gradients: `step(batch)` takes the batch of this rank.

    Gradients are submitted by `step` and averaged as they are computed; MXNet's engine updates each parameter when its
    average is there, while the script goes on.

    Args:
        params: a ParameterDict, or a dict or list of parameters: the same on all ranks.
        optimizer: its name, or an optimizer.
        optimizer_params: with a name, its arguments.
        compression: how gradients travel, such as Compression.fp16.
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
        compression: AnyCompressor = Compression.none,
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
        self._generation: _Generation | None = None  # in which it has its number
        self._check_every = check_every
        self._nan_check = nan_check
        self._steps = 0

    def step(self, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        """Average the gradients and update the parameters, divided by the batch of this rank.

        Raises:
            RingtrainError: a rank is lost, or has failed: as soon as this rank knows. Whoever reads a parameter or what
                is computed of it gets it, too.
            NonFiniteError, ReplicaError: see nan_check and check_every.
        """
        recording.next_step(self._process_set is global_process_set)
        super().step(batch_size, ignore_stale_grad)
        self._steps += 1
        if self._check_every and self._steps % self._check_every == 0 and self._process_set.included():
            check_replicas({parameter.name: parameter.data() for parameter in self._params}, self._process_set)

    def _allreduce_grads(self) -> None:
        raise_failure()
        prefix = self._names_begin_with()
        gradients = [
            Gradient(f"{prefix}{number}", parameter.list_grad()[0], -number)
            for number, parameter in enumerate(self._params)
            if parameter.grad_req != "null"
        ]
        self._averaging.average(gradients)
        if self._nan_check:
            self._require_finite()

    def _names_begin_with(self) -> str:
        if self._given_prefix is None and self._generation is not _generation:
            self._generation = _generation
            self._prefix = f"trainer {_generation.trainers}: gradient "
            _generation.trainers += 1
        return self._prefix

    def _require_finite(self) -> None:
        for parameter in self._params:
            if parameter.grad_req == "null":
                continue
            gradient = parameter.list_grad()[0].tostype("default")
            if not bool(mxnet.nd.contrib.isfinite(gradient).min().asscalar()):
                raise NonFiniteError(
                    f'the average of the gradients of "{parameter.name}" is NaN or infinite, as one of them is on some '
                    "rank; no parameter was updated"
                )
