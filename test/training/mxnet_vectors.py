"""Makes test/training/mxnet_vectors.json: weights after each update by the optimizers of MXNet 1.9.1.

Run it by hand, in an environment of its own: it needs mxnet 1.9.1, numpy 1.23.5 and Python 3.11 or older.
"""

import json
import math
from pathlib import Path

import mxnet as mx
import numpy as np

STEPS, ELEMENTS = 5, 8
PREPARED = {"rescale_grad": 0.3, "clip_gradient": 0.375, "wd": 0.0625}
RESCALED = {"rescale_grad": 0.3, "wd": 0.0625}
# Some numbers are not the defaults and large, so that each of them matters within a few steps.
CASES = {
    "sgd": [{}, {"momentum": 0.9}, {"momentum": 0.9, **PREPARED}, {"momentum": 0.9, **RESCALED}, PREPARED, RESCALED],
    "nag": [{}, {"momentum": 0.9}, {"momentum": 0.9, **RESCALED}, {"momentum": 0.9, **PREPARED}, PREPARED, RESCALED],
    "adam": [{}, {"beta1": 0.75, "beta2": 0.875, "epsilon": 0.125}, PREPARED],
    "adamw": [{}, {"correct_bias": False, "epsilon": 0.125}, PREPARED],
    "rmsprop": [{}, {"centered": True}, {"gamma1": 0.5, "clip_weights": 1.0}, {"centered": True, **PREPARED}, PREPARED],
    "adagrad": [{}, {"eps": 0.125}, PREPARED],
    "signum": [{}, {"momentum": 0.0, "wd": 0.0625}, {"wd_lh": 0.0625, **PREPARED}, RESCALED],
    "test": [{}, {"rescale_grad": 0.25}],
}


def gradients():
    """Exact in 16 bits, of both signs, with a zero."""
    numbers = np.arange(STEPS * ELEMENTS).reshape(STEPS, ELEMENTS)
    return ((numbers * 37 % 33 - 16) / 8.0).astype(np.float32)


START = np.linspace(-1.75, 1.75, ELEMENTS, dtype=np.float32)


class AdamW(mx.optimizer.Optimizer):
    """As the class of MXNet 2 calls the kernel, which is in 1.9.1."""

    def __init__(self, correct_bias=True, epsilon=1e-6, **numbers):
        super().__init__(**numbers)
        self.correct_bias, self.epsilon = correct_bias, epsilon

    def create_state(self, index, weight):
        return mx.nd.zeros(weight.shape), mx.nd.zeros(weight.shape)

    def update(self, index, weight, grad, state):
        self._update_count(index)
        lr, step = self._get_lr(index), self._index_update_count[index]
        if self.correct_bias:
            lr *= math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        rescale = mx.nd.full(shape=(1,), val=self.rescale_grad)
        clip = {"clip_gradient": self.clip_gradient} if self.clip_gradient else {}
        numbers = {"beta1": 0.9, "beta2": 0.999, "epsilon": self.epsilon, "rescale_grad": rescale, **clip}
        mx.nd.contrib.adamw_update(weight, grad, *state, out=weight, lr=1, wd=self._get_wd(index), eta=lr, **numbers)


def weights_after_each_step(name, numbers, dtype="float32"):
    optimizer = AdamW(**numbers) if name == "adamw" else mx.optimizer.create(name, **numbers)
    updater, weight, after = mx.optimizer.get_updater(optimizer), mx.nd.array(START, dtype=dtype), []
    for gradient in gradients():
        updater(0, mx.nd.array(gradient, dtype=dtype), weight)
        after.append([float(value) for value in weight.asnumpy()])
    return after


def main():
    vectors = []
    for name, cases in CASES.items():
        for numbers in cases:
            numbers = {"learning_rate": 0.125, **numbers}
            after = weights_after_each_step(name, numbers)
            vectors.append({"name": name, "numbers": numbers, "dtype": "float32", "after": after})
    numbers = {"learning_rate": 0.125, "momentum": 0.9, "wd": 0.0625}
    after = weights_after_each_step("sgd", {**numbers, "multi_precision": True}, "float16")
    vectors.append({"name": "sgd", "numbers": numbers, "dtype": "float16", "after": after})
    text = json.dumps({"start": START.tolist(), "gradients": gradients().tolist(), "vectors": vectors}, indent=None)
    text = text.replace('{"name"', '\n{"name"')
    Path(__file__).with_suffix(".json").write_text(text + "\n")


if __name__ == "__main__":
    main()
