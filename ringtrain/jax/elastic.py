"""`hvd.elastic` of a JAX script: what `ringtrain.elastic` has, for pytrees and compiled steps.

@hvd.elastic.run
def train(state):
    while state.step < 1000:
        state.params, state.opt_state = step(state.params, state.opt_state, batch)
        state.step += 1
        state.commit()

train(hvd.elastic.JaxState(params=params, opt_state=opt_state, step=0))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ringtrain.elastic import running, states
from ringtrain.elastic.running import AnyState, Arguments, Function, Result, generation as generation
from ringtrain.elastic.states import ObjectState as ObjectState, State as State
from ringtrain.errors import (
    HorovodInternalError as HorovodInternalError,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
)
from ringtrain.jax.exceptions import errors
from ringtrain.jax.trees import Tree, as_leaf, on_host
from ringtrain.training.power_sgd import replicated_state_of

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "JaxState",
    "ObjectState",
    "State",
    "generation",
    "run",
    "run_fn",
]


def __dir__() -> list[str]:
    """Lists the public names, which completion shows."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def run(func: Function[AnyState, Arguments, Result]) -> Function[AnyState, Arguments, Result]:
    """As `ringtrain.elastic.run`, also for the loss of a rank while a compiled step is under way.

    JAX tells of it when the results are read, at the latest in `state.commit()`.
    """
    return running.run(_with_errors(func))


def run_fn(
    func: Function[AnyState, Arguments, Result], reset: Callable[[], object]
) -> Function[AnyState, Arguments, Result]:
    """As `run`, with a function that leaves one generation and joins the next in the place of ringtrain's own."""
    return running.run_fn(_with_errors(func), reset)


def _with_errors(func: Any) -> Any:
    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with errors():
            return func(*args, **kwargs)

    return wrapper


class JaxState(ObjectState):
    """Pytrees of arrays, and other objects, each an attribute of this one.

    A commit copies the pytrees to the memory of the host, so that a step may have its arrays donated.

    Args:
        values: what has an array of JAX in it, keys of random generators too, is a pytree: parameters, the state of an
            optimizer. Objects with `state_dict` and `load_state_dict`, such as an optimizer of DiLoCo, are saved and
            loaded by these. Anything else is a Python object.
    """

    _copies: dict[str, dict[str, np.ndarray[Any, Any]]]  # of each attribute by their paths
    _holders: dict[str, Any]  # of each attribute that has a state_dict: the copy

    def __init__(self, **values: Any):
        trees = {name: value for name, value in values.items() if _has_arrays(value)}
        holders = {name: value for name, value in values.items() if name not in trees and states.has_state_dict(value)}
        self._copies = {name: {} for name in trees}
        self._holders = dict.fromkeys(holders)
        for name, value in {**trees, **holders}.items():
            setattr(self, name, value)
        super().__init__(**{name: value for name, value in values.items() if name not in {**trees, **holders}})
        self.save()

    def save(self) -> None:
        # JAX may tell only now that a step has failed, and DiLoCo that a rank is lost while a difference was under way:
        # then nothing of this commit is kept.
        copies = {name: self._copied(name) for name in self._copies}
        holders = {name: getattr(self, name).state_dict() for name in self._holders}
        super().save()
        self._copies, self._holders = copies, holders

    def restore(self) -> None:
        super().restore()
        for name, copies in self._copies.items():
            self._put(name, copies)
        for name, content in self._holders.items():
            getattr(self, name).load_state_dict(content)

    def sync_from(self, root_rank: int) -> None:
        super().sync_from(root_rank)
        for name in self._copies:
            copies = self._copied(name)
            if states.share_arrays(copies, root_rank, name):
                self._put(name, copies)
        for name in self._holders:
            holder = getattr(self, name)
            states.share_object(replicated_state_of(holder), root_rank, name, holder.load_state_dict)

    def saved_content(self) -> Any:
        return {"objects": super().saved_content(), "trees": self._copies, "holders": self._holders}

    def load_content(self, content: Any) -> None:
        super().load_content(content["objects"])
        for name in self._copies:
            self._put(name, content["trees"][name])
        for name in self._holders:
            getattr(self, name).load_state_dict(content["holders"][name])

    def _copied(self, name: str) -> dict[str, np.ndarray[Any, Any]]:
        tree = Tree.of(getattr(self, name))
        return {path: on_host(leaf, path) for leaf, path in zip(tree.leaves, tree.paths, strict=True)}

    def _put(self, name: str, copies: dict[str, np.ndarray[Any, Any]]) -> None:
        """Copies of the copies: JAX may take over the memory of what it is given."""
        tree = Tree.of(getattr(self, name))
        leaves = [as_leaf(copies[path].copy(), leaf) for leaf, path in zip(tree.leaves, tree.paths, strict=True)]
        setattr(self, name, tree.with_leaves(leaves))


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(value))
