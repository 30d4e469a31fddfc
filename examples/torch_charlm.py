"""Train a small transformer to write like Python's documentation, character by character, on any number of ranks.

    ringrun -np 2 python examples/torch_charlm.py

The text is what help() knows about the language; it ships with Python. Needs tqdm (the progress bar) and, for --plot,
matplotlib. Each step adds up the gradients of several batches on each rank; they travel with the last of them.
"""

import argparse
import math
import os
import time
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import ringtrain.torch as hvd

CHARACTERS = 128  # of ASCII
WARM_UP_STEPS = 10


def main() -> None:
    options = parse_options()
    hvd.init()
    torch.set_num_threads(options.threads)

    # Every rank makes a model of its own; after resume() all have that of rank 0.
    torch.manual_seed(options.seed + hvd.rank())
    model = Transformer(options.width, options.layers, options.context)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=options.lr),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=options.accumulation,
    )
    total = options.epochs * options.steps
    scheduler = LambdaLR(optimizer, lambda step: warm_up_and_cosine(step, total))
    losses = resume(options.checkpoint, model, optimizer, scheduler)
    compiled: Any = torch.compile(model) if options.compile else model  # the same parameters

    train_text, test_text = load_text()
    if not losses:
        losses.append(evaluate(compiled, test_text, options))
    done = len(losses) - 1  # epochs; the first loss is that before all of them
    with tqdm(total=total, initial=done * options.steps, unit=" steps", disable=hvd.rank() != 0) as progress:
        for epoch in range(done, options.epochs):
            began_s = time.perf_counter()
            for step in range(epoch * options.steps, (epoch + 1) * options.steps):
                train_one_step(compiled, optimizer, draw_batches(train_text, step, options), options)
                scheduler.step()
                progress.update()
            characters_per_s = characters_of_an_epoch(options) / (time.perf_counter() - began_s)
            losses.append(evaluate(compiled, test_text, options))
            if hvd.rank() == 0:
                line = f"epoch {epoch + 1:2}: test loss {losses[-1]:.3f} bits per character"
                progress.write(f"{line}, {characters_per_s:,.0f} characters/s")
                save(options.checkpoint, model, optimizer, scheduler, losses)

    if hvd.rank() == 0:
        plot(options.plot, losses)
        print(f"{losses[0]:.3f} bits per character before, {losses[-1]:.3f} after, on {hvd.size()} ranks")
        print(write(model, "The ", options), flush=True)
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="evaluations and checkpoints (default %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="steps of each epoch (default %(default)s)")
    parser.add_argument("--accumulation", type=int, default=2, help="batches per step and rank (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="pieces of text per batch (default %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="characters of a piece (default %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the model, a multiple of 64 (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.004, help="highest learning rate (default %(default)s)")
    parser.add_argument("--float32", action="store_true", help="compute in 32 bits, not in bfloat16 where that will do")
    parser.add_argument("--compile", action="store_true", help="use torch.compile, which needs a C++ compiler")
    parser.add_argument("--threads", type=int, default=1, help="that compute, of each rank (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the batches (default %(default)s)")
    parser.add_argument("--checkpoint", metavar="FILE", help="save each epoch here, and go on from here if it exists")
    parser.add_argument("--plot", metavar="FILE", help="draw the loss of each epoch, such as loss.png")
    return parser.parse_args()


def load_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text to train on and one that has no paragraph in common with it, as int64[length]."""
    paragraphs = dict.fromkeys("\n\n".join(topics.values()).split("\n\n"))  # some stand in several topics
    text = torch.tensor(list("\n\n".join(paragraphs).encode("ascii", errors="ignore")))
    return text[len(text) // 10 :], text[: len(text) // 10]


class Transformer(nn.Module):
    """Predicts, for each character of a piece of text, the one after it."""

    def __init__(self, width: int, layers: int, context: int):
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Embedding(context, width)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.1)  # so that what the blocks add to it counts from the start
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Take int64[batch, length] and return float[batch, length, CHARACTERS]."""
        scores: torch.Tensor = self.scores(self.blocks(self.characters(text) + self.places.weight[: text.shape[1]]))
        return scores


class Block(nn.Module):
    """Attention to what came before, and a network with one hidden layer."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = width // 64
        self.norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mixture = nn.Linear(width, width)
        self.network = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm(x))
        mapped: torch.Tensor = x + self.network(x)
        return mapped

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        mixed: torch.Tensor = self.mixture(attended.transpose(1, 2).flatten(2))
        return mixed


def draw_batches(text: torch.Tensor, step: int, options: argparse.Namespace) -> torch.Tensor:
    """Return int64[accumulation, batch, context + 1], other pieces of the text for each step and each rank."""
    random = torch.Generator().manual_seed(options.seed + step * hvd.size() + hvd.rank())
    pieces = text.unfold(0, options.context + 1, 1)
    starts = torch.randint(len(pieces), (options.accumulation, options.batch_size), generator=random)
    return pieces[starts]


def characters_of_an_epoch(options: argparse.Namespace) -> int:
    """Returns how many characters all ranks together learn from."""
    pieces = options.steps * options.accumulation * options.batch_size * hvd.size()
    return int(pieces * options.context)


def train_one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: torch.Tensor, options: argparse.Namespace
) -> None:
    for pieces in batches:
        (loss_of(model, pieces, options) / len(batches)).backward()
    hvd.clip_grad_norm_(model.parameters(), max_norm=1.0)  # of the averages: it waits for them
    optimizer.step()
    optimizer.zero_grad()


def loss_of(model: nn.Module, pieces: torch.Tensor, options: argparse.Namespace) -> torch.Tensor:
    """Return the mean number of bits that each character after the first is worth, with its predecessors known."""
    with torch.autocast("cpu", torch.bfloat16, enabled=not options.float32):
        scores = model(pieces[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten()) / math.log(2)


def warm_up_and_cosine(step: int, total: int) -> float:
    """Return the share of the highest learning rate that a step gets."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (1 + math.cos(math.pi * step / total)) / 2


def evaluate(model: nn.Module, text: torch.Tensor, options: argparse.Namespace) -> float:
    """Return the bits per character of a text. Each rank looks at its share of the pieces."""
    pieces = text.unfold(0, options.context + 1, options.context)[hvd.rank() :: hvd.size()]
    with torch.no_grad():
        bits = sum(loss_of(model, batch, options).item() * len(batch) for batch in pieces.split(options.batch_size))
    total_bits, total_pieces = hvd.allreduce(torch.tensor([bits, len(pieces)]), op=hvd.Sum, name="evaluation").tolist()
    return float(total_bits / total_pieces)


def write(model: nn.Module, start: str, options: argparse.Namespace, length: int = 300) -> str:
    """Return a text that begins with `start` and that the model goes on with."""
    text = torch.tensor([list(start.encode("ascii"))])
    for _ in range(length):
        with torch.no_grad():
            scores = model(text[:, -options.context :])[0, -1]
        following = torch.multinomial(functional.softmax(scores / 0.7, dim=0), 1)
        text = torch.cat([text, following[None]], dim=1)
    return bytes(text[0].tolist()).decode("ascii")


def resume(path: str | None, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR) -> list[float]:
    """Rank 0 reads the checkpoint, if there is one, and the others get everything from rank 0.

    So it does not matter how many ranks there were before, nor where the others run. Returns the losses so far.
    """
    losses: list[float] = []
    if hvd.rank() == 0 and path is not None and os.path.exists(path):
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        losses = checkpoint["losses"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses, state = hvd.broadcast_object((losses, scheduler.state_dict()), root_rank=0)
    scheduler.load_state_dict(state)
    return losses


def save(
    path: str | None, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LambdaLR, losses: list[float]
) -> None:
    if path is None:
        return
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**states, "losses": losses}, f"{path}.part")
    os.replace(f"{path}.part", path)  # a job that is stopped now leaves the old checkpoint or the new one, whole


def plot(path: str | None, losses: list[float]) -> None:
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    pyplot.plot(losses, marker="o")
    pyplot.gca().xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    pyplot.xlabel("epoch")
    pyplot.ylabel("bits per character")
    pyplot.title(f"Python's documentation on {hvd.size()} ranks")
    pyplot.savefig(path)


if __name__ == "__main__":
    main()
