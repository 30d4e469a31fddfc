"""gloo through torch.distributed, with the gradients in buckets as DistributedDataParallel has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ringtrain.bench.peers.torch_distributed import as_tensor, buckets_of, distributions, meet
from ringtrain.bench.ranks import Job
from ringtrain.bench.rounds import Array, Competitor, Distribution


def open_peer(job: Job) -> GlooPeer:
    torch.set_num_threads(1)
    meet(job, "gloo")
    return GlooPeer()


class GlooPeer:
    """The default process group, over tensors that share the memory of the arrays."""

    def collective(self, kind: str) -> list[Competitor]:
        if kind not in ("allreduce", "allgather", "broadcast"):
            return []
        return [Competitor("gloo", lambda tensors: self._collective(kind, tensors[0]))]

    def step(self) -> list[Competitor]:
        return [Competitor("gloo, DDP's buckets", _step)]

    def training(self) -> list[Distribution]:
        return distributions("gloo")

    def close(self) -> None:
        dist.destroy_process_group()

    def _collective(self, kind: str, array: Array) -> Callable[[], Array]:
        tensor = as_tensor(array)
        result = np.empty((dist.get_world_size(), array.size), array.dtype) if kind == "allgather" else array
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: dist.all_reduce(tensor),
            "allgather": lambda: dist.all_gather(list(as_tensor(result)), tensor),
            "broadcast": lambda: dist.broadcast(tensor, 0),
        }
        call = calls[kind]

        def run() -> Array:
            call()
            return result

        return run


def _step(gradients: Sequence[Array]) -> Callable[[], Sequence[Array]]:
    """As DDP: each gradient is divided on its way into its bucket, and a bucket starts as soon as it is full."""
    factor = 1.0 / dist.get_world_size()
    buckets = []
    for members in buckets_of(gradients[::-1]):
        tensors = [as_tensor(member) for member in members]
        flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        buckets.append((flat, list(zip(views, tensors, strict=True))))

    def run() -> Sequence[Array]:
        works = []
        for flat, pairs in buckets:
            for view, tensor in pairs:
                torch.mul(tensor, factor, out=view)
            works.append(dist.all_reduce(flat, async_op=True))
        for work, (_, pairs) in zip(works, buckets, strict=True):
            work.wait()
            for view, tensor in pairs:
                tensor.copy_(view)
        return gradients

    return run
