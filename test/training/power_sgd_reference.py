"""PowerSGD restated: one process computes, in float64 and with the QR of NumPy, what each of the ranks should."""

import numpy as np


class Reference:
    """The averages of one gradient over all ranks, step by step."""

    def __init__(self, compression, name, shape, ranks):
        self.columns = int(np.prod(shape[1:]))
        self.factor = compression.first_factor(name, self.columns, 0).astype("f4").astype("f8").T
        self.errors = np.zeros((ranks, shape[0], self.columns))

    def step(self, gradients, weights=None):
        """Returns the average of gradients, float[ranks, ...]."""
        gradients = np.asarray(gradients, "f8")
        matrices = gradients.reshape(*self.errors.shape) + self.errors
        basis, _ = np.linalg.qr(np.average(matrices @ self.factor, axis=0, weights=weights))
        own = np.swapaxes(matrices, 1, 2) @ basis
        self.factor = np.average(own, axis=0, weights=weights)
        self.errors = matrices - basis @ np.swapaxes(own, 1, 2)
        return (basis @ self.factor.T).reshape(gradients.shape[1:])
