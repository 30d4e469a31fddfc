"""Train on handwritten digits with PyTorch Lightning 1.9, whose own strategy for Horovod finds ringtrain.

    ringrun --horovod -np 2 python examples/torch_lightning_digits.py

Needs scikit-learn (the digits) and pytorch-lightning>=1.9,<2; Lightning 2 has no strategy for Horovod any more. Nothing
here knows of ringtrain: --horovod gives its name to `import horovod`, which Lightning does, too.
"""

import argparse
import time
from typing import Any

import horovod.torch as hvd
import torch
from pytorch_lightning import LightningModule, Trainer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningModule):
    """A small network with what Lightning asks for; the strategy makes its optimizer a distributed one."""

    def __init__(self, lr: float):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores, float32[batch, 10], of images, float32[batch, 64]."""
        scores: torch.Tensor = self.layers(images)
        return scores

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        self.began_s = time.perf_counter()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: list[torch.Tensor], index: int) -> None:
        self.ended_s = time.perf_counter()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self(images).argmax(dim=1) == labels).float().mean())

    def on_train_epoch_end(self) -> None:
        """The validation of the epoch has ended, too."""
        loss, accuracy = average_of("loss", self.trainer), average_of("accuracy", self.trainer)
        if self.trainer.global_rank == 0:
            loader: Any = self.trainer.train_dataloader
            images_per_s = len(loader.dataset) / (self.ended_s - self.began_s)
            line = f"epoch {self.current_epoch + 1:2}: loss {loss:.4f}, test accuracy {accuracy:.3f}"
            print(f"{line}, {images_per_s:,.0f} images/s", flush=True)


def average_of(name: str, trainer: Trainer) -> float:
    """Returns what `self.log` was told last, over all ranks; sync_dist=True of self.log asks for torch.distributed."""
    return float(hvd.allreduce(trainer.callback_metrics[name], name=name))


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # the work is small, and the other ranks need their cores
    torch.manual_seed(1)
    train_data, test_data = load_data()
    # Lightning gives the loaders a DistributedSampler, and multiplies the learning rate by the number of ranks.
    train_loader = DataLoader(train_data, options.batch_size, shuffle=True)
    test_loader = DataLoader(test_data, options.batch_size)
    trainer = Trainer(
        strategy="horovod",
        accelerator="cpu",
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(options.lr), train_loader, test_loader)
    accuracy = average_of("accuracy", trainer)
    if trainer.global_rank == 0:
        print(f"test accuracy {accuracy:.3f} on {trainer.world_size} ranks", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one rank (default %(default)s)")
    return parser.parse_args()


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test data: images, float32[64] from 0 to 1, and labels from 0 to 9."""
    images, labels = load_digits(return_X_y=True)
    parts: list[Any] = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
    train_images, test_images = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    train_labels, test_labels = map(torch.tensor, parts[2:])
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


if __name__ == "__main__":
    main()
