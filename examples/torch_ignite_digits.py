"""Train on handwritten digits with PyTorch-Ignite, whose own backend for Horovod finds ringtrain.

    ringrun --horovod -np 2 python examples/torch_ignite_digits.py

Needs scikit-learn (the digits) and pytorch-ignite. Nothing here knows of ringtrain: --horovod gives its name to
`import horovod`, which ignite does by itself.
"""

import argparse
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.metrics import Accuracy, Average
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # the work is small, and the other ranks need their cores
    with idist.Parallel(backend="horovod") as parallel:
        parallel.run(train, options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images (default %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, of all ranks (default %(default)s)"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default %(default)s)")
    return parser.parse_args()


def train(local_rank: int, options: argparse.Namespace) -> None:
    """The training of each rank. Only the three `auto_` functions are for several ranks."""
    train_data, test_data = load_data()
    train_loader = idist.auto_dataloader(train_data, batch_size=options.batch_size, shuffle=True)
    test_loader = idist.auto_dataloader(test_data, batch_size=options.batch_size)

    torch.manual_seed(1 + idist.get_rank())  # auto_model gives all ranks the network of rank 0
    network = idist.auto_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = idist.auto_optim(torch.optim.SGD(network.parameters(), lr=options.lr, momentum=0.9))

    def take_step(engine: Engine, batch: Any) -> float:
        images, labels = (tensor.to(idist.device()) for tensor in batch)
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(take_step)
    Average().attach(trainer, "loss")  # of all ranks
    evaluator = create_supervised_evaluator(network, metrics={"accuracy": Accuracy()}, device=idist.device())

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        evaluator.run(test_loader)  # the accuracy is that of the images of all ranks
        if idist.get_rank() == 0:
            loss, accuracy = engine.state.metrics["loss"], evaluator.state.metrics["accuracy"]
            images_per_s = len(train_data) / (engine.state.times["EPOCH_COMPLETED"] or 1)
            line = f"epoch {engine.state.epoch:2}: loss {loss:.4f}, test accuracy {accuracy:.3f}"
            print(f"{line}, {images_per_s:,.0f} images/s", flush=True)

    trainer.run(train_loader, max_epochs=options.epochs)
    if idist.get_rank() == 0:
        accuracy = evaluator.state.metrics["accuracy"]
        print(f"test accuracy {accuracy:.3f} on {idist.get_world_size()} ranks", flush=True)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test data: images, float32[64] from 0 to 1, and labels from 0 to 9."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0)
    train_images, test_images = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    train_labels, test_labels = map(torch.tensor, parts[2:])
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


if __name__ == "__main__":
    main()
