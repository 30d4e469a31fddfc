"""Train a small convolutional network on handwritten digits, in PyTorch, through a key-value store.

    ringrun -np 2 python examples/kvstore_torch.py --kv-store dist_sync
    ringrun -np 2 python examples/kvstore_torch.py --kv-store ringtrain

Needs scikit-learn (the digits) and tqdm (the progress bar). The Trainer is used as gluon's: it sums the gradients of
all workers, and the store updates the weights, or with --update-on-kvstore 0 each worker does.
"""

import argparse
import time

import torch
from torch.nn import functional
from torch_digits import load_data, new_network
from tqdm import tqdm

from ringtrain import kvstore


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # the work is small, and the other workers need their cores
    store = kvstore.create(options.kv_store)

    # Every worker makes a network of its own; the Trainer gives all of them that of worker 0.
    torch.manual_seed(options.seed + store.rank)
    network = new_network()
    updates_on_store = None if options.update_on_kvstore is None else bool(options.update_on_kvstore)
    numbers = {"learning_rate": options.lr, "momentum": 0.9}
    trainer = kvstore.Trainer(network.parameters(), "sgd", numbers, kvstore=store, update_on_kvstore=updates_on_store)

    train_data, test_data = load_data()
    images, labels = train_data.tensors
    shuffler = torch.Generator().manual_seed(options.seed)  # the same permutations on all workers
    with tqdm(total=options.epochs * len(labels), unit=" images", disable=store.rank != 0) as progress:
        for epoch in range(options.epochs):
            began_s = time.perf_counter()
            for batch in torch.randperm(len(labels), generator=shuffler).split(options.batch_size):
                mine = batch[store.rank :: store.num_workers]
                network.zero_grad()
                functional.cross_entropy(network(images[mine]), labels[mine], reduction="sum").backward()
                trainer.step(len(batch), ignore_stale_grad=True)
                progress.update(len(batch))
            images_per_s = len(labels) / (time.perf_counter() - began_s)
            trainer.set_learning_rate(trainer.learning_rate * options.decay)
            loss, accuracy = evaluate(network, *test_data.tensors)
            if store.rank == 0:
                line = f"epoch {epoch + 1:2}: test loss {loss:.4f}, test accuracy {accuracy:.3f}"
                progress.write(f"{line}, {images_per_s:,.0f} images/s")

    if store.rank == 0:
        print(f"test accuracy {accuracy:.3f} with {store.num_workers} workers", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kv-store", default="dist_sync", help="the type of store (default %(default)s)")
    add(
        "--update-on-kvstore",
        type=int,
        choices=(0, 1),
        help="whether the store updates the weights, or each worker does (default: as the type does)",
    )
    add("--epochs", type=int, default=8, help="passes over the training images (default %(default)s)")
    add("--batch-size", type=int, default=32, help="images per step, all workers (default %(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate (default %(default)s)")
    add("--decay", type=float, default=0.8, help="what is left of the learning rate after an epoch")
    add("--seed", type=int, default=1, help="of the weights and the order (default %(default)s)")
    return parser.parse_args()


def evaluate(network: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    with torch.no_grad():
        scores = network(images)
    return functional.cross_entropy(scores, labels).item(), (scores.argmax(dim=1) == labels).float().mean().item()


if __name__ == "__main__":
    main()
