"""Shared by the peers of torch.distributed: how their ranks meet, and DistributedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringtrain.bench.ranks import Job, address_of_rank_0
from ringtrain.bench.rounds import Array, Distribution


def as_tensor(array: Array) -> Any:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: Any, dtype: np.dtype[Any]) -> Array:
    array: Array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array.view(dtype)


_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20
_TIMEOUT = timedelta(seconds=120)


def meet(job: Job, backend: str, device: torch.device | None = None) -> None:
    """Make the default process group of all ranks."""
    host = address_of_rank_0(job)
    is_server = job.rank == 0
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT) if is_server else None
    port = job.gather(store.port if store is not None else None)[0]
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
    on_gpu: dict[str, Any] = {} if device is None else {"device_id": device}  # which torch has from 2.3 on
    dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.size, timeout=_TIMEOUT, **on_gpu)


def buckets_of(gradients: Sequence[Any]) -> Iterator[list[Any]]:
    """As DistributedDataParallel puts them together; a bucket is closed by the gradient that fills it."""
    members: list[Any] = []
    limit = _FIRST_BUCKET_BYTES
    for gradient in gradients:
        members.append(gradient)
        if sum(member.nbytes for member in members) >= limit:
            yield members
            members, limit = [], _BUCKET_BYTES
    if members:
        yield members


def distributions(backend: str) -> list[Distribution]:
    """DistributedDataParallel with its defaults, and with gradients that are in its buckets."""
    return [
        Distribution(f"DDP, {backend}", lambda model, optimizer: (_parallel(model, False), optimizer)),
        Distribution(f"DDP, {backend}, bucket view", lambda model, optimizer: (_parallel(model, True), optimizer)),
    ]


def _parallel(model: torch.nn.Module, is_view: bool) -> DistributedDataParallel:
    """Without the broadcast of buffers in each step, which no other competitor does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a newer name, which an older torch does not know
        return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=is_view)
