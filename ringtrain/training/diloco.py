"""`DiLoCo`: any optimizer for arrays, whose ranks train alone between two outer steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringtrain.engine.compression import Compression
from ringtrain.training.islands import Given
from ringtrain.training.local_steps import HasLocalSteps, LocalSteps, Settings, named_fragments
from ringtrain.training.optimizer import DistributedOptimizer, check_names


class DiLoCo(HasLocalSteps):
    """An optimizer whose ranks train alone and follow the mean of their changes after every `every` steps.

    Use it in place of the optimizer. All ranks construct it together, with the same arguments and parameters, and take
    the same number of steps. Its other attributes are those of the wrapped optimizer. DiLoCo: arXiv 2311.08105;
    fragments and overlap: Streaming DiLoCo, 2501.18512. Local SGD is `outer=ringtrain.optim.SGD(lr=1.0)`.

    Args:
        optimizer: the inner optimizer, with `step(params, grads)`, which updates arrays in place.
        params: the arrays that all calls of `step` get, in their order; or (name, array) pairs, or a dict.
        every: inner steps between two synchronisations of a parameter.
        outer: an optimizer of ringtrain.optim for the outer parameters; None is SGD(lr=0.7, momentum=0.9,
            nesterov=True), as in the paper.
        fragments: synchronise the model in so many parts, one after the other; or lists of the names (or the places)
            of the parameters of each part.
        overlap: inner steps that go on while a fragment is under way, 0 to every - 1.
        mixing: the share of the own parameters that stays when a fragment arrives, in [0, 1); None is 0 without
            overlap and 0.5 with it.
        compression: how differences travel: Compression.none, fp16, bf16, int8 or int4. The rounding error is added to
            the next difference.
        islands: ranks that average the gradients of each step, and send one difference together: "host", "rank" (no
            averages), "links" (hosts with similar links, measured), lists of ranks, or a function that returns these.

    Raises:
        NotInitializedError: before init().
        TypeError, ValueError: an argument is of another type, or out of its range.
        MismatchError: on all ranks, these have different arguments or parameters.

    Examples:
        >>> from ringtrain import optim
        >>> weights = [np.ones(2)]
        >>> optimizer = hvd.DiLoCo(optim.SGD(lr=0.5), weights, every=2, outer=optim.SGD(lr=1.0), islands="rank")
        >>> for _ in range(2):
        ...     optimizer.step(weights, [np.full(2, float(hvd.rank()))])  # on two ranks
        >>> weights[0].tolist()  # the mean of 1.0 and 0.0
        [0.5, 0.5]
    """

    _optimizer: Any
    _local_steps: LocalSteps

    def __init__(
        self,
        optimizer: Any,
        params: Mapping[str, Any] | Sequence[Any] | Iterable[tuple[str, Any]],
        every: int,
        *,
        outer: Any = None,
        fragments: int | Sequence[Sequence[str | int]] = 1,
        overlap: int = 0,
        mixing: float | None = None,
        compression: Any = Compression.none,
        islands: Given = "host",
    ) -> None:
        if hasattr(optimizer, "param_groups"):
            raise TypeError("this is a torch optimizer; wrap it with DiLoCo of ringtrain.torch")
        if isinstance(optimizer, (DistributedOptimizer, DiLoCo)):
            raise ValueError(
                "this optimizer is distributed already: give DiLoCo the plain one; it averages inside the islands"
            )
        if not hasattr(optimizer, "step"):
            raise TypeError(f"{type(optimizer).__name__} is not an optimizer with step(params, grads)")
        arrays = _named(params)
        parts = named_fragments(fragments, str)
        settings = Settings(every, outer, parts, overlap, mixing, compression, islands)
        local_steps = LocalSteps(arrays, settings)
        # Straight into __dict__: an assignment would reach for the wrapped optimizer, see __setattr__.
        vars(self).update(_optimizer=_averaging(optimizer, arrays, local_steps), _local_steps=local_steps)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN_ATTRIBUTES:
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)

    def step(self, params: Sequence[Any], grads: Sequence[Any]) -> None:
        """Update params with grads, and carry out what is due of the outer step.

        Raises:
            ValueError: another number of parameters than at construction.
            ReplicaError: on all ranks in the first step, these have different parameters.
            RingtrainError: a transfer failed; see ringtrain.errors.
        """
        self._local_steps.require_count(len(params))
        self._local_steps.before_step(params)
        self._optimizer.step(params, grads)
        self._local_steps.after_step(params)

    def set_weight(self, weight: float | None) -> None:
        """Weigh this rank from the next step on, until the next call: give its number of samples.

        The averages inside an island are then sum(weight * gradient) / sum(weight) over its ranks. In an outer step an
        island counts by the weights that its ranks have in the step that sends the difference. All ranks call it before
        the same step; 0 leaves a rank out, but one that is an island alone still updates with its own gradients. None
        weighs all ranks the same again.

        Raises:
            ValueError: the weight is negative, NaN or infinite. TypeError: not a number.
        """
        self._local_steps.set_weight(weight)
        if self._local_steps.islands.averages:
            self._optimizer.set_weight(weight)

    def outer_step(self, params: Sequence[Any]) -> None:
        """Synchronise the whole model now, such as at the end: afterwards all ranks have the same parameters.

        All ranks call it together.
        """
        self._local_steps.require_count(len(params))
        self._local_steps.outer_step(params)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner, the outer and the error state: a copy that can be pickled.

        Ranks of different islands have different inner states and rounding errors: save that of the first rank of each
        island, with its parameters, to resume exactly.
        """
        return {"inner": self._optimizer.state_dict(), "diloco": self._local_steps.state_dict()}

    def replicated_state_dict(self) -> dict[str, Any]:
        """Return the part of `state_dict` that one rank may give to all: without the rounding errors of its island."""
        return {"inner": self._optimizer.state_dict(), "diloco": self._local_steps.state_dict(with_errors=False)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` or `replicated_state_dict` returned; the caller restores the parameters.

        The ranks of the island that has saved the state take its rounding errors, and other ranks begin without. A
        state without errors leaves a rank its own ones, if the rank is at the same step of the same training.

        Raises:
            ValueError: it was made by another optimizer, or with other fragments.
        """
        if "diloco" not in state_dict:
            raise ValueError("load_state_dict: this is not the state of DiLoCo; load it into the inner optimizer")
        self._local_steps.load_state_dict(state_dict["diloco"])
        self._optimizer.load_state_dict(state_dict["inner"])


_OWN_ATTRIBUTES = tuple(DiLoCo.__annotations__)


def _averaging(optimizer: Any, arrays: Mapping[str, Any], local_steps: LocalSteps) -> Any:
    """The inner optimizer, averaging inside the island of this rank."""
    islands = local_steps.islands
    if not islands.averages:
        return optimizer
    return DistributedOptimizer(optimizer, named_parameters=arrays, process_set=islands.of_rank)


def _named(params: Any) -> dict[str, Any]:
    if isinstance(params, Mapping):
        return dict(params)
    listed = list(params)
    if all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in listed):
        check_names([name for name, _ in listed])
        return dict(listed)
    return {str(place): array for place, array in enumerate(listed)}
