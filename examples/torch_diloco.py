"""Train a network to write like Python's documentation on ranks that train alone and synchronise every 25 steps.

    ringrun -np 2 python examples/torch_diloco.py --islands rank

The text is what help() knows about the language; it ships with Python. On hosts with slow links between them leave out
--islands: the ranks of each host then average every step. Needs matplotlib for --plot. With --checkpoint each
rank saves its state, and the same command resumes from there with the same bits.
"""

import argparse
import math
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import ringtrain.torch as hvd

CHARACTERS = 128  # of ASCII
CONTEXT = 16  # characters that the network sees before the next one


def main() -> None:
    options = parse_options()
    hvd.init()
    torch.set_num_threads(1)  # the work is small, and the other ranks need their cores
    torch.manual_seed(options.seed)  # the same network on all ranks
    network = new_network(options.width)
    optimizer = hvd.DiLoCo(
        torch.optim.AdamW(network.parameters(), lr=options.lr),
        every=options.every,
        named_parameters=network.named_parameters(),
        fragments=options.fragments,
        overlap=options.overlap,
        compression=getattr(hvd.Compression, options.compression),
        islands=options.islands,
    )
    train_text, test_text = load_text()
    losses = resume(options.checkpoint, network, optimizer)
    began_s = time.perf_counter()
    while optimizer.inner_steps < options.steps:
        optimizer.zero_grad()
        loss_of(network, draw_batch(train_text, optimizer.inner_steps, options)).backward()
        optimizer.step()  # every now and then it waits for the other islands
        if optimizer.inner_steps % options.every == 0:
            losses.append(loss_of(network, test_text).item() / math.log(2))
            if hvd.rank() == 0:
                bits = f"{losses[-1]:.3f} bits per character"
                print(f"step {optimizer.inner_steps:4}: test loss {bits} of rank 0", flush=True)
            save(options.checkpoint, network, optimizer, losses)
    seconds = time.perf_counter() - began_s
    optimizer.outer_step()  # all ranks end with the same network
    hvd.check_replicas(network.state_dict())
    final = loss_of(network, test_text).item() / math.log(2)
    if hvd.rank() == 0:
        plot(options.plot, losses, options)
        print(f"test loss {final:.3f} bits per character on {hvd.size()} ranks after {seconds:.0f} s", flush=True)
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of each rank (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="characters per step and rank (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the two hidden layers (default %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of a rank (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the batches (default %(default)s)")
    parser.add_argument("--every", type=int, default=25, help="steps between two outer steps (default %(default)s)")
    parser.add_argument("--fragments", type=int, default=2, help="parts that are sent in turn (default %(default)s)")
    parser.add_argument("--overlap", type=int, default=3, help="steps while a part is sent (default %(default)s)")
    parser.add_argument("--compression", choices=["none", "fp16", "bf16", "int8", "int4"], default="int8")
    parser.add_argument("--islands", choices=["host", "rank", "links"], default="host", help="default %(default)s")
    parser.add_argument("--checkpoint", metavar="FILE", help="save the states in FILE.0, FILE.1, ... and resume")
    parser.add_argument("--plot", metavar="FILE", help="draw the test loss, such as loss.png")
    return parser.parse_args()


def new_network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(CHARACTERS, 32),
        nn.Flatten(),
        nn.Linear(32 * CONTEXT, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, CHARACTERS),
    )


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows of CONTEXT + 1 characters, to train with and to test with."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 1)
    return windows[:-20_000], windows[-20_000::10]


def draw_batch(text: torch.Tensor, step: int, options: argparse.Namespace) -> torch.Tensor:
    """Return another batch for each step and rank, and the same one after a restart."""
    random = torch.Generator().manual_seed((options.seed * 1000 + hvd.rank()) * 1_000_000 + step)
    return text[torch.randint(len(text), (options.batch_size,), generator=random)]


def loss_of(network: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(network(windows[:, :-1]), windows[:, -1])


def save(checkpoint: str | None, network: nn.Module, optimizer: Any, losses: list[float]) -> None:
    """Every rank has a file of its own: between outer steps the networks of the islands differ."""
    if checkpoint:
        content = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
        new = Path(f"{checkpoint}.{hvd.rank()}.new")
        torch.save(content, new)
        new.replace(f"{checkpoint}.{hvd.rank()}")


def resume(checkpoint: str | None, network: nn.Module, optimizer: Any) -> list[float]:
    """Go on from the checkpoint of this rank, if there is one; return the losses until then."""
    path = Path(f"{checkpoint}.{hvd.rank()}")
    if not checkpoint or not path.exists():
        return []
    content = torch.load(path, weights_only=True)
    network.load_state_dict(content["network"])
    optimizer.load_state_dict(content["optimizer"])
    losses: list[float] = content["losses"]
    return losses


def plot(file: str | None, losses: list[float], options: argparse.Namespace) -> None:
    if not file:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.plot([options.every * (number + 1) for number in range(len(losses))], losses, marker="o")
    pyplot.xlabel("steps")
    pyplot.ylabel("test loss, bits per character")
    pyplot.title(f"{hvd.size()} ranks that synchronise every {options.every} steps")
    pyplot.savefig(file)


if __name__ == "__main__":
    main()
