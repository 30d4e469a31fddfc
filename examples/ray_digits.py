"""Train a small network on handwritten digits, in NumPy, on actors of Ray.

    python examples/ray_digits.py --workers 2
    python examples/ray_digits.py --workers 2 --elastic --kill 3

Needs ringtrain[ray] and scikit-learn (the digits). It joins the cluster that RAY_ADDRESS names, or starts one on this
host. With --elastic the job outlives its actors, of which --kill ends some; the same network comes out.
"""

from __future__ import annotations

import argparse
import os
import signal

import numpy as np
import ray
from sklearn.datasets import load_digits

import ringtrain as hvd
from ringtrain.optim import SGD
from ringtrain.ray import RayExecutor

HIDDEN = 64


def main() -> None:
    options = parse_options()
    ray.init()
    if options.elastic:  # with fewer ranks the job waits for others
        executor = RayExecutor(min_workers=options.workers, max_workers=options.workers)
    else:
        executor = RayExecutor(num_workers=options.workers)
    executor.start()
    digits = load_digits()
    images, labels = digits.data / 16.0, digits.target
    results = executor.run(train, args=[images, labels, options.epochs, options.batch_size, options.kill])
    executor.shutdown()
    for rank, (accuracy, generation, pid) in enumerate(results):
        print(f"rank {rank} (pid {pid}): test accuracy {accuracy:.3f} after {generation} generation(s)")


def train(images: np.ndarray, labels: np.ndarray, epochs: int, batch_size: int, kills: int) -> tuple[float, int, int]:
    """Returns the accuracy on the last 360 images, how many generations there were, and the pid."""
    hvd.init()
    rng = np.random.default_rng(0)
    network = [rng.normal(0, 0.1, (64, HIDDEN)), rng.normal(0, 0.1, (HIDDEN, 10))]
    state = hvd.elastic.ObjectState(network=network, step=0, kills=0)
    train_images, train_labels = images[:-360], labels[:-360]
    steps = len(train_labels) // batch_size

    @hvd.elastic.run
    def run(state: hvd.elastic.ObjectState) -> None:
        optimizer = hvd.DistributedOptimizer(SGD(0.5), op=hvd.Sum)
        while state.step < epochs * steps:
            epoch, number = divmod(state.step, steps)
            order = np.random.default_rng(epoch).permutation(len(train_labels))
            batch = order[number * batch_size : (number + 1) * batch_size]
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.step(
                state.network, gradients_of(state.network, train_images[mine], train_labels[mine], batch_size)
            )
            state.step += 1
            is_due = state.kills < kills and state.step > (state.kills + 1) * epochs * steps // (kills + 1)
            state.kills += is_due
            state.commit()
            if is_due and hvd.size() > 1 and hvd.rank() == hvd.size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    run(state)
    hidden = np.maximum(images[-360:] @ state.network[0], 0)
    accuracy = np.mean((hidden @ state.network[1]).argmax(1) == labels[-360:])
    return float(accuracy), hvd.elastic.generation(), os.getpid()


def gradients_of(
    network: list[np.ndarray], images: np.ndarray, labels: np.ndarray, batch_size: int
) -> list[np.ndarray]:
    """Returns those of this rank's share: the sum over all ranks is the mean over the batch."""
    hidden = np.maximum(images @ network[0], 0)
    scores = hidden @ network[1]
    errors = np.exp(scores - scores.max(1, keepdims=True))
    errors /= errors.sum(1, keepdims=True)
    errors[np.arange(len(labels)), labels] -= 1
    errors /= batch_size
    return [images.T @ ((errors @ network[1].T) * (hidden > 0)), hidden.T @ errors]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="ranks")
    parser.add_argument("--elastic", action="store_true", help="go on when actors are lost")
    parser.add_argument("--kill", type=int, default=0, metavar="N", help="end the last rank N times; with --elastic")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    if options.kill and not options.elastic:
        parser.error("--kill needs --elastic")
    return options


if __name__ == "__main__":
    main()
