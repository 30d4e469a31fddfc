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

from ringtrain.elastic import running
from ringtrain.elastic.running import AnyState, Arguments, Function, Result, generation as generation
from ringtrain.elastic.states import ArrayState, ObjectState as ObjectState, State as State
from ringtrain.errors import (
    HorovodInternalError as HorovodInternalError,
    HostsUpdatedInterrupt as HostsUpdatedInterrupt,
)
from ringtrain.jax.exceptions import errors
from ringtrain.jax.trees import Tree, as_leaf, on_host

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


class JaxState(ArrayState):
    """Pytrees of arrays, and other objects, each an attribute of this one.

    A commit copies the pytrees to the memory of the host, so that a step may have its arrays donated.

    Args:
        values: what has an array of JAX in it, keys of random generators too, is a pytree: parameters, the state of an
            optimizer. Objects with `state_dict` and `load_state_dict`, such as an optimizer of DiLoCo, are saved and
            loaded by these. Anything else is a Python object.
    """

    _in_files = "trees"

    @staticmethod
    def _has_arrays(value: Any) -> bool:
        return any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(value))

    def _by_path(self, name: str) -> dict[str, Any]:
        """Returns copies on the host."""
        tree = Tree.of(getattr(self, name))
        return {path: on_host(leaf, path) for leaf, path in zip(tree.leaves, tree.paths, strict=True)}

    def _kept(self, arrays: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        return arrays

    def _put(self, name: str, copies: dict[str, Any]) -> None:
        """Puts copies of the copies there: JAX may take over the memory of what it is given."""
        tree = Tree.of(getattr(self, name))
        leaves = [as_leaf(copies[path].copy(), leaf) for leaf, path in zip(tree.leaves, tree.paths, strict=True)]
        setattr(self, name, tree.with_leaves(leaves))
