"""Train a small network on handwritten digits, in NumPy, through a key-value store.

    ringrun -np 2 python examples/kvstore_digits.py --kv-store dist_sync
    python examples/kvstore_digits.py --kv-store local

Needs scikit-learn (the digits) and tqdm (the progress bar). Each worker pushes the gradients of its share of a batch
and pulls the weights, or with --update-on-kvstore 0 the sums of the gradients. With a distributed store the same
network comes out however many workers share a batch.
"""

import argparse
import time

import numpy as np
from numpy_digits import forward, gradients_of, load_data, new_network
from tqdm import tqdm

from ringtrain import kvstore
from ringtrain.optim import SGD

MOMENTUM = 0.9


def main() -> None:
    options = parse_options()
    store = kvstore.create(options.kv_store)
    updates_on_store = store.update_on_kvstore_default
    if options.update_on_kvstore is not None:
        updates_on_store = bool(options.update_on_kvstore)
    if options.gc_type != "none":
        threshold = {"threshold": options.gc_threshold} if options.gc_type.endswith("bit") else {}
        store.set_gradient_compression({"type": options.gc_type, **threshold})

    # A key for each array. Every worker makes a network of its own; after the broadcast all have that of worker 0.
    # Gradients that are compressed have to be float32.
    random = np.random.default_rng(options.seed + store.rank)
    network = [array.astype("float64" if options.gc_type == "none" else "float32") for array in new_network(random)]
    keys = list(range(len(network)))
    store.broadcast(keys, network, out=network)

    optimizer = SGD(options.lr, momentum=MOMENTUM)
    if updates_on_store:
        store.set_optimizer(optimizer)

    train_images, test_images, train_labels, test_labels = load_data()
    shuffler = np.random.default_rng(options.seed)  # the same permutations on all workers
    with tqdm(total=options.epochs * len(train_labels), unit=" images", disable=store.rank != 0) as progress:
        for epoch in range(options.epochs):
            permutation, began_s = shuffler.permutation(len(train_labels)), time.perf_counter()
            for start in range(0, len(permutation), options.batch_size):
                batch = permutation[start : start + options.batch_size]
                mine = batch[store.rank :: store.num_workers]
                gradients = gradients_of(network, train_images[mine], train_labels[mine], batch_size=len(batch))
                gradients = [one.astype(weights.dtype) for one, weights in zip(gradients, network, strict=True)]
                if updates_on_store:
                    store.pushpull(keys, gradients, out=network)
                else:
                    store.pushpull(keys, gradients)
                    optimizer.step(network, gradients)
                progress.update(len(batch))
            images_per_s = len(train_labels) / (time.perf_counter() - began_s)
            loss, accuracy = evaluate(network, test_images, test_labels)
            if store.rank == 0:
                line = f"epoch {epoch + 1:2}: test loss {loss:.6f}, test accuracy {accuracy:.3f}"
                progress.write(f"{line}, {images_per_s:,.0f} images/s")

    if store.rank == 0:
        where = "the store" if updates_on_store else "each worker"
        print(f"test accuracy {accuracy:.3f} with {store.num_workers} workers, updated by {where}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kv-store", default="dist_sync", help="the type of store (default %(default)s)")
    add("--gc-type", default="none", help="compress gradients: 2bit, 1bit, fp16 or bf16 (default %(default)s)")
    add("--gc-threshold", type=float, default=0.1, help="of 2bit and 1bit (default %(default)s)")
    add(
        "--update-on-kvstore",
        type=int,
        choices=(0, 1),
        help="whether the store updates the weights, or each worker does (default: as the type does)",
    )
    add("--epochs", type=int, default=20, help="passes over the training images (default %(default)s)")
    add("--batch-size", type=int, default=64, help="images per step, all workers (default %(default)s)")
    add("--lr", type=float, default=0.1, help="learning rate (default %(default)s)")
    add("--seed", type=int, default=1, help="of the weights and the order (default %(default)s)")
    return parser.parse_args()


def evaluate(network: list[np.ndarray], images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    _, probabilities = forward(network, images)
    loss = -np.log(probabilities[np.arange(len(labels)), labels]).mean()
    return float(loss), float((probabilities.argmax(axis=1) == labels).mean())


if __name__ == "__main__":
    main()
