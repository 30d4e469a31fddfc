"""A train.py as people write it: data for each rank, mixed precision, checkpoints, TensorBoard, a picture.

    ringrun -np 2 python examples/torch_train.py --checkpoint train.pt --log-dir runs/train --plot train.png

Started again with more epochs, it goes on from the checkpoint, also on another number of ranks. If its time is over, as
a signal says, it saves within the epoch and ends with exit code 75; started again on as many ranks, it comes to the
same numbers as without that. Needs scikit-learn (the handwritten digits) and, for --log-dir, tensorboard; for --plot,
matplotlib. Several ranks need the lines with `hvd`; the rest is a script for one process.
"""

import argparse
import itertools
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ringtrain.torch as hvd
from ringtrain.training.loggers import TensorBoardLogger


class Progress(NamedTuple):
    """How far the training is.

    `history` has the loss and the test accuracy of each whole epoch, `images` counts those of all ranks in the epoch
    after, and `losses` has the sum of its losses on each rank.
    """

    history: list[tuple[float, float]]
    images: int
    losses: list[float]


def main() -> None:
    options = parse_options()
    hvd.init()  # makes the GPU of this rank the current one
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    train_data, test_data = load_data()
    sampler: DistributedSampler[Any] = DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train_data, options.batch_size, sampler=sampler)

    model = new_model().to(device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=options.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / options.warm_up))
    history, images_done, losses = resume(options.checkpoint, model, optimizer, schedule)
    if history and hvd.rank() == 0:
        print(f"{options.checkpoint} has {len(history)} of {options.epochs} epochs", flush=True)

    logger = TensorBoardLogger(options.log_dir) if options.log_dir else None
    for epoch in range(len(history), options.epochs):
        sampler.set_epoch(epoch)  # another order, and other images for each rank
        model.train()
        first, began_s = images_done // (options.batch_size * hvd.size()), time.perf_counter()
        total = torch.tensor(losses[hvd.rank()] if len(losses) == hvd.size() else sum(losses) / max(1, len(losses)))
        for step, (images, labels) in itertools.islice(enumerate(loader, start=1), first, None):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=options.amp):
                loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            hvd.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            schedule.step()
            total += loss.detach().cpu()
            if hvd.preempted():  # on all ranks, if any of them was told
                losses = hvd.allgather(total[None]).tolist()
                if hvd.rank() == 0:
                    progress = Progress(history, step * options.batch_size * hvd.size(), losses)
                    save(options.checkpoint, model, optimizer, schedule, progress)
                hvd.exit_preempted()
        images_per_s = len(train_data) * (1 - first / len(loader)) / (time.perf_counter() - began_s)
        images_done, losses = 0, []
        mean = hvd.allreduce(total / len(loader), name="loss").item()  # of all ranks
        accuracy = accuracy_of(model, test_data, device)
        history.append((mean, accuracy))
        if logger is not None:
            logger.log({"loss": mean, "accuracy": accuracy, "images_per_s": images_per_s}, (epoch + 1) * len(loader))
        if hvd.rank() == 0:
            line = f"epoch {epoch + 1:2}: loss {mean:.4f}, test accuracy {accuracy:.3f}"
            print(f"{line}, {images_per_s:,.0f} images/s", flush=True)
            save(options.checkpoint, model, optimizer, schedule, Progress(history, 0, []))
    if logger is not None:
        logger.close()
    if hvd.rank() == 0 and options.plot:
        plot(options.plot, history)
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=int, default=8, help="passes over the training images (default %(default)s)")
    add("--batch-size", type=int, default=32, help="images per step and rank (default %(default)s)")
    add("--lr", type=float, default=2e-3, help="learning rate, after the warm-up (default %(default)s)")
    add("--warm-up", type=int, default=50, help="steps until then (default %(default)s)")
    add("--amp", action="store_true", help="compute in bfloat16 where that is enough: mixed precision")
    add("--checkpoint", type=Path, metavar="FILE", help="save each epoch here, and go on from here if it exists")
    add("--log-dir", metavar="FOLDER", help="write a log for TensorBoard there")
    add("--plot", metavar="FILE", help="draw loss and accuracy of each epoch, such as train.png")
    add("--threads", type=int, default=1, help="of PyTorch, in each rank (default %(default)s)")
    add("--seed", type=int, default=1, help="of the weights (default %(default)s)")
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the test data: images, float32[1, 8, 8] from 0 to 1, and labels from 0 to 9."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    answers = torch.tensor(labels)
    return TensorDataset(pixels[:1440], answers[:1440]), TensorDataset(pixels[1440:], answers[1440:])


def new_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def accuracy_of(model: nn.Module, data: TensorDataset, device: str) -> float:
    """Each rank looks at its share of the images, and all count their hits together."""
    images, labels = (tensor[hvd.rank() :: hvd.size()].to(device) for tensor in data.tensors)
    model.eval()
    with torch.no_grad():
        hits = (model(images).argmax(dim=1) == labels).sum()
    return hvd.allreduce(hits.cpu(), op=hvd.Sum, name="hits").item() / len(data)


def resume(file: Path | None, model: nn.Module, optimizer: Any, schedule: Any) -> Progress:
    """Rank 0 reads the checkpoint, if there is one, and the others get everything from rank 0."""
    progress = Progress([], 0, [])
    if hvd.rank() == 0 and file is not None and file.exists():
        checkpoint = torch.load(file)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        schedule.load_state_dict(checkpoint["schedule"])
        progress = Progress(*(checkpoint[name] for name in Progress._fields))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule.load_state_dict(hvd.broadcast_object(schedule.state_dict(), root_rank=0))
    received: Progress = hvd.broadcast_object(progress, root_rank=0)
    return received


def save(file: Path | None, model: nn.Module, optimizer: Any, schedule: Any, progress: Progress) -> None:
    if file is None:
        return
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    unfinished = file.with_name(f"{file.name}.part")
    torch.save({**states, **progress._asdict()}, unfinished)
    os.replace(unfinished, file)  # a job that is stopped now leaves the old checkpoint or the new one, whole


def plot(path: str, history: list[tuple[float, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    epochs = range(1, len(history) + 1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4))
    left.plot(epochs, [loss for loss, _ in history], marker="o")
    left.set(xlabel="epoch", ylabel="loss", yscale="log")
    right.plot(epochs, [accuracy for _, accuracy in history], marker="o")
    right.set(xlabel="epoch", ylabel="test accuracy")
    figure.suptitle(f"Handwritten digits on {hvd.size()} ranks")
    figure.savefig(path)


if __name__ == "__main__":
    main()
