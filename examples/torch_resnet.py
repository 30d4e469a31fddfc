"""Train a ResNet in the manner of Horovod's ImageNet example: warm-up, several batches for each update, metrics of all.

    ringrun -np 2 python examples/torch_resnet.py

Needs scikit-learn, whose handwritten digits, enlarged, stand for ImageNet, and what torch_synthetic_benchmark.py needs,
from which the networks are. To learn digits only, torch_digits.py is the better way.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch_synthetic_benchmark import MODELS

import ringtrain.torch as hvd


def main() -> None:
    options = parse_options()
    hvd.init()
    torch.set_num_threads(1)  # the other ranks need their cores
    torch.manual_seed(options.seed)
    train_data, test_data = load_data(options.image_size)
    sampler: DistributedSampler[Any] = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    # The batches of one update are read as one and taken apart in `train`.
    loader = DataLoader(train_data, options.batch_size * options.batches_per_allreduce, sampler=sampler)

    network = MODELS[options.model]()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=options.base_lr, momentum=0.9, weight_decay=5e-5),
        named_parameters=network.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=options.batches_per_allreduce,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
        gradient_predivide_factor=options.gradient_predivide_factor,
    )

    # Rank 0 looks for a checkpoint; its folder need not be there on the other hosts.
    begin = hvd.broadcast_object(last_epoch(options), root_rank=0)
    if begin > 0 and hvd.rank() == 0:
        checkpoint = torch.load(file_of_epoch(options, begin))
        network.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(begin, options.epochs):
        sampler.set_epoch(epoch)
        began_s = time.perf_counter()
        loss, accuracy = train(network, optimizer, loader, epoch, options)
        images_per_s = len(train_data) / (time.perf_counter() - began_s)
        test_accuracy = validate(network, test_data, options)
        if hvd.rank() == 0:
            line = f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.3f}, test accuracy {test_accuracy:.3f}"
            print(f"{line}, {images_per_s:,.0f} images/s", flush=True)
            save(network, optimizer, epoch + 1, options)
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), default="resnet18", help="(default %(default)s)")
    add("--image-size", type=int, default=32, help="height and width, in pixels (default %(default)s)")
    add("--epochs", type=int, default=3, help="passes over the training images (default %(default)s)")
    add("--batch-size", type=int, default=16, help="images of a backward pass and rank (default %(default)s)")
    add("--batches-per-allreduce", type=int, default=1, help="backward passes for each update (default %(default)s)")
    add("--base-lr", type=float, default=0.0125, help="learning rate of one rank and batch (default %(default)s)")
    add("--warmup-epochs", type=float, default=1, help="until all of the learning rate is used (default %(default)s)")
    add("--gradient-predivide-factor", type=float, default=1.0, help="divide by it before the sum, not after")
    add("--fp16-allreduce", action="store_true", help="send the gradients in 16 bits")
    add("--use-adasum", action="store_true", help="combine the updates of the ranks adaptively")
    add("--checkpoint-format", metavar="FILE", help="such as checkpoint-{epoch}.pt: save here, and go on from the last")
    add("--seed", type=int, default=42, help="of the weights (default %(default)s)")
    return parser.parse_args()


def load_data(image_size: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test data: images, float32[3, size, size] from 0 to 1, and labels from 0 to 9."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    large = functional.interpolate(small, (image_size, image_size)).expand(-1, 3, -1, -1)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0)
    answers = torch.tensor(labels)
    return TensorDataset(large[train], answers[train]), TensorDataset(large[test], answers[test])


def train(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    epoch: int,
    options: argparse.Namespace,
) -> tuple[float, float]:
    """One epoch. Returns the loss and the accuracy, averaged over all ranks."""
    network.train()
    losses, hits = Metric("loss"), Metric("accuracy")
    for number, (images, labels) in enumerate(loader):
        set_learning_rate(optimizer, epoch + number / len(loader), options)
        optimizer.zero_grad()
        parts = list(zip(images.split(options.batch_size), labels.split(options.batch_size), strict=True))
        for part_of_images, part_of_labels in parts:
            results = network(part_of_images)
            loss = functional.cross_entropy(results, part_of_labels)
            losses.update(loss)
            hits.update((results.argmax(dim=1) == part_of_labels).float().mean())
            (loss / len(parts)).backward()  # gradients of several passes are added up
        optimizer.step()
    return losses.average(), hits.average()


def validate(network: nn.Module, data: TensorDataset, options: argparse.Namespace) -> float:
    """The share of the test images that are recognised; each rank looks at some."""
    network.eval()
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in data.tensors)
    with torch.no_grad():
        found = [network(part).argmax(dim=1) for part in images.split(options.batch_size)]
    hits = (torch.cat(found) == labels).sum()
    return hvd.allreduce(hits, op=hvd.Sum, name="hits").item() / len(data)


class Metric:
    """A number of each step, averaged over the steps, and over the ranks when it is asked for."""

    def __init__(self, name: str):
        self._name = name
        self._sum = torch.tensor(0.0)
        self._count = torch.tensor(0.0)

    def update(self, value: torch.Tensor) -> None:
        self._sum += value.detach()
        self._count += 1

    def average(self) -> float:
        total, count = hvd.grouped_allreduce([self._sum, self._count], op=hvd.Sum, name=self._name)
        return float(total / count)


def set_learning_rate(optimizer: torch.optim.Optimizer, epochs: float, options: argparse.Namespace) -> None:
    """Larger batches allow larger steps, once the weights are not random any more (Goyal et al., arXiv 1706.02677)."""
    most = options.batches_per_allreduce * (1 if options.use_adasum else hvd.size())
    factor = 1 + (most - 1) * min(1.0, epochs / options.warmup_epochs) if options.warmup_epochs else most
    if epochs >= 0.8 * options.epochs:
        factor /= 10
    for group in optimizer.param_groups:
        group["lr"] = options.base_lr * factor


def file_of_epoch(options: argparse.Namespace, epoch: int) -> Path:
    return Path(options.checkpoint_format.format(epoch=epoch))


def last_epoch(options: argparse.Namespace) -> int:
    """The last epoch of which there is a checkpoint, or 0."""
    if options.checkpoint_format is None:
        return 0
    return next((epoch for epoch in range(options.epochs, 0, -1) if file_of_epoch(options, epoch).exists()), 0)


def save(network: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, options: argparse.Namespace) -> None:
    if options.checkpoint_format is None:
        return
    file = file_of_epoch(options, epoch)
    unfinished = file.with_name(file.name + ".part")
    torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    os.replace(unfinished, file)  # a job that is stopped now leaves all of a checkpoint or none


if __name__ == "__main__":
    main()
