"""The gradients of well-known networks: their shapes and work, in the order of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

Shape = tuple[int, ...]

# The arguments of MXNet's SGD. The rate is so small that the weights stay finite in thousands of rounds.
SGD = {"learning_rate": 1e-6, "momentum": 0.9}


# A gradient's shape, and at how many places of an image its values are multiplied with something.
_Layer = tuple[Shape, int]


def resnet50() -> list[Shape]:
    """ResNet-50 for ImageNet: 161 gradients, 25,557,032 values.

    Source: He et al., "Deep residual learning for image recognition", 2015, as torchvision builds it.
    """
    return _shapes(_resnet(3, 4, 6, 3))


def resnet101() -> list[Shape]:
    """ResNet-101, likewise: 314 gradients, 44,549,160 values."""
    return _shapes(_resnet(3, 4, 23, 3))


def vgg16() -> list[Shape]:
    """VGG-16 for ImageNet: 32 gradients, 138,357,544 values, most of them in one matrix.

    Source: Simonyan, Zisserman, "Very deep convolutional networks for large-scale image recognition", 2014.
    """
    return _shapes(_vgg16())


def bert_large() -> list[Shape]:
    """BERT-large, uncased, with its pooler and without a head: 391 gradients, 335,141,888 values.

    Source: Devlin et al., "BERT: pre-training of deep bidirectional transformers", 2018.
    """
    hidden, inner = 1024, 4096
    norm: list[Shape] = [(hidden,), (hidden,)]
    layer = 4 * _linear(hidden, hidden) + norm + _linear(hidden, inner) + _linear(inner, hidden) + norm
    embeddings: list[Shape] = [(30522, hidden), (512, hidden), (2, hidden)]
    return embeddings + norm + 24 * layer + _linear(hidden, hidden)


def work_of(model: str) -> list[float]:
    """How much is computed for each gradient of a model: multiplications for one image, or for one token."""
    layers = _LAYERS[model]() if model in _LAYERS else [(shape, 1) for shape in MODELS[model]()]
    return [float(math.prod(shape) * places) for shape, places in layers]


def _resnet(*blocks: int) -> list[_Layer]:
    layers = _convolution(3, 64, 7, 112)
    width_in = 64
    for width, side, count in zip((64, 128, 256, 512), (56, 28, 14, 7), blocks, strict=True):
        for block in range(count):
            layers += _convolution(width_in, width, 1, side) + _convolution(width, width, 3, side)
            layers += _convolution(width, 4 * width, 1, side)
            if block == 0:
                layers += _convolution(width_in, 4 * width, 1, side)
            width_in = 4 * width
    return layers + _once(_linear(2048, 1000))


def _vgg16() -> list[_Layer]:
    layers: list[_Layer] = []
    width_in = 3
    for width, side, count in ((64, 224, 2), (128, 112, 2), (256, 56, 3), (512, 28, 3), (512, 14, 3)):
        for _ in range(count):
            layers += [((width, width_in, 3, 3), side**2), ((width,), 1)]
            width_in = width
    return layers + _once(_linear(512 * 7 * 7, 4096) + _linear(4096, 4096) + _linear(4096, 1000))


def _convolution(width_in: int, width: int, kernel: int, side: int) -> list[_Layer]:
    """Without bias, and the batch normalisation behind it."""
    return [((width, width_in, kernel, kernel), side**2), ((width,), 1), ((width,), 1)]


def _once(shapes: list[Shape]) -> list[_Layer]:
    return [(shape, 1) for shape in shapes]


def _shapes(layers: list[_Layer]) -> list[Shape]:
    return [shape for shape, _ in layers]


def _linear(width_in: int, width: int) -> list[Shape]:
    return [(width, width_in), (width,)]


MODELS: dict[str, Callable[[], list[Shape]]] = {
    "resnet50": resnet50,
    "resnet101": resnet101,
    "vgg16": vgg16,
    "bert-large": bert_large,
}
_LAYERS = {
    "resnet50": lambda: _resnet(3, 4, 6, 3),
    "resnet101": lambda: _resnet(3, 4, 23, 3),
    "vgg16": _vgg16,
}
