"""Train a ResNet on CIFAR-10 in the manner of Horovod's example: averages of every step, TensorBoard, checkpoints.

    ringrun -np 2 python examples/torch_cifar10.py --data-dir cifar-10-batches-py

Needs the "python version" of CIFAR-10, https://www.cs.toronto.edu/~kriz/cifar.html, unpacked, which need not be there
on all hosts' disks at the same place: each rank reads its own. Also needs tqdm (the progress bar) and, for --log-dir,
tensorboard. The networks are those of torch_synthetic_benchmark.py.
"""

import argparse
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch_synthetic_benchmark import MODELS
from tqdm import tqdm

import ringtrain.torch as hvd

TRAINING = [f"data_batch_{number}" for number in range(1, 6)]
TEST = ["test_batch"]
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images, per channel


def main() -> None:
    options = parse_options()
    hvd.init()  # makes the GPU of this rank the current one
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    device = "cuda" if options.cuda else "cpu"
    train_loader, test_loader = new_loader(options, TRAINING), new_loader(options, TEST)

    network = MODELS[options.model]().to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(network.parameters(), lr=options.lr * hvd.size(), momentum=0.9, weight_decay=5e-4),
        named_parameters=network.named_parameters(),
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)

    # Rank 0 looks for a checkpoint; its folder need not be there on the other hosts.
    begin = int(hvd.broadcast(torch.tensor(last_epoch(options)), root_rank=0, name="begin").item())
    if begin > 0 and hvd.rank() == 0:
        checkpoint = torch.load(file_of_epoch(options, begin))
        network.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule.last_epoch = begin  # the learning rate came with the optimizer

    writer = new_writer(options.log_dir) if hvd.rank() == 0 and options.log_dir else None
    for epoch in range(begin, options.epochs):
        train_loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        began_s = time.perf_counter()
        loss, accuracy = run_epoch(network, optimizer, train_loader, f"epoch {epoch + 1}: training", device)
        images_per_s = len(train_loader.dataset) / (time.perf_counter() - began_s)  # type: ignore[arg-type]
        test_loss, test_accuracy = run_epoch(network, None, test_loader, f"epoch {epoch + 1}: test", device)
        schedule.step()
        if hvd.rank() == 0:
            line = f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy:.3f}, test accuracy {test_accuracy:.3f}"
            print(f"{line}, {images_per_s:,.0f} images/s", flush=True)
            save(network, optimizer, epoch + 1, options)
        if writer is not None:
            for name, value in {"train/loss": loss, "train/accuracy": accuracy}.items():
                writer.add_scalar(name, value, epoch)
            for name, value in {"val/loss": test_loss, "val/accuracy": test_accuracy}.items():
                writer.add_scalar(name, value, epoch)
    if writer is not None:
        writer.close()
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data-dir", type=Path, default="cifar-10-batches-py", help="the unpacked images (default %(default)s)")
    add("--model", choices=sorted(MODELS), default="resnet18", help="(default %(default)s)")
    add("--epochs", type=int, default=90, help="passes over the training images (default %(default)s)")
    add("--batch-size", type=int, default=128, help="images per step and rank (default %(default)s)")
    add("--lr", type=float, default=0.01, help="learning rate of one rank (default %(default)s)")
    add("--threads", type=int, default=1, help="of PyTorch, in each rank (default %(default)s)")
    add("--cuda", action="store_true", help="train on GPUs")
    add("--log-dir", help="write a log for TensorBoard there")
    add("--checkpoint-format", metavar="FILE", help="such as checkpoint-{epoch}.pt: save here, and go on from the last")
    add("--seed", type=int, default=42, help="of the weights (default %(default)s)")
    options = parser.parse_args()
    missing = [file for file in (*TRAINING, *TEST) if not (options.data_dir / file).is_file()]
    if missing:
        parser.error(
            f"{options.data_dir} does not have {missing[0]}. Download the images first, 163 MB, and unpack them:\n"
            "  curl -O https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz\n"
            "  tar xzf cifar-10-python.tar.gz      # makes cifar-10-batches-py"
        )
    return options


def new_loader(options: argparse.Namespace, files: list[str]) -> DataLoader[Any]:
    """Batches of this rank's share of the images, uint8[batch, 3, 32, 32], and labels, int64[batch]."""
    parts = [pickle.loads((options.data_dir / file).read_bytes(), encoding="bytes") for file in files]
    pixels = np.concatenate([part[b"data"] for part in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([part[b"labels"] for part in parts]).astype(np.int64)
    data = TensorDataset(torch.from_numpy(pixels), torch.from_numpy(labels))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    return DataLoader(data, options.batch_size, sampler=sampler)


def run_epoch(
    network: nn.Module, optimizer: torch.optim.Optimizer | None, loader: DataLoader[Any], title: str, device: str
) -> tuple[float, float]:
    """Train, or only look where there is no optimizer. Returns the loss and the accuracy of all ranks."""
    is_training = optimizer is not None
    network.train(is_training)
    losses, hits = Metric("loss"), Metric("accuracy")
    with torch.set_grad_enabled(is_training), tqdm(loader, title, disable=hvd.rank() != 0) as bar:
        for pixels, labels in bar:
            images, labels = normalised(pixels.to(device)), labels.to(device)
            scores = network(flipped_and_moved(images) if is_training else images)
            loss = functional.cross_entropy(scores, labels)
            losses.update(loss)
            hits.update((scores.argmax(dim=1) == labels).float().mean())
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            bar.set_postfix(loss=losses.average, accuracy=hits.average)
    return losses.average, hits.average


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """Float32 of about -2 to 2 for uint8."""
    mean, deviation = (torch.tensor(values, device=pixels.device).reshape(3, 1, 1) for values in (MEAN, DEVIATION))
    return (pixels.float() / 255 - mean) / deviation


def flipped_and_moved(images: torch.Tensor) -> torch.Tensor:
    """Each image is mirrored or not, and the batch moved by up to four pixels."""
    mirrored = torch.rand(len(images), device=images.device) < 0.5
    images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    down, right = (int(torch.randint(0, 9, ())) for _ in range(2))
    return functional.pad(images, (4, 4, 4, 4))[:, :, down : down + 32, right : right + 32]


class Metric:
    """A number of each step, averaged over the ranks at once and over the steps so far."""

    def __init__(self, name: str):
        self._name = name
        self._sum = 0.0
        self._count = 0

    def update(self, value: torch.Tensor) -> None:
        self._sum += float(hvd.allreduce(value.detach().cpu(), name=self._name))
        self._count += 1

    @property
    def average(self) -> float:
        return self._sum / self._count


def new_writer(folder: str) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def file_of_epoch(options: argparse.Namespace, epoch: int) -> Path:
    return Path(options.checkpoint_format.format(epoch=epoch))


def last_epoch(options: argparse.Namespace) -> int:
    """The last epoch of which rank 0 has a checkpoint, or 0."""
    if options.checkpoint_format is None or hvd.rank() != 0:
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
