"""The gradients of one optimizer on this rank: what has happened to each, and what a step has left of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ringtrain.ops.objects import short_digest
from ringtrain.training.replicas import all_elements, digest_of
from ringtrain.training.update_check import bytes_of_number


class Gradient:
    """The state of the gradient of one parameter since the last update; `is_sparse` and `dtype` are kept for longer."""

    __slots__ = (
        *("name", "parameter", "priority", "is_sparse", "dtype"),
        *("passes", "is_submitted", "seen", "version", "was_changed", "was_dropped"),
    )

    def __init__(self, parameter: torch.Tensor, name: str, priority: int):
        self.parameter = parameter
        self.name = name
        self.priority = priority
        self.is_sparse: bool | None = None  # on all ranks; None until some rank has had a gradient
        self.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        self.forget()

    def forget(self) -> None:
        self.passes = 0  # of backward()
        self.is_submitted = False
        self.seen: torch.Tensor | None = None  # as backward() has left it, or as it was submitted
        self.version = 0  # of `seen`, at that time
        self.was_changed = False  # by other code
        self.was_dropped = False  # by other code, such as model.zero_grad()

    def see(self, grad: torch.Tensor) -> None:
        self.seen = grad
        self.version = grad._version

    def has_changed(self) -> bool:
        """Whether other code has written to the gradient, or has replaced it, since it was seen."""
        return self.seen is not None and (self.parameter.grad is not self.seen or self.seen._version != self.version)


class _Left(NamedTuple):
    """A gradient as a step, or the averaging before it, has left it."""

    gradient: weakref.ref[torch.Tensor]
    version: int


class LeftGradients:
    """Gradients as the last step, or the averaging before it, has left them, and what has happened to them since.

    It tells whether this rank is idle: then its gradients are those of the last step, not of this one.
    """

    def __init__(self) -> None:
        self._left: list[_Left] = []
        self.has_stepped = False  # without zero_grad() or backward() since
        self.were_clipped = False  # while nothing else had happened to them

    def keep(self, grads: Sequence[torch.Tensor]) -> None:
        """They are averages now."""
        self._left = [_Left(weakref.ref(grad), grad._version) for grad in grads]

    def keep_clipped(self, grads: Sequence[torch.Tensor]) -> None:
        """They were untouched, and were clipped: by a script that looks at their norm after the step."""
        self.keep(grads)
        self.were_clipped = True

    def end_step(self, grads: Sequence[torch.Tensor]) -> None:
        self.keep(grads)
        self.has_stepped = True
        self.were_clipped = False

    def forget(self) -> None:
        self._left = []

    def are_untouched(self, grads: Sequence[torch.Tensor]) -> bool:
        """Whether these are from the last step, and nothing has happened to them since."""
        return (
            self.has_stepped
            and len(grads) == len(self._left)
            and all(
                left.gradient() is grad and left.version == grad._version
                for left, grad in zip(self._left, grads, strict=True)
            )
        )

    def was_added_to(self, grad: torch.Tensor) -> bool:
        """Whether a backward pass has just added to what the step before has left there."""
        return any(left.gradient() is grad and left.version + 1 == grad._version for left in self._left)

    def are_gone(self, grads: Sequence[torch.Tensor | None]) -> bool:
        """Whether there were some, and none of them is in its place any more."""
        return bool(self._left) and not any(
            left.gradient() is grad for left, grad in zip(self._left, grads, strict=False) if grad is not None
        )


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A view that can be reduced in place: of complex numbers, their real and imaginary parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def some_elements(tensors: Sequence[torch.Tensor]) -> bytes:
    """The first elements of each dense tensor: enough to tell whether they were made with other random numbers.

    Tensors on a GPU are left out: reading them would wait for the GPU.
    """
    most = 64
    parts = [
        as_real(tensor.detach().reshape(-1)[:most].resolve_conj()).reshape(-1).to("cpu", torch.float64)
        for tensor in tensors
        if tensor.layout is torch.strided and tensor.is_cpu
    ]
    return torch.cat(parts).numpy().tobytes() if parts else b""


def content_of_leaf(leaf: Any) -> bytes:
    """Returns bytes that depend on all elements of a tensor or an array in a state, or on a number.

    Of a tensor on a GPU this is the shape alone, since reading it would wait for the GPU; also of one that has others
    in it, such as a DTensor.
    """
    if not torch.is_tensor(leaf):
        return all_elements([leaf]) if isinstance(leaf, np.ndarray) else bytes_of_number(leaf)
    content = f"{leaf.dtype} {tuple(leaf.shape)}".encode()
    is_plain = leaf.layout is torch.strided and not leaf.is_quantized and not hasattr(leaf, "__tensor_flatten__")
    if not is_plain or not leaf.is_cpu:
        return content
    plain = leaf.detach().resolve_conj().resolve_neg().reshape(-1)
    return content + b"%d" % digest_of(plain.view(torch.uint8))


def digest_of_all(tensors: Sequence[torch.Tensor]) -> int:
    """Returns a digest of all elements. Those on a GPU are copied from it."""
    parts = [part for one in tensors for part in ((one._indices(), one._values()) if one.is_sparse else (one,))]
    return short_digest(repr([digest_of(part.detach()) for part in parts]).encode())


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a view whose elements are contiguous in memory, as of a channels-last tensor, or None."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: (-strides[dimension], dimension))
    view = tensor.permute(order)
    return view if view.is_contiguous() else None
