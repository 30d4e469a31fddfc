"""A training on two ranks that says when its weights are right, for wheels without a framework."""

TRAIN = """
import numpy as np
import ringtrain as hvd

hvd.init()
points = np.random.default_rng(hvd.rank()).normal(size=(256, 4)).astype(np.float32)
values = points @ np.arange(4, dtype=np.float32)
weights = hvd.broadcast(np.full(4, hvd.rank(), np.float32), 0)
for _ in range(60):
    gradient = 2 / 256 * points.T @ (points @ weights - values)
    weights -= 0.3 * hvd.allreduce(gradient, name="gradient")
alike = hvd.allgather(weights[None])
assert np.array_equal(alike[0], alike[1]) and np.abs(weights - np.arange(4)).max() < 1e-3
print("trained on", hvd.size())
"""
