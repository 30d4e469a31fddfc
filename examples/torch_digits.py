"""Train a small convolutional network on handwritten digits, in PyTorch, on any number of ranks.

    ringrun -np 2 python examples/torch_digits.py

Needs scikit-learn (the digits), tqdm (the progress bar) and, for --plot, matplotlib. The code for several
ranks is in main() and in resume(); the rest is plain PyTorch.
"""

import argparse
import os
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import ringtrain.torch as hvd

WARM_UP_STEPS = 20


def main() -> None:
    options = parse_options()
    hvd.init()
    torch.set_num_threads(1)  # the work is small, and the other ranks need their cores

    # Every rank makes a network of its own; after resume() all have that of rank 0.
    torch.manual_seed(options.seed + hvd.rank())
    network = new_network()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=options.lr, momentum=0.9),
        named_parameters=network.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
    )
    accuracies = resume(options.checkpoint, network, optimizer)

    # Each rank trains on its own part of the images, another one in each epoch.
    train_data, test_data = load_data()
    sampler: DistributedSampler[Any] = DistributedSampler(
        train_data, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed
    )
    loader = DataLoader(train_data, batch_size=options.batch_size, sampler=sampler)

    total, done = options.epochs * len(loader), len(accuracies) * len(loader)
    with tqdm(total=total, initial=done, unit=" steps", disable=hvd.rank() != 0) as progress:
        for epoch in range(len(accuracies), options.epochs):
            sampler.set_epoch(epoch)
            began_s = time.perf_counter()
            for step, (images, labels) in enumerate(loader, start=epoch * len(loader)):
                set_learning_rate(optimizer, step, total, options)
                optimizer.zero_grad()
                loss = functional.cross_entropy(network(images), labels)
                loss.backward()
                optimizer.step()
                progress.update()
            images_per_s = len(train_data) / (time.perf_counter() - began_s)
            accuracies.append(accuracy_of(network, test_data))
            if hvd.rank() == 0:
                line = (
                    f"epoch {epoch + 1:2}: test accuracy {accuracies[-1]:.3f}, loss {loss.item():.4f} of the last batch"
                )
                progress.write(f"{line}, {images_per_s:,.0f} images/s")
                save(options.checkpoint, network, optimizer, accuracies)

    accuracy = accuracy_of(network, test_data)
    if hvd.rank() == 0:
        plot(options.plot, accuracies)
        print(f"test accuracy {accuracy:.3f} on {hvd.size()} ranks", flush=True)
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="images per step and rank (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of one rank (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the order (default %(default)s)")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send the gradients in 16 bits")
    parser.add_argument("--use-adasum", action="store_true", help="combine the updates of the ranks adaptively")
    parser.add_argument("--checkpoint", metavar="FILE", help="save each epoch here, and go on from here if it exists")
    parser.add_argument("--plot", metavar="FILE", help="draw the test accuracy of each epoch, such as accuracy.png")
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test data: images, float32[1, 8, 8] from 0 to 1, and labels from 0 to 9."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.reshape(-1, 1, 8, 8) / 16, labels, test_size=0.2, random_state=0)
    train_images, test_images = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    train_labels, test_labels = map(torch.tensor, parts[2:])
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def new_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, total: int, options: argparse.Namespace) -> None:
    """A batch of all ranks is larger than that of one, and so may its steps be: after a gentle start, by as much.

    Adasum finds the length of a step by itself. Either way the steps become shorter towards the end.
    """
    factor = 1.0 if options.use_adasum else 1 + (hvd.size() - 1) * min(1.0, step / WARM_UP_STEPS)
    for group in optimizer.param_groups:
        group["lr"] = options.lr * factor * (1 - step / total)


def accuracy_of(network: nn.Module, data: TensorDataset) -> float:
    """Each rank looks at its share of the images, and all count their hits together."""
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in data.tensors)
    network.eval()
    with torch.no_grad():
        hits = (network(images).argmax(dim=1) == labels).sum()
    network.train()
    return hvd.allreduce(hits, op=hvd.Sum, name="hits").item() / len(data)


def resume(path: str | None, network: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Rank 0 reads the checkpoint, if there is one, and the others get everything from rank 0.

    So it does not matter how many ranks there were before, nor where the others run. Returns the test accuracies of the
    epochs that are done.
    """
    accuracies: list[float] = []
    if hvd.rank() == 0 and path is not None and os.path.exists(path):
        checkpoint = torch.load(path)
        network.load_state_dict(checkpoint["network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        accuracies = checkpoint["accuracies"]
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    received: list[float] = hvd.broadcast_object(accuracies, root_rank=0)
    return received


def save(path: str | None, network: nn.Module, optimizer: torch.optim.Optimizer, accuracies: list[float]) -> None:
    if path is None:
        return
    checkpoint = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "accuracies": accuracies}
    torch.save(checkpoint, f"{path}.part")
    os.replace(f"{path}.part", path)  # a job that is stopped now leaves the old checkpoint or the new one, whole


def plot(path: str | None, accuracies: list[float]) -> None:
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    pyplot.plot(range(1, len(accuracies) + 1), accuracies, marker="o")
    pyplot.gca().xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    pyplot.xlabel("epoch")
    pyplot.ylabel("test accuracy")
    pyplot.title(f"Handwritten digits on {hvd.size()} ranks")
    pyplot.savefig(path)


if __name__ == "__main__":
    main()
