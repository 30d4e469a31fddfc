"""A model in training: the same weights in the beginning, and the same batch in each step, for all competitors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ringtrain.torch as hvd
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.rounds import Distribution
from ringtrain.bench.torch.models import CLASSES, MODELS, VOCABULARY

_SMALL_RATE = 1e-3  # so that the loss of a batch that is seen again and again stays an ordinary number
_TOLERANCE = 1e-3  # of the gradients, relative; another rank's gradients differ by about 1

Step = Callable[[], list[Tensor]]


class Task:
    """A model, and the batch of this rank."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self._build = MODELS[name]
        draw = _text if name == "transformer" else _images
        with torch.random.fork_rng():
            torch.manual_seed(1 + hvd.rank())
            self._inputs, self._labels = draw(arguments)
        sizes = [parameter.nbytes for parameter in self._build().parameters()]
        self.key = {"model": name, "tensors": len(sizes), "bytes": sum(sizes), "inputs": list(self._inputs.shape)}

    def train(self, distribution: Distribution) -> Step:
        """A copy of the model: what is returned trains it for one step and returns its gradients."""
        torch.manual_seed(0)
        whole = self._build()
        parameters = list(whole.parameters())
        model, optimizer = distribution.distribute(whole, torch.optim.SGD(parameters, lr=_SMALL_RATE, momentum=0.9))

        def step() -> list[Tensor]:
            optimizer.zero_grad()
            scores = model(self._inputs)
            loss = cross_entropy(scores.flatten(0, -2), self._labels.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return [parameter.grad for parameter in parameters if parameter.grad is not None]

        return step


def _images(arguments: argparse.Namespace) -> tuple[Tensor, Tensor]:
    size = arguments.image_size
    return torch.randn(arguments.batch_size, 3, size, size), torch.randint(CLASSES, (arguments.batch_size,))


def _text(arguments: argparse.Namespace) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (arguments.batch_size, arguments.sequence_length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def distributions() -> list[Distribution]:
    """ringtrain's own."""

    def distribute(
        model: nn.Module, optimizer: torch.optim.Optimizer, is_shared: bool
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        names = model.named_parameters()
        return model, hvd.DistributedOptimizer(optimizer, names, gradient_as_shared_view=is_shared)

    return [
        Distribution(ringtrain_competitor.NAME, lambda model, optimizer: distribute(model, optimizer, False)),
        Distribution(
            f"{ringtrain_competitor.NAME}, shared view", lambda model, optimizer: distribute(model, optimizer, True)
        ),
    ]


def averages_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Averages over the ranks of the gradients that each of them has computed by itself."""
    return [hvd.allreduce(gradient, name=f"averages.{place}") for place, gradient in enumerate(gradients)]


def are_close(gradients: Sequence[Tensor], averages: Sequence[Tensor], tolerance: float = _TOLERANCE) -> bool:
    distance = sum(float((ours - right).square().sum()) for ours, right in zip(gradients, averages, strict=True))
    return distance <= tolerance**2 * sum(float(right.square().sum()) for right in averages)
