"""The networks that are trained: ResNets for images, and a small transformer for text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

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

    def __init__(self, width: int = 384, heads: int = 6, layers: int = 6, longest: int = 1024) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(longest, width)
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
