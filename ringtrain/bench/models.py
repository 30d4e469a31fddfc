"""The gradients of well-known networks: their shapes, in the order of the parameters."""

from __future__ import annotations

from collections.abc import Callable

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """ResNet-50 for ImageNet: 161 gradients, 25,557,032 values.

    Source: He et al., "Deep residual learning for image recognition", 2015, as torchvision builds it.
    """
    shapes = _convolution(3, 64, 7)
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += _convolution(width_in, width, 1) + _convolution(width, width, 3)
            shapes += _convolution(width, 4 * width, 1)
            if block == 0:
                shapes += _convolution(width_in, 4 * width, 1)
            width_in = 4 * width
    return shapes + _linear(2048, 1000)


def vgg16() -> list[Shape]:
    """VGG-16 for ImageNet: 32 gradients, 138,357,544 values, most of them in one matrix.

    Source: Simonyan, Zisserman, "Very deep convolutional networks for large-scale image recognition", 2014.
    """
    shapes: list[Shape] = []
    width_in = 3
    for width in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512):
        shapes += [(width, width_in, 3, 3), (width,)]
        width_in = width
    return shapes + _linear(512 * 7 * 7, 4096) + _linear(4096, 4096) + _linear(4096, 1000)


def bert_large() -> list[Shape]:
    """BERT-large, uncased, with its pooler and without a head: 391 gradients, 335,141,888 values.

    Source: Devlin et al., "BERT: pre-training of deep bidirectional transformers", 2018.
    """
    hidden, inner = 1024, 4096
    norm: list[Shape] = [(hidden,), (hidden,)]
    layer = 4 * _linear(hidden, hidden) + norm + _linear(hidden, inner) + _linear(inner, hidden) + norm
    embeddings: list[Shape] = [(30522, hidden), (512, hidden), (2, hidden)]
    return embeddings + norm + 24 * layer + _linear(hidden, hidden)


def _convolution(width_in: int, width: int, kernel: int) -> list[Shape]:
    """Without bias, and the batch normalisation behind it."""
    return [(width, width_in, kernel, kernel), (width,), (width,)]


def _linear(width_in: int, width: int) -> list[Shape]:
    return [(width, width_in), (width,)]


MODELS: dict[str, Callable[[], list[Shape]]] = {"resnet50": resnet50, "vgg16": vgg16, "bert-large": bert_large}
