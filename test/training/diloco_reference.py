"""DiLoCo of several islands, restated in plain NumPy in one process, as the papers define it.

inner step   the gradients of an island's ranks are averaged; SGD updates the parameters of the island
outer step   the outer parameters follow the mean of (outer - parameters) by SGD with Nesterov momentum
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

BLOCK = 256


def rounded(values: np.ndarray, code: str) -> np.ndarray:
    """Returns the values that the receivers decode."""
    if code == "none":
        return values
    if code == "fp16":
        return np.clip(values, -65504, 65504).astype(np.float16).astype(values.dtype)
    if code == "bf16":
        return values.astype(ml_dtypes.bfloat16).astype(values.dtype)
    largest = {"int8": 127, "int4": 7}[code]
    result = np.zeros(values.size, np.float32)
    for begin in range(0, values.size, BLOCK):
        block = values[begin : begin + BLOCK].astype(np.float32)
        scale = np.float32(np.abs(block).max() / np.float32(largest))
        if scale:
            result[begin : begin + BLOCK] = np.rint(block / scale) * scale
    return result.astype(values.dtype)


def train(
    start: Sequence[np.ndarray],
    gradient: Callable[[int, int, list[np.ndarray]], list[np.ndarray]],
    islands: Sequence[Sequence[int]],
    steps: int,
    *,
    every: int,
    inner_lr: float,
    outer_lr: float = 0.7,
    momentum: float = 0.9,
    fragments: Sequence[Sequence[int]] | None = None,
    overlap: int = 0,
    mixing: float = 0.0,
    code: str = "none",
    weight: Callable[[int, int], float] | None = None,
    changes: dict[int, Sequence[int | None]] | None = None,
    lost: Sequence[int] = (),
) -> list[list[np.ndarray]]:
    """Return the parameters of each island after so many steps.

    Args:
        gradient: of (rank, step, parameters), step being 0 at first.
        fragments: places of the parameters of each; None is one of all.
        weight: of (rank, step) in all means; None is the same for all ranks.
        changes: from this many steps on, of each island of one rank the island that it was before, or None for a
            newcomer. All go on with what the first one has, each with its own errors.
        lost: after these numbers of steps, what is under way counts as never sent.
    """
    changes = changes or {}
    fragments = fragments or [range(len(start))]
    outer = [array.copy() for array in start]
    direction = [np.zeros_like(array) for array in start]
    parameters = [[array.copy() for array in start] for _ in islands]
    errors: list[dict[int, np.ndarray]] = [{} for _ in islands]
    arriving: dict[int, tuple[int, Any]] = {}
    before: list[dict[int, np.ndarray]] = []  # the errors before the last difference was sent

    def weights_of(ranks: Sequence[int], step: int) -> list[float]:
        return [weight(rank, step) if weight is not None else 1 for rank in ranks]

    def mean_difference(number: int, places: Sequence[int], step: int) -> np.ndarray:
        sent = []
        for own, error in zip(parameters, errors, strict=True):
            difference = np.concatenate([(outer[place] - own[place]).reshape(-1) for place in places])
            difference = difference + error.get(number, 0)
            sent.append(rounded(difference, code))
            error[number] = difference - sent[-1]
        if len(islands) == 1:
            return np.concatenate([(outer[place] - parameters[0][place]).reshape(-1) for place in places])
        weights = [sum(weights_of(island, step)) for island in islands]
        if len(set(weights)) == 1:
            mean = sum(sent) / len(islands)
        else:
            mean = sum(one * np.float32(weight) for one, weight in zip(sent, weights, strict=True)) / sum(weights)
        return rounded(mean, code) if code in ("fp16", "bf16") else mean

    def arrive(step: int) -> None:
        for number in [number for number, (due, _) in arriving.items() if due == step]:
            mean, begin = arriving.pop(number)[1], 0
            for place in fragments[number]:
                part = mean[begin : begin + outer[place].size].reshape(outer[place].shape)
                begin += outer[place].size
                direction[place] = momentum * direction[place] + part
                towards = part + momentum * direction[place] if momentum else part
                outer[place] = outer[place] - outer_lr * towards
                for own in parameters:
                    own[place] = mixing * own[place] + (1 - mixing) * outer[place] if mixing else outer[place].copy()

    for step in range(1, steps + 1):
        if step - 1 in changes:
            former = changes[step - 1]
            islands = [[rank] for rank in range(len(former))]
            assert former[0] is not None
            parameters = [[array.copy() for array in parameters[former[0]]] for _ in former]
            errors = [{} if rank is None else dict(errors[rank]) for rank in former]
        if step - 1 in lost:
            assert len(arriving) == 1
            arriving.clear()
            errors = before
        for number, island in enumerate(islands):
            gradients = [gradient(rank, step - 1, parameters[number]) for rank in island]
            own = weights_of(island, step - 1) if len(island) > 1 else [1]  # a rank alone takes its own gradients
            means = [
                sum(w * one for w, one in zip(own, of_ranks, strict=True)) / sum(own)
                for of_ranks in zip(*gradients, strict=True)
            ]
            parameters[number] = [one - inner_lr * mean for one, mean in zip(parameters[number], means, strict=True)]
        arrive(step)
        for number, places in enumerate(fragments):
            if step % every == (number + 1) * every // len(fragments) % every:
                before = [dict(error) for error in errors]
                arriving[number] = step + overlap, mean_difference(number, places, step - 1)
        arrive(step)
    return parameters
