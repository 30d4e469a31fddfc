"""Horovod through its PyTorch API, with its defaults or what the environment says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as horovod

from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.peers.torch_distributed import as_array, as_tensor
from ringtrain.bench.ranks import Job
from ringtrain.bench.rounds import Array, Competitor, Distribution


def open_peer(job: Job) -> HorovodPeer:
    horovod.init()
    return HorovodPeer()


class HorovodPeer:
    """Horovod's operations, under names, on tensors that share the memory of the arrays."""

    def collective(self, kind: str) -> list[Competitor]:
        return [Competitor("horovod", lambda tensors: _collective(kind, tensors[0]))]

    def step(self) -> list[Competitor]:
        return [Competitor("horovod", _step)]

    def training(self) -> list[Distribution]:
        return [Distribution("horovod", _distribute)]

    def close(self) -> None:
        horovod.shutdown()


def _collective(kind: str, array: Array) -> Callable[[], Array]:
    run = ringtrain_competitor.collective_of(horovod, kind, as_tensor(array))
    return lambda: as_array(run(), array.dtype)


def _distribute(model: Any, optimizer: Any) -> tuple[Any, Any]:
    return model, horovod.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def _step(gradients: Sequence[Array]) -> Callable[[], Sequence[Array]]:
    run = ringtrain_competitor.step_of(horovod, [as_tensor(gradient) for gradient in gradients])

    def run_on_arrays() -> Sequence[Array]:
        run()
        return gradients

    return run_on_arrays
