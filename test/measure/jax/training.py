"""A perceptron in training, as one compiled step: the same weights, and the same batch in each step, for all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringtrain.jax as hvd
from ringtrain.bench.rounds import Competitor

# By the name of a model its layers and the rows of a batch.
MODELS = {"mlp": ((784, 128, 128, 10), 32), "large": ((1024, *[1760] * 8, 10), 16)}
LONE_CALLS = 200
_RATE = 1e-3
_TOLERANCE = 1e-4  # of the weights; a step without the other rank's gradients differs by ten times that

Params = Any
Run = Callable[[], list[np.ndarray[Any, Any]]]
# Makes averages over the ranks of gradients, inside jit.
Average = Callable[[Any], Any]


class Task:
    """A model, and the batch of this rank."""

    def __init__(self, name: str, rank: int) -> None:
        self._layers, rows = MODELS[name]
        random = np.random.default_rng(rank + 1)
        self.inputs = random.normal(size=(rows, self._layers[0])).astype(np.float32)
        self.labels = random.integers(0, self._layers[-1], rows)
        sizes = [leaf.nbytes for leaf in jax.tree_util.tree_leaves(self.new_params())]
        self.key = {"model": name, "tensors": len(sizes), "bytes": sum(sizes), "inputs": list(self.inputs.shape)}

    def new_params(self) -> Params:
        random = np.random.default_rng(0)
        return [
            (jnp.asarray(random.normal(size=(a, b)).astype(np.float32) / np.sqrt(a)), jnp.zeros(b, jnp.float32))
            for a, b in itertools.pairwise(self._layers)
        ]

    def loss(self, params: Params, inputs: Any, labels: Any) -> Any:
        for weight, bias in params[:-1]:
            inputs = jax.nn.relu(inputs @ weight + bias)
        weight, bias = params[-1]
        scores = jax.nn.log_softmax(inputs @ weight + bias)
        return -scores[jnp.arange(scores.shape[0]), labels].mean()

    def updated(self, params: Params, inputs: Any, labels: Any, average: Average) -> Params:
        gradients = average(jax.grad(self.loss)(params, inputs, labels))
        return jax.tree_util.tree_map(lambda value, gradient: value - _RATE * gradient, params, gradients)

    def train(self, average: Average) -> Run:
        """Trains the model for one step, in a program in which the gradients are averaged, with donated weights."""

        @partial(jax.jit, donate_argnums=0)
        def step(params: Params, inputs: Any, labels: Any) -> Params:
            return self.updated(params, inputs, labels, average)

        return running(step, self.new_params(), jnp.asarray(self.inputs), jnp.asarray(self.labels))

    def first_step(self) -> list[np.ndarray[Any, Any]]:
        """The weights after one step of all ranks."""
        gradients = jax.jit(jax.grad(self.loss))(self.new_params(), self.inputs, self.labels)
        leaves = zip(*map(jax.tree_util.tree_leaves, (self.new_params(), hvd.allreduce(gradients))), strict=True)
        return [np.asarray(value - _RATE * average) for value, average in leaves]


def running(step: Callable[..., Params], params: Params, inputs: Any, labels: Any) -> Run:
    """A step, and the weights after it, as they are on this rank."""
    state = [params]

    def run() -> list[np.ndarray[Any, Any]]:
        state[0] = jax.block_until_ready(step(state[0], inputs, labels))
        return [leaf.addressable_data(0) for leaf in jax.tree_util.tree_leaves(state[0])]

    return run


def own_competitor(task: Task, name: str) -> Competitor:
    return Competitor(name, lambda _: task.train(lambda gradients: hvd.allreduce(gradients, name=f"{name}.step")))


def are_close(params: Sequence[Any], expected: Sequence[np.ndarray[Any, Any]]) -> bool:
    return all(
        np.abs(np.asarray(own) - right).max() <= _TOLERANCE * max(np.abs(right).max(), 1e-6) + 1e-5
        for own, right in zip(params, expected, strict=True)
    )


def small_calls() -> dict[str, Callable[[], Any]]:
    """An allreduce of 4 bytes, inside jit and of NumPy."""
    import ringtrain

    value = jnp.ones(1, jnp.float32)
    jitted = jax.jit(lambda x: hvd.allreduce(x, name="4 bytes, jit"))
    array = np.ones(1, np.float32)
    return {
        "inside jit": lambda: jitted(value).block_until_ready(),
        "of NumPy": lambda: ringtrain.allreduce(array, name="4 bytes, NumPy"),
    }


def lone_calls(rank: int, size: int) -> dict[str, Callable[[], Any]]:
    """Many calls of a program of one rank, with an operation, which waits for no other rank, and without."""
    sets = [hvd.add_process_set([number]) for number in range(size)]
    value = jnp.ones(1, jnp.float32)

    def calling(program: Callable[[Any], Any]) -> Callable[[], Any]:
        jitted = jax.jit(program)

        def run() -> Any:
            for _ in range(LONE_CALLS):
                result = jitted(value)
            return result.block_until_ready()

        return run

    return {
        "with an allreduce": calling(lambda x: hvd.allreduce(x, process_set=sets[rank]) + 1),
        "without": calling(lambda x: x + 1),
    }
