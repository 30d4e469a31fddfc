"""`DiLoCo`: an optimizer of optax, whose ranks train alone between two outer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ringtrain.engine.compression import Compression
from ringtrain.jax.optimizer import distribute
from ringtrain.jax.trees import Tree
from ringtrain.training.islands import Given
from ringtrain.training.local_steps import HasLocalSteps, LocalSteps, Settings, named_fragments


class DiLoCo(HasLocalSteps):
    """An optimizer of optax whose ranks train alone between two outer steps, as with `ringtrain.DiLoCo`.

    `init` and `update` are those of the inner optimizer, inside jit or not. After each step the script calls
    `after_step`, outside of jit, with the new parameters, and goes on with those that it returns: mostly the same
    arrays, which it does not wait for. The outer parameters and the outer momentum are in host memory.

    Args:
        optimizer: the inner optimizer: optax's, or any named tuple of `init` and `update`.
        params: the pytree that all ranks begin with; its arrays are addressable by this process.
        fragments: a number, or lists of the paths of the parameters of each part, such as ".encoder.0.weight".
        every, outer, overlap, mixing, compression, islands: as for `ringtrain.DiLoCo`, and so are the errors.

    Examples:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import ringtrain.jax as hvd
        >>> from ringtrain import optim
        >>> params = {"w": jnp.ones(2)}
        >>> optimizer = hvd.DiLoCo(optax.sgd(0.5), params, every=2, outer=optim.SGD(lr=1.0), islands="rank")
        >>> state = optimizer.init(params)
        >>> for _ in range(2):
        ...     updates, state = optimizer.update({"w": jnp.full(2, float(hvd.rank()))}, state, params)
        ...     params = optimizer.after_step(optax.apply_updates(params, updates))
        >>> params["w"].tolist()  # on two ranks: the mean of 1.0 and 0.0
        [0.5, 0.5]
    """

    init: Callable[[Any], Any]
    update: Callable[..., Any]

    def __init__(
        self,
        optimizer: Any,
        params: Any,
        every: int,
        *,
        outer: Any = None,
        fragments: int | Sequence[Sequence[str]] = 1,
        overlap: int = 0,
        mixing: float | None = None,
        compression: Any = Compression.none,
        islands: Given = "host",
    ) -> None:
        if isinstance(optimizer, DiLoCo):
            raise ValueError("this optimizer is of DiLoCo already")
        if not callable(getattr(optimizer, "update", None)) or not hasattr(optimizer, "_replace"):
            raise TypeError(
                f"{type(optimizer).__name__} is not an optimizer of optax: it is not a named tuple of init(params) and "
                "update(updates, state, params)"
            )
        tree = _tree(params, "DiLoCo")
        parts = named_fragments(fragments, str)
        settings = Settings(every, outer, parts, overlap, mixing, compression, islands)
        self._paths = tree.paths
        arrays = [np.asarray(leaf) for leaf in tree.leaves]
        self._local_steps = LocalSteps(dict(zip(tree.paths, arrays, strict=True)), settings)
        self._local_steps.keep_outer(arrays)
        own = self._local_steps.islands
        inner = distribute(optimizer, process_set=own.of_rank) if own.averages else _without_weight(optimizer)
        self.init, self.update = inner.init, inner.update

    def set_weight(self, weight: float | None) -> None:
        """As `ringtrain.DiLoCo.set_weight`, before the same `after_step`, for the differences alone.

        For the averages inside an island give `update` the keyword `weight` in each step, as for `distribute`.
        """
        self._local_steps.set_weight(weight)

    def after_step(self, params: Any) -> Any:
        """Carry out what is due of the outer step, after an update.

        Args:
            params: the new parameters.

        Returns:
            The parameters to go on with: new arrays in the place of those that have arrived, on their devices.

        Raises:
            TypeError: inside of jit.
            ValueError: another tree than at construction.
            ReplicaError: on all ranks in the first step, these have begun with different parameters.
            RingtrainError: a transfer failed; see ringtrain.errors.
        """
        steps = self._local_steps
        return self._with_host_copies(params, steps.due(), steps.after_step, "after_step")

    def outer_step(self, params: Any) -> Any:
        """As `ringtrain.DiLoCo.outer_step`. Arguments, result and errors are those of `after_step`."""
        everything = set(range(len(self._paths)))
        return self._with_host_copies(params, everything, self._local_steps.outer_step, "outer_step")

    def _with_host_copies(
        self, params: Any, places: set[int], take: Callable[[Sequence[Any]], None], title: str
    ) -> Any:
        """Call `take` with copies of the parameters that it may change; the others are none of its concern."""
        tree = _tree(params, title)
        if tree.paths != self._paths:
            raise ValueError(f"{title}: these parameters are not those that DiLoCo was constructed with")
        copies = [np.array(leaf) if place in places else None for place, leaf in enumerate(tree.leaves)]
        self._local_steps.before_step(copies)
        take(copies)
        if not places:
            return params
        return tree.with_leaves(
            [
                leaf if copied is None else jax.device_put(copied, getattr(leaf, "sharding", None))
                for leaf, copied in zip(tree.leaves, copies, strict=True)
            ]
        )

    def state_dict(self) -> dict[str, Any]:
        """As `ringtrain.DiLoCo.state_dict`, without the inner state, which the script has: save that, too."""
        return self._local_steps.state_dict()

    def replicated_state_dict(self) -> dict[str, Any]:
        """As `ringtrain.DiLoCo.replicated_state_dict`, without the inner state."""
        return self._local_steps.state_dict(with_errors=False)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `ringtrain.DiLoCo.load_state_dict`. The caller restores the parameters and the inner state."""
        self._local_steps.load_state_dict(state_dict)


def _without_weight(optimizer: Any) -> Any:
    """The optimizer of a rank that averages with no other, whose `update` takes the keyword `weight` all the same."""

    def update(updates: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any) -> Any:
        return optimizer.update(updates, state, params, **extra)

    return optimizer._replace(update=update)


def _tree(params: Any, title: str) -> Tree:
    tree = Tree.of(params)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in tree.leaves):
        raise TypeError(f"{title}: call it outside of jit, with the parameters that the compiled step has returned")
    return tree
