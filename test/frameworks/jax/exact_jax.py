"""Shared by the tests of ringtrain.jax: dtypes of 64 bits, and the ways in which an operation can be called."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from harness.exact import data_of_ranks
from harness.frameworks import is_rank, on_demand

import ringtrain

jax = on_demand("jax")
hvd = on_demand("ringtrain.jax")

if is_rank():  # for the whole process; the example and the benchmark run without
    jax.config.update("jax_enable_x64", True)

OPS = {name: getattr(ringtrain, name.capitalize()) for name in ("sum", "average", "min", "max", "product")}
WAYS = {"eager": lambda function: function, "jit": lambda function: jax.jit(function)}


def own_data(shape: Any, dtype: Any = "float32", op: str = "sum", seed: int = 0) -> tuple[jax.Array, list[np.ndarray]]:
    """This rank's array, and those of all ranks."""
    of_ranks = data_of_ranks(hvd.size(), shape, dtype, seed, op)
    return jax.numpy.asarray(of_ranks[hvd.rank()]), of_ranks


@contextlib.contextmanager
def raises(kind: type[Exception]) -> Any:
    """An error of a compiled program, as ringtrain's; `.text` of what this gives has its message."""

    class Seen:
        text = ""

    seen = Seen()
    try:
        with hvd.errors():
            yield seen
    except kind as error:
        seen.text = str(error)
        return
    raise AssertionError(f"no {kind.__name__} was raised")
