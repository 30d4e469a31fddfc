"""ResNet-50 in training on the GPU of this rank: the same weights in the beginning and the same batch in each step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import ringtrain.torch as hvd
from ringtrain.bench import ringtrain_competitor, torch_training as training
from ringtrain.bench.rounds import Distribution
from ringtrain.bench.torch_training import CLASSES, resnet50

DISTRIBUTION = Distribution(
    ringtrain_competitor.NAME,
    lambda model, optimizer: (model, hvd.DistributedOptimizer(optimizer, model.named_parameters())),
)

_RATE = 1e-3
# Gradients are made of values with 8 bits, and not every kernel adds in the same order each time.
_TOLERANCE = 0.05

averages_of = training.averages_of


class Task:
    """The batch of this rank: images in channels_last."""

    def __init__(self, arguments: argparse.Namespace, device: str = "cuda") -> None:
        self._device = torch.device(device)
        draw = torch.Generator(self._device).manual_seed(1 + hvd.rank())
        shape = (arguments.batch_size, 3, arguments.image_size, arguments.image_size)
        images = torch.randn(shape, generator=draw, device=self._device)
        self._images = images.contiguous(memory_format=torch.channels_last)
        self._labels = torch.randint(CLASSES, shape[:1], generator=draw, device=self._device)
        sizes = [parameter.nbytes for parameter in resnet50().parameters()]
        self.key = {"model": "resnet50", "tensors": len(sizes), "bytes": sum(sizes), "inputs": list(shape)}

    def train(self, distribution: Distribution) -> training.Step:
        """A copy of the model: what is returned trains it for one step and returns its gradients."""
        torch.manual_seed(0)
        whole = resnet50().to(self._device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        parameters = list(whole.parameters())
        model, optimizer = distribution.distribute(whole, torch.optim.SGD(parameters, lr=_RATE, momentum=0.9))

        def step() -> list[Tensor]:
            optimizer.zero_grad()
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
                loss = cross_entropy(model(self._images), self._labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return [parameter.grad for parameter in parameters if parameter.grad is not None]

        return step


def are_close(gradients: Sequence[Tensor], averages: Sequence[Tensor]) -> bool:
    return training.are_close(gradients, averages, _TOLERANCE)
