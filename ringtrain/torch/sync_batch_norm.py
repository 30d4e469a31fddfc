"""`SyncBatchNorm`: batch normalization with the mean and the variance of the batches of all ranks.

Mirrors `horovod.torch.SyncBatchNorm` (horovod/torch/sync_batch_norm.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ringtrain import ops
from ringtrain.engine.process_sets import ProcessSet, global_process_set

# The next layer waits for it, as no gradient is waited for.
_PRIORITY = 1 << 30


class SyncBatchNorm(_BatchNorm):
    """As `torch.nn.BatchNorm1d` to 3d, but with the mean and the variance of the batches of all ranks.

    The ranks may have batches of different sizes, also of none. Running statistics are the same on all ranks; in eval()
    they are used as in any BatchNorm, without communication. A rank outside the process set is on its own. Not
    differentiable twice.

    The ranks call their layers, forward and backward, in the same order.

    Args:
        num_features: channels C of an input of shape (N, C, ...), which is float16, bfloat16, float32 or float64.
        eps: added to the variance.
        momentum: the part of a new batch in the running statistics; None: their average over all batches.
        affine: with a weight and a bias for each channel; their gradients are those of this rank's loss.
        track_running_stats: off, there are no running statistics, and eval() works as train() does.
        process_set: the ranks that normalize together.

    Raises:
        ValueError: an input of fewer than 2 dimensions or with another number of channels; on all ranks, fewer than 2
            values per channel.
        TypeError: an input that is not floating-point.
        RingtrainError: a reduction failed; see ringtrain.errors.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Put a SyncBatchNorm in the place of every BatchNorm in a module, with its parameters and statistics.

        Mirrors `torch.nn.SyncBatchNorm.convert_sync_batchnorm`.

        Returns:
            The module, or a SyncBatchNorm if it is a BatchNorm itself.

        Raises:
            ValueError: a lazy BatchNorm has seen no input yet.
        """
        return cls._converted(module, process_set, {})

    @classmethod
    def _converted(
        cls, module: torch.nn.Module, process_set: ProcessSet, done: dict[torch.nn.Module, torch.nn.Module]
    ) -> torch.nn.Module:
        """`done` has each module only once, also where it has two names or is in two modules."""
        if module not in done:
            done[module] = cls._like(module, process_set) if isinstance(module, _BatchNorm) else module
            for name, child in module._modules.items():  # named_children() leaves out second names
                if child is not None:
                    module.add_module(name, cls._converted(child, process_set, done))
        return done[module]

    @classmethod
    def _like(cls, layer: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        tensors = (layer.weight, layer.running_mean)
        if any(torch.nn.parameter.is_lazy(one) for one in tensors if one is not None):
            raise ValueError(
                f"{type(layer).__name__} does not know its features yet: call the network with a batch on every rank, "
                f"and convert it then"
            )
        like = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            process_set=process_set,
        )
        # Not copies: an optimizer may have the parameters already.
        like.weight, like.bias = layer.weight, layer.bias
        like.running_mean, like.running_var = layer.running_mean, layer.running_var
        like.num_batches_tracked = layer.num_batches_tracked
        return like.train(layer.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        is_settled = not self.training and self.running_mean is not None
        if is_settled or self.process_set.included() is False:
            return super().forward(input)
        moments = _moments(input.detach(), self.process_set)
        # A rank that has enough alone does not look at the sum, for which the host would have to wait for a GPU.
        if input.numel() < 2 * self.num_features and moments.values < 2:
            raise ValueError(
                f"SyncBatchNorm needs at least 2 values per channel over all ranks of {self.process_set}, not "
                f"{int(moments.values)}; this rank's input has the shape {list(input.shape)}"
            )
        if self.training and self.track_running_stats:
            self._track(moments)
        return _Normalization.apply(input, self.weight, self.bias, moments, self.eps, self.process_set)  # type: ignore[no-any-return, no-untyped-call]

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm expects an input of shape (N, {self.num_features}, ...), not {list(input.shape)}"
            )
        if not input.is_floating_point():
            raise TypeError(f"SyncBatchNorm expects a floating-point input, not {input.dtype}")

    def _track(self, moments: _Moments) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        unbiased = moments.variance * (moments.values / (moments.values - 1))
        for running, new in ((self.running_mean, moments.mean), (self.running_var, unbiased)):
            part: Any = self.momentum
            if part is None:
                part = self.num_batches_tracked.to(running.dtype).reciprocal()
            running.lerp_(new.to(running.dtype), part)


class _Moments(NamedTuple):
    """Has the moments of the batches of all ranks; the same on all of them."""

    values: torch.Tensor  # per channel; float64, without dimensions
    mean: torch.Tensor  # [C], float64
    variance: torch.Tensor  # [C], float64, biased


def _moments(input: torch.Tensor, process_set: ProcessSet) -> _Moments:
    channels = input.shape[1]
    values = input.numel() // channels
    # Sums, so that a rank that has joined may contribute zeros.
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    if values:
        # Several times as fast as var_mean. It gives statistics in the dtype of the running ones.
        unused = torch.empty(channels, dtype=_dtype_of_statistics(input), device=input.device)
        mean, variance = (one.double() for one in torch.batch_norm_update_stats(input, unused, unused, 0.0))
        torch.cat([torch.ones_like(mean[:1]), mean, variance + mean**2], out=sums).mul_(values)
    _reduce(sums, "forward", process_set)
    mean, mean_of_squares = (sums[1:] / sums[0]).view(2, channels)
    return _Moments(sums[0], mean, (mean_of_squares - mean**2).clamp_(min=0))


def _dtype_of_statistics(input: torch.Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


def _reduce(sums: torch.Tensor, direction: str, process_set: ProcessSet) -> None:
    """Sum over the ranks, in place.

    All layers with as many channels share a name. They wait for their sums, so those of one name are never under way
    together, and ranks that run the same layers in the same order mean the same one, whatever gradients travel
    meanwhile. Numbers would need the same layers to be constructed on all ranks, and rank 0 often constructs a model
    more, to look at it. Without a name the order would be that of all such operations, and a name taken in turn would
    have another shape in each step, so nothing would be known from the step before.
    """
    name = f"sync_batch_norm.{direction}.{len(sums) // 2}"
    ops.allreduce_(sums, name=name, op=ops.Sum, process_set=process_set, priority=_PRIORITY)


class _Normalization(torch.autograd.Function):
    """The input minus the mean over the standard deviation, both of which depend on the inputs of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: _Moments,
        eps: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.moments, ctx.eps, ctx.process_set = moments, eps, process_set
        dtype = _dtype_of_statistics(input)
        mean, variance, weight, bias = (
            None if one is None else one.to(dtype) for one in (moments.mean, moments.variance, weight, bias)
        )
        return F.batch_norm(input, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        input, weight = ctx.saved_tensors
        of_weight, of_bias = _own_sums(grad_output, input, ctx.moments, ctx.eps)
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([of_weight, of_bias]).double()
            _reduce(sums, "backward", ctx.process_set)
            of_input = _gradient_of_input(grad_output, input, weight, ctx.moments, ctx.eps, sums)
        return (
            of_input,
            of_weight if ctx.needs_input_grad[1] else None,
            of_bias if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
        )


def _own_sums(
    grad_output: torch.Tensor, input: torch.Tensor, moments: _Moments, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's sums over each channel of the gradient times the normalized input, and of the gradient."""
    dtype = _dtype_of_statistics(input)
    mean, variance = moments.mean.to(dtype), moments.variance.to(dtype)
    if input.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    # CUDA takes the dtype of its results from the weight, and empty moments for those of this batch, which were not
    # saved; None makes it fail.
    weight, not_saved = torch.ones_like(mean), mean.new_empty(0)
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        grad_output, input, weight, mean, variance, not_saved, not_saved, False, eps, [False, True, True]
    )
    return of_weight, of_bias


def _gradient_of_input(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    moments: _Moments,
    eps: float,
    sums: torch.Tensor,
) -> torch.Tensor:
    """scale * (grad_output - its mean - normalized input * the mean of their product), in two passes over memory.

    `sums` are those of `_own_sums` over all ranks.
    """
    mean_of_product, mean_of_gradient = (sums / moments.values).view(2, -1)
    inverse = (moments.variance + eps).rsqrt()
    scale = inverse if weight is None else inverse * weight
    slope = -scale * inverse * mean_of_product
    offset = -scale * mean_of_gradient - slope * moments.mean
    shape = (1, -1, *(1 for _ in input.shape[2:]))
    scale, slope, offset = (one.to(_dtype_of_statistics(input)).view(shape) for one in (scale, slope, offset))
    return torch.addcmul(offset, slope, input).addcmul_(scale, grad_output).to(input.dtype)
