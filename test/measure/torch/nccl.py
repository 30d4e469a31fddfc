"""NCCL through torch.distributed, on tensors that are on GPUs, in the buckets of DistributedDataParallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringtrain._core as _core
from ringtrain.bench.peers import CannotTakePart
from ringtrain.bench.peers.torch_distributed import buckets_of, distributions, meet
from ringtrain.bench.ranks import Job
from ringtrain.bench.rounds import Competitor, Distribution

# With which NCCL lets several ranks use one GPU, and the first version that knows it.
_ALLOW_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
_SHARES_FROM = (2, 30)


def open_peer(job: Job) -> NcclPeer:
    """Raises CannotTakePart where this torch has no NCCL, or its NCCL refuses the GPUs of these ranks."""
    trouble = next((one for one in job.gather(_trouble_here()) if one), "") or _trouble_of_sharing(job)
    if trouble:
        raise CannotTakePart(trouble)
    meet(job, "nccl", torch.device("cuda", torch.cuda.current_device()))
    return NcclPeer()


def _trouble_here() -> str:
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    return "" if dist.is_nccl_available() else f"torch {torch.__version__} has no NCCL"


def _trouble_of_sharing(job: Job) -> str:
    gpus = job.gather(_core.gpu_uuid(torch.cuda.current_device()))
    shared = next((gpu for gpu in gpus if gpus.count(gpu) > 1), None)
    if shared is None:
        return ""
    ranks = " and ".join(str(rank) for rank, gpu in enumerate(gpus) if gpu == shared)
    version = min(job.gather(tuple(torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    allowed = all(job.gather(os.environ.get(_ALLOW_SHARING, "1") == "1"))
    if version < _SHARES_FROM:
        number = ".".join(map(str, version))
        return f"ranks {ranks} share {shared}, which NCCL allows from 2.30 on, and that of torch is {number}"
    if not allowed:
        return f"ranks {ranks} share {shared}, which {_ALLOW_SHARING} forbids"
    os.environ[_ALLOW_SHARING] = "1"
    return ""


class NcclPeer:
    """The default process group, over tensors on GPUs."""

    def collective(self, kind: str) -> list[Competitor]:
        return []

    def step(self) -> list[Competitor]:
        return [
            Competitor("nccl, DDP's buckets", _step_with_copies),
            Competitor("nccl, DDP's buckets, bucket view", _step_in_buckets),
        ]

    def training(self) -> list[Distribution]:
        return distributions("nccl")

    def close(self) -> None:
        dist.destroy_process_group()


class _Bucket:
    """Some gradients laid end to end, and where each of them is there."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = list(members)
        counts = [member.numel() for member in members]
        self.flat = torch.empty(sum(counts), dtype=members[0].dtype, device=members[0].device)
        parts = torch.split(self.flat, counts)
        self.views = [part.view(member.shape) for part, member in zip(parts, members, strict=True)]

    def reduce(self) -> Any:
        return dist.all_reduce(self.flat, async_op=True)


def _step_with_copies(gradients: Sequence[Any]) -> Callable[[], Sequence[Any]]:
    """As DDP: each gradient is divided on its way into its bucket, and copied back from there."""
    factor = 1.0 / dist.get_world_size()
    buckets = [_Bucket(members) for members in buckets_of(gradients[::-1])]

    def run() -> Sequence[Any]:
        works = []
        for bucket in buckets:
            for view, gradient in zip(bucket.views, bucket.members, strict=True):
                torch.mul(gradient, factor, out=view)
            works.append(bucket.reduce())
        for work, bucket in zip(works, buckets, strict=True):
            work.wait()
            for view, gradient in zip(bucket.views, bucket.members, strict=True):
                gradient.copy_(view)
        return gradients

    return run


def _step_in_buckets(gradients: Sequence[Any]) -> Callable[[], Sequence[Tensor]]:
    """As DDP with gradient_as_bucket_view: the gradients are in the buckets, and each is divided there."""
    ranks = dist.get_world_size()
    buckets = [_Bucket(members) for members in buckets_of(gradients[::-1])]
    for bucket in buckets:
        for view, gradient in zip(bucket.views, bucket.members, strict=True):
            view.copy_(gradient)
    averages = [view for bucket in buckets for view in bucket.views]

    def run() -> Sequence[Tensor]:
        works = []
        for bucket in buckets:
            for view in bucket.views:
                view.div_(ranks)
            works.append(bucket.reduce())
        for work in works:
            work.wait()
        return averages

    return run
