"""A model in training: the same weights in the beginning, and the same batch in each step, for all competitors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import ringtrain.torch as hvd
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.rounds import Distribution

# --- models -----------------------------------------------------------------------------------------------------------


CLASSES = 1000
VOCABULARY = 8192

_WIDTHS = (64, 128, 256, 512)


class Residual(nn.Module):
    """relu(body + shortcut); the shortcut is a projection where the body changes the shape."""

    def __init__(self, body: nn.Module, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.body = body
        is_same_shape = width_in == width_out and stride == 1
        self.shortcut = nn.Identity() if is_same_shape else _convolution(width_in, width_out, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        return relu(self.body(images) + self.shortcut(images))


def _convolution(width_in: int, width_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Without bias, and the batch normalisation behind it."""
    convolution = nn.Conv2d(width_in, width_out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width_out))


def _basic(width_in: int, width: int, stride: int) -> Residual:
    body = nn.Sequential(_convolution(width_in, width, 3, stride), nn.ReLU(), _convolution(width, width, 3))
    return Residual(body, width_in, width, stride)


def _bottleneck(width_in: int, width: int, stride: int) -> Residual:
    body = nn.Sequential(
        _convolution(width_in, width, 1),
        nn.ReLU(),
        _convolution(width, width, 3, stride),
        nn.ReLU(),
        _convolution(width, 4 * width, 1),
    )
    return Residual(body, width_in, 4 * width, stride)


def _resnet(block: Callable[[int, int, int], Residual], expansion: int, depths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = [_convolution(3, 64, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    width_in = 64
    for width, depth in zip(_WIDTHS, depths, strict=True):
        for place in range(depth):
            stride = 2 if place == 0 and width != _WIDTHS[0] else 1
            layers.append(block(width_in, width, stride))
            width_in = expansion * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, CLASSES))


def resnet18() -> nn.Module:
    """11,689,512 parameters in 62 tensors.

    Source: He et al., "Deep residual learning for image recognition", 2015, as torchvision builds it.
    """
    return _resnet(_basic, 1, (2, 2, 2, 2))


def resnet50() -> nn.Module:
    """25,557,032 parameters in 161 tensors; source as above."""
    return _resnet(_bottleneck, 4, (3, 4, 6, 3))


class Transformer(nn.Module):
    """Predicts the next token from those before it. 6 layers of width 384: 17,332,224 parameters in 77 tensors.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019, with fewer layers.
    """

    def __init__(self, width: int = 384, heads: int = 6, layers: int = 6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(1024, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        embedded = self.tokens(tokens) + self.places(torch.arange(length))
        scores: Tensor = self.head(self.layers(embedded, mask=mask, is_causal=True))
        return scores


MODELS: dict[str, Callable[[], nn.Module]] = {"resnet18": resnet18, "resnet50": resnet50, "transformer": Transformer}


# --- training ---------------------------------------------------------------------------------------------------------


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
        parameters = list(model.parameters())  # those that are sharded are others

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
    whole = [getattr(gradient, "full_tensor", lambda gradient=gradient: gradient)() for gradient in gradients]
    distance = sum(float((ours - right).square().sum()) for ours, right in zip(whole, averages, strict=True))
    return distance <= tolerance**2 * sum(float(right.square().sum()) for right in averages)
