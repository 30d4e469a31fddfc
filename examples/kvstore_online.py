"""Learn from a stream while trainers die and come back, in NumPy, with servers that hold the network meanwhile.

    ringlaunch -n 3 -s 2 --launcher local --restarts 3 --min-workers 1 python examples/kvstore_online.py --kill 1

Needs scikit-learn (the digits). Each trainer classifies what comes, learns from it, and says how often it was right of
late. With --kill the trainer of that rank kills itself in the middle: the others do not wait for it, and the trainer
started in its place goes on with the network as it is by then.
"""

import argparse
import os
import signal
import time

import numpy as np
from numpy_digits import forward, gradients_of, load_data, new_network

from ringtrain import kvstore
from ringtrain.optim import SGD


def main() -> None:
    options = parse_options()
    store = kvstore.create("dist_async", elastic=True)
    network = new_network(np.random.default_rng(options.seed))
    keys = list(range(len(network)))
    # A trainer that comes back gets the network of the servers from all three, and waits for none.
    store.set_optimizer(SGD(options.lr))
    store.init(keys, network)
    store.pull(keys, out=network)
    came = "came back" if store.is_recovery else "began"

    images, _, labels, _ = load_data()
    chance = np.random.default_rng()
    right, losses = [rate_of(network, images, labels)[0]], [0.0]
    print(f"trainer {store.rank} {came}: right {right[0]:.0%} of the time", flush=True)
    begin, said_at, said_of = time.monotonic(), time.monotonic(), 1
    while time.monotonic() < begin + options.seconds:
        batch = chance.integers(0, len(labels), options.batch_size)
        gradients = gradients_of(network, images[batch], labels[batch], batch_size=len(batch))
        rate, loss = rate_of(network, images[batch], labels[batch])
        right.append(rate)
        losses.append(loss)
        store.pushpull(keys, gradients, out=network)
        time.sleep(0.01)  # until the next ones come
        if (now := time.monotonic()) > said_at + 1:
            images_per_s = (len(right) - said_of) * options.batch_size / (now - said_at)
            said_at, said_of = now, len(right)
            line = (
                f"trainer {store.rank}: right {np.mean(right[-50:]):.0%} of the time, loss {np.mean(losses[-50:]):.4f}"
            )
            print(f"{line}, {images_per_s:,.0f} images/s", flush=True)
        if store.rank == options.kill and not store.is_recovery and time.monotonic() > begin + options.seconds / 3:
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"trainer {store.rank} has done {len(right) - 1} steps: right {np.mean(right[-50:]):.0%}", flush=True)


def rate_of(network: list[np.ndarray], images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Returns how many of these it classifies rightly, and the loss."""
    _, probabilities = forward(network, images)
    loss = -np.log(probabilities[np.arange(len(labels)), labels]).mean()
    return float((probabilities.argmax(axis=1) == labels).mean()), float(loss)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=9.0, help="of each trainer (default %(default)s)")
    add("--kill", type=int, metavar="RANK", help="the trainer of this rank kills itself after a third of its time")
    add("--batch-size", type=int, default=16, help="images of a step (default %(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate (default %(default)s)")
    add("--seed", type=int, default=1, help="of the first weights (default %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
