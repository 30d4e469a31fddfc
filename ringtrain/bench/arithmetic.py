"""Plain arithmetic: scaling for peers, and the floor of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ringtrain._core as _core
from ringtrain.arrays.adapter import adapter_for
from ringtrain.bench.rounds import Array


def scaling(destination: Array, source: Array, factor: float) -> Callable[[], None]:
    """destination = source * factor, in one pass and as fast as ringtrain's own."""
    adapter = adapter_for(source)
    written, dtype = adapter.view(destination)[:2]
    read = adapter.view(source)[0]
    count = source.size
    return lambda: _core.scale(dtype, factor, written, read, count)


def floor(tensors: Sequence[Array]) -> Callable[[], None]:
    """Read and write each tensor once: what no average in place can do without. It changes the signs."""
    passes = [scaling(tensor, tensor, -1.0) for tensor in tensors]

    def run() -> None:
        for one_pass in passes:
            one_pass()

    return run
