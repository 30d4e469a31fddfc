"""MXNet's two-bit and one-bit codes in NumPy, and sums over hosts that are made with them."""

import functools

import numpy as np


def quantize_2bit(grad, residual, threshold):
    """Change the residual in place and return the codes."""
    residual += grad
    high = residual >= threshold
    low = (residual <= -threshold) & ~high
    residual[high] -= np.float32(threshold)
    residual[low] += np.float32(threshold)
    codes = np.zeros(-(-len(grad) // 16) * 16, np.uint8)
    codes[: len(grad)][high] = 3
    codes[: len(grad)][low] = 2
    quads = codes.reshape(-1, 4)
    return (quads[:, 0] << 6) | (quads[:, 1] << 4) | (quads[:, 2] << 2) | quads[:, 3]


def quantize_1bit(grad, residual, threshold):
    residual += grad
    high = residual > threshold
    residual[high] -= 1
    residual[~high] += 1
    bits = np.zeros(-(-len(grad) // 32) * 32, np.uint8)
    bits[: len(grad)] = high
    return np.packbits(bits)


def dequantize_2bit(codes, count, threshold):
    quads = np.stack([codes >> 6, codes >> 4 & 3, codes >> 2 & 3, codes & 3], axis=1).reshape(-1)[:count]
    return np.array([0, 0, -threshold, threshold], "f4")[quads]


def dequantize_1bit(codes, count, threshold):
    return np.array([-1, 1], "f4")[np.unpackbits(codes)[:count]]


QUANTIZE = {"2bit": quantize_2bit, "1bit": quantize_1bit}
DEQUANTIZE = {"2bit": dequantize_2bit, "1bit": dequantize_1bit}


class QuantizedSum:
    """Returns the result of an allreduce with such codes, of ranks on hosts: `hosts` has how many each of them has."""

    def __init__(self, hosts, kind, threshold):
        self.hosts, self.kind, self.threshold = hosts, kind, threshold
        self.residuals = {}

    def __call__(self, name, arrays, before=1.0, after=1.0):
        """Return the sum of the arrays of all ranks, in rank order."""
        arrays, shape = list(arrays), arrays[0].shape
        decoded = []
        for host, ranks in enumerate(self.hosts):
            own = [arrays.pop(0).ravel() for _ in range(ranks)]
            node = functools.reduce(np.add, own) * np.float32(before)
            residual = self.residuals.setdefault((name, host), np.zeros_like(node))
            codes = QUANTIZE[self.kind](node, residual, self.threshold)
            decoded.append(DEQUANTIZE[self.kind](codes, node.size, self.threshold))
        return (functools.reduce(np.add, decoded) * np.float32(after)).reshape(shape)
