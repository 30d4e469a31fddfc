"""Groups of torch.distributed, operations that are repeated in them, and models that are trained with them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringtrain.torch.distributed  # noqa: F401  # registers the backend
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.peers.torch_distributed import meet
from ringtrain.bench.ranks import Job
from ringtrain.bench.rounds import Array

# Names of the operations in peers of NumPy.
OF_MPI = {
    "all_reduce": "allreduce",
    "all_gather_into_tensor": "allgather",
    "reduce_scatter_tensor": "reducescatter",
    "broadcast": "broadcast",
    "all_to_all_single": "alltoall",
}
# torch gives them other names from 2.13 on, and warns of these.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def is_of_torch(peer: Any) -> bool:
    """Whether the peer is a backend of torch.distributed."""
    return bool(hasattr(peer, "training") and peer.training())


@contextlib.contextmanager
def opened(job: Job) -> Iterator[dict[str, Any]]:
    """The groups of all ranks, by the name of their competitor: that of ringtrain, and gloo's if it is a peer."""
    torch.set_num_threads(1)
    if dist.is_initialized():
        group = dist.new_group(backend="ringtrain")
        yield {ringtrain_competitor.NAME: group, "gloo": dist.group.WORLD}
        dist.destroy_process_group(group)
    else:
        meet(job, "ringtrain")
        yield {ringtrain_competitor.NAME: dist.group.WORLD}
        dist.destroy_process_group()


def of_this_rank() -> Any:
    """A group of this rank alone, on ringtrain. All ranks call this together."""
    return dist.new_group([dist.get_rank()], backend="ringtrain", use_local_synchronization=True)


class Data:
    """The tensors of one operation, of float32. `array` is the input as NumPy has it, and `other` the second tensor.

    The size is that of nccl-tests: the larger one of what a rank puts in and what it gets out.
    """

    def __init__(self, operation: str, count: int, rank: int, size: int) -> None:
        self.operation, self.rank, self.size = operation, rank, size
        is_split = operation not in ("all_reduce", "all_reduce_in_pairs", "broadcast", "send_recv")
        part = max(1, count // size) if is_split else count
        whole = part * size if is_split else count
        self.bytes = 4 * whole
        self.tensor = torch.empty(part if operation == "all_gather_into_tensor" else whole)
        self.other = torch.empty(part if operation == "reduce_scatter_tensor" else whole)
        self.array: Array = self.tensor.numpy()

    def fill(self) -> None:
        """Writes the values that is_right() expects."""
        self.tensor.fill_(1 + self.rank)
        self.other.fill_(-1)

    def clear(self) -> None:
        self.tensor.fill_(0)
        self.other.fill_(0)

    def is_right(self, result: Any) -> bool:
        got = torch.as_tensor(result)
        of_ranks = torch.arange(1.0, self.size + 1)
        if self.operation in ("all_reduce", "reduce_scatter_tensor"):
            return bool((got == of_ranks.sum()).all())
        if self.operation == "broadcast":
            return bool((got == 1).all())
        partner = self.rank ^ 1
        if self.operation in ("send_recv", "all_reduce_in_pairs"):
            own = 1 + self.rank if self.operation == "all_reduce_in_pairs" else 0
            return partner >= self.size or bool((got == own + 1 + partner).all())
        return bool((got.reshape(self.size, -1) == of_ranks.unsqueeze(1)).all())


def prepare(operation: str, data: Data, group: Any, _: Any) -> Callable[[], Tensor]:
    """Returns a function that carries the operation out once and returns its result.

    `send_recv` is a message there and one back, between neighbours, and in `all_reduce_in_pairs` these are a group: of
    an odd number of ranks the last one rests.
    """
    tensor, other = data.tensor, data.other
    partner = data.rank ^ 1
    pair = _pair_of(data, dist.get_backend(group)) if operation == "all_reduce_in_pairs" else None

    def there_and_back() -> None:
        if partner >= data.size:
            return
        if data.rank < partner:
            dist.send(tensor, partner, group)
            dist.recv(other, partner, group)
        else:
            dist.recv(other, partner, group)
            dist.send(tensor, partner, group)

    calls: dict[str, tuple[Callable[[], Any], Tensor]] = {
        "all_reduce": (lambda: dist.all_reduce(tensor, group=group), tensor),
        "all_reduce_in_pairs": (lambda: dist.all_reduce(tensor, group=pair), tensor),
        "all_gather_into_tensor": (lambda: _all_gather(other, tensor, group=group), other),
        "reduce_scatter_tensor": (lambda: _reduce_scatter(other, tensor, group=group), other),
        "broadcast": (lambda: dist.broadcast(tensor, 0, group), tensor),
        "all_to_all_single": (lambda: dist.all_to_all_single(other, tensor, group=group), other),
        "send_recv": (there_and_back, other),
    }
    run, result = calls[operation]

    def once() -> Tensor:
        run()
        return result

    return once


def _pair_of(data: Data, backend: str) -> Any:
    pairs = [dist.new_group([first, first + 1], backend=backend) for first in range(0, data.size - 1, 2)]
    return pairs[data.rank // 2] if data.rank ^ 1 < data.size else of_this_rank()


def distribution(
    training: str, group: Any
) -> Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, torch.optim.Optimizer]]:
    """Returns a function that distributes a model and its optimizer: with DistributedDataParallel, or fully_shard."""

    def parallel(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of a newer name, which an older torch does not know
            return DistributedDataParallel(model, process_group=group, broadcast_buffers=False), optimizer

    def sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, type(optimizer)(model.parameters(), **optimizer.defaults)

    return {"ddp": parallel, "fsdp": sharded}[training]
