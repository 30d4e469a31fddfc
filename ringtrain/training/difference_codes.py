"""Codes of 8 or 4 bits for differences of parameters: a block of 256 values shares one scale.

A value is coded as the nearest multiple of the scale of its block, which is the largest magnitude of the block divided
by 127 or by 7. A message is the scales, float32, and then the codes; with 4 bits the first of two codes is in the low
half of a byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCK = 256


def encode(values: Array, bits: int) -> Array:
    """Return the message, uint8[message_bytes(len(values), bits)], for a flat array of float32 or float64.

    A block with a NaN or an infinite value decodes to NaN.
    """
    largest_code = (1 << (bits - 1)) - 1
    blocks = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        blocks.reshape(-1)[: values.size] = values
        scales = np.abs(blocks).max(axis=1) / np.float32(largest_code)
        scales[~np.isfinite(scales)] = np.nan
        multiples = np.rint(blocks / scales[:, None])
    multiples[~np.isfinite(multiples)] = 0  # of a block of zeros, or one without a scale
    codes = np.clip(multiples, -largest_code, largest_code).astype(np.int8).reshape(-1)
    if bits == 4:
        halves = (codes & 15).view(np.uint8)
        codes = halves[0::2] | (halves[1::2] << 4)
    return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)])


def decode(message: Array, count: int, bits: int) -> Array:
    """Return the values of a message as float32[count]."""
    blocks = -(-count // BLOCK)
    scales = message[: 4 * blocks].copy().view(np.float32)
    codes = message[4 * blocks :]
    if bits == 4:
        halves = np.empty(2 * codes.size, np.uint8)
        halves[0::2], halves[1::2] = codes & 15, codes >> 4
        multiples = ((halves ^ 8).astype(np.int8) - 8).astype(np.float32)
    else:
        multiples = codes.view(np.int8).astype(np.float32)
    values: Array = (multiples.reshape(blocks, BLOCK) * scales[:, None]).reshape(-1)[:count]
    return values


def message_bytes(count: int, bits: int) -> int:
    """Return the length of the message of so many values."""
    blocks = -(-count // BLOCK)
    return blocks * (4 + BLOCK * bits // 8)
