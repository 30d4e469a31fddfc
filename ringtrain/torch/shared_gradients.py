"""Gradients in memory that the ranks of a node share, where they are reduced without being copied."""

from __future__ import annotations

import torch

from ringtrain.torch.memory import empty


class SharedGradients:
    """A place in shared memory for the gradient of each parameter, of its dtype, shape and strides."""

    def __init__(self) -> None:
        self._places: dict[torch.Tensor, torch.Tensor] = {}

    def take(self, parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Move a gradient to its place, unless it lies there, and return it.

        Moving it in the hook costs less than having autograd add to zeros there: it is still in the cache.
        """
        place = self._places.get(parameter)
        if place is None:
            place = self._places[parameter] = _place_for(parameter)
        if grad is not place:
            with torch.no_grad():
                place.copy_(grad)
            parameter.grad = place
        return place

    def forget(self) -> None:
        """The next gradients get new places: the memory belongs to ranks that may not be there any more."""
        self._places.clear()


def _place_for(parameter: torch.Tensor) -> torch.Tensor:
    like = torch.empty_like(parameter, device="meta")  # keeps the strides if there are no gaps
    return empty(parameter.numel(), dtype=parameter.dtype).as_strided(like.size(), like.stride())
