"""Tensors, and gradients, in memory that the ranks of a node share, where they are reduced without being copied."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

import ringtrain._core as _core
from ringtrain.arrays import shared_memory


def empty(
    *shape: int | Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> torch.Tensor:
    """A new tensor, not initialised, for which an allreduce in place costs least; see `ringtrain.empty`.

    Args:
        shape: as for torch.empty.
        dtype: any that an operation takes.
        device: this rank's GPU, such as "cuda:0"; by default the host's memory.

    Raises:
        NotInitializedError: before init().
    """
    lengths = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    size = torch.Size(lengths)  # type: ignore[arg-type]
    bytes_ = math.prod(size) * dtype.itemsize
    place = torch.device("cpu" if device is None else device)
    content = (
        _on_gpu(bytes_, place) if place.type == "cuda" else torch.from_numpy(shared_memory.empty(bytes_, np.uint8))
    )
    return content.view(dtype).view(size)


def _on_gpu(bytes_: int, place: torch.device) -> torch.Tensor:
    number = torch.cuda.current_device() if place.index is None else place.index
    content = _core.gpu_bytes(bytes_, number)
    device = torch.device("cuda", number)
    if content is None:
        return torch.empty(bytes_, dtype=torch.uint8, device=device)
    return torch.as_tensor(content, device=device)[:bytes_]


class SharedGradients:
    """A place in shared memory for the gradient of each parameter, of its dtype, shape and strides."""

    def __init__(self) -> None:
        self._places: dict[torch.Tensor, torch.Tensor] = {}

    def take(self, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Move a gradient to its place, unless it is there, and return it.

        Moving it in the hook costs less than having autograd add to zeros there: it is still in the cache.
        """
        place = self._places.get(parameter)
        if place is None or place.dtype != grad.dtype:
            place = self._places[parameter] = _place_for(parameter, grad.dtype)
        if grad is not place:
            with torch.no_grad():
                place.copy_(grad)
            parameter.grad = place
        return place

    def forget(self) -> None:
        """Gives the next gradients new places: the memory belongs to ranks that may be lost."""
        self._places.clear()


def _place_for(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    like = torch.empty_like(parameter, device="meta")  # keeps the strides if there are no gaps
    return empty(parameter.numel(), dtype=dtype).as_strided(like.size(), like.stride())
