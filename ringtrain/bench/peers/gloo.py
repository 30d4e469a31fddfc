"""gloo through torch.distributed, with the gradients in buckets as DistributedDataParallel has them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringtrain.bench.distribution import Distribution
from ringtrain.bench.job import Job, address_of_rank_0
from ringtrain.bench.peers.torch_memory import as_tensor
from ringtrain.bench.rounds import Array, Competitor

_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20
_TIMEOUT = timedelta(seconds=120)


def open_peer(job: Job) -> GlooPeer:
    torch.set_num_threads(1)
    host = address_of_rank_0(job)
    is_server = job.rank == 0
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT) if is_server else None
    port = job.gather(store.port if store is not None else None)[0]
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size, timeout=_TIMEOUT)
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
        return [
            Distribution("DDP, gloo", lambda model, optimizer: (_parallel(model, False), optimizer)),
            Distribution("DDP, gloo, bucket view", lambda model, optimizer: (_parallel(model, True), optimizer)),
        ]

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


def _parallel(model: torch.nn.Module, is_view: bool) -> DistributedDataParallel:
    """Without the broadcast of buffers in each step, which nobody else does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a newer name, which an older torch does not know
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=is_view)


def _step(gradients: Sequence[Array]) -> Callable[[], Sequence[Array]]:
    """As DDP: each gradient is divided on its way into its bucket, and a bucket starts as soon as it is full."""
    factor = 1.0 / dist.get_world_size()
    buckets = []
    for members in _buckets(gradients[::-1]):
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


def _buckets(gradients: Sequence[Array]) -> Iterator[list[Array]]:
    """A bucket is closed by the gradient that fills it."""
    members: list[Array] = []
    limit = _FIRST_BUCKET_BYTES
    for gradient in gradients:
        members.append(gradient)
        if sum(member.nbytes for member in members) >= limit:
            yield members
            members, limit = [], _BUCKET_BYTES
    if members:
        yield members
