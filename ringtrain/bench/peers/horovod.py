"""Horovod through its PyTorch API, with its defaults or what the environment says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as horovod

from ringtrain.bench.job import Job
from ringtrain.bench.peers.torch_memory import as_array, as_tensor
from ringtrain.bench.rounds import Array, Competitor


def open_peer(job: Job) -> HorovodPeer:
    horovod.init()
    return HorovodPeer()


class HorovodPeer:
    """Horovod's operations, under names, on tensors that share the memory of the arrays."""

    def collective(self, kind: str) -> list[Competitor]:
        return [Competitor("horovod", lambda tensors: _collective(kind, tensors[0]))]

    def step(self) -> list[Competitor]:
        return [Competitor("horovod", _step)]

    def close(self) -> None:
        horovod.shutdown()


def _collective(kind: str, array: Array) -> Callable[[], Array]:
    tensor, name = as_tensor(array), f"{kind}.{array.nbytes}"
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: horovod.allreduce_(tensor, op=horovod.Sum, name=name),
        "allgather": lambda: horovod.allgather(tensor, name=name),
        "broadcast": lambda: horovod.broadcast_(tensor, 0, name=name),
        "alltoall": lambda: horovod.alltoall(tensor, name=name),
        "reducescatter": lambda: horovod.reducescatter(tensor, op=horovod.Sum, name=name),
    }
    call = calls[kind]
    return lambda: as_array(call(), array.dtype)


def _step(gradients: Sequence[Array]) -> Callable[[], Sequence[Array]]:
    backward = [(f"gradient{index}", as_tensor(gradient)) for index, gradient in reversed(list(enumerate(gradients)))]

    def run() -> Sequence[Array]:
        handles = [horovod.allreduce_async_(tensor, name=name) for name, tensor in backward]
        for handle in handles:
            horovod.synchronize(handle)
        return gradients

    return run
