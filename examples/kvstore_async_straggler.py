"""Train beside a slow worker, in step with it and without waiting for it, in NumPy, with servers.

    ringlaunch -n 2 -s 1 --launcher local python examples/kvstore_async_straggler.py --plot straggler.png

Needs scikit-learn (the digits) and, for --plot, matplotlib. The last worker sleeps before each step. In dist_sync all
are as slow as this one; in dist_async the others go on, and the slow one adds what it can.
"""

import argparse
import time

import numpy as np
from numpy_digits import forward, gradients_of, load_data, new_network

from ringtrain import kvstore
from ringtrain.optim import SGD

# The time of a step, and the accuracy of the network then.
Progress = list[tuple[float, float]]


def main() -> None:
    options = parse_options()
    of_kinds = {}
    for kind in ("dist_sync", "dist_async"):
        store = kvstore.create(kind)
        steps, of_kinds[kind] = train(store, options)
        if store.rank == 0:
            accuracy, images_per_s = of_kinds[kind][-1][1], steps * options.batch_size / options.seconds
            line = f"{kind}: {steps} steps of worker 0 in {options.seconds:g} s, accuracy {accuracy:.3f}"
            print(f"{line}, {images_per_s:,.0f} images/s", flush=True)
    if store.rank == 0 and options.plot:
        plot(of_kinds, options.plot)


def train(store: kvstore.KVStore, options: argparse.Namespace) -> tuple[int, Progress]:
    """The steps of this worker, and its progress."""
    network = new_network(np.random.default_rng(options.seed))
    keys = list(range(len(network)))
    store.set_optimizer(SGD(options.lr, momentum=0.9))
    store.broadcast(keys, network, out=network)

    train_images, test_images, train_labels, test_labels = load_data()
    mine = kvstore.part(len(train_labels), store.num_workers, store.rank)
    images, labels = train_images[mine], train_labels[mine]
    chance = np.random.default_rng(options.seed + store.rank)
    is_slow = store.rank == store.num_workers - 1
    store.barrier()
    begin, steps, progress = time.monotonic(), 0, [(0.0, 0.0)]
    while time.monotonic() < begin + options.seconds:
        if is_slow:
            time.sleep(options.delay_ms / 1000)
        batch = chance.integers(0, len(labels), options.batch_size)
        gradients = gradients_of(network, images[batch], labels[batch], batch_size=len(batch) * store.num_workers)
        store.pushpull(keys, gradients, out=network)
        steps += 1
        now = time.monotonic() - begin
        if store.rank == 0 and now > progress[-1][0] + 0.1:
            _, probabilities = forward(network, test_images)
            progress.append((now, float((probabilities.argmax(axis=1) == test_labels).mean())))
    store.join()  # workers that still have a step count this one with zeros
    return steps, progress


def plot(of_kinds: dict[str, Progress], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for kind, points in of_kinds.items():
        pyplot.plot([at for at, _ in points], [accuracy for _, accuracy in points], label=kind)
    pyplot.xlabel("seconds")
    pyplot.ylabel("test accuracy")
    pyplot.legend()
    pyplot.savefig(file, dpi=150)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=5.0, help="for each type of store (default %(default)s)")
    add("--delay-ms", type=float, default=50.0, help="of the slow worker, before each step (default %(default)s)")
    add("--batch-size", type=int, default=32, help="images per step of a worker (default %(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate (default %(default)s)")
    add("--seed", type=int, default=1, help="of the weights and the order (default %(default)s)")
    add("--plot", metavar="FILE.png", help="draw the accuracy against time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
