"""Tensor parallel on CPUs: each rank has a share of every matrix of a small transformer, which learns and then writes.

torchrun --nproc_per_node 2 examples/torch_tensor_parallel.py
ringrun -np 2 python examples/torch_tensor_parallel.py --init-method ringtrain://
torchrun --nproc_per_node 2 examples/torch_tensor_parallel.py --backend gloo    # the same losses and text

The text is what help() knows about the language; it ships with Python. All ranks work on the same batches. To write a
character takes two all_reduces for each layer, one for the embedding and an all_gather of the scores.
"""

import argparse
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import ringtrain.torch.distributed  # noqa: F401  registers the backend

CHARACTERS = 128  # of ASCII
HEAD = 16  # numbers in a query, a key and a value

# The columns of a first matrix and the rows of a second one: only the result of the second has to be summed.
PLAN = {
    "characters": RowwiseParallel(input_layouts=Replicate()),
    "scores": ColwiseParallel(output_layouts=Replicate()),
}
PLAN_OF_A_BLOCK = {
    "queries": ColwiseParallel(),
    "keys": ColwiseParallel(),
    "values": ColwiseParallel(),
    "mixture": RowwiseParallel(),
    "network.0": ColwiseParallel(),
    "network.2": RowwiseParallel(),
}


class Block(nn.Module):
    """Attention to what came before, and a network with one hidden layer."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.norm_of_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.mixture = nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        """Takes and returns float[batch, length, width].

        `seen` has the keys and values of the text before this piece, or nothing. Those of the piece are added to it.
        """
        x = x + self.attend(self.norm(x), seen)
        mapped: torch.Tensor = x + self.network(self.norm_of_network(x))
        return mapped

    def attend(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        # A rank has the heads whose numbers it has.
        layers = (self.queries, self.keys, self.values)
        queries, keys, values = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in layers)
        begins = not seen
        if not begins:
            keys, values = torch.cat([seen[0], keys], dim=2), torch.cat([seen[1], values], dim=2)
        seen[:] = keys, values
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=begins)
        mixed: torch.Tensor = self.mixture(attended.transpose(1, 2).flatten(2))
        return mixed


class Transformer(nn.Module):
    """Predicts, for each character of a piece of text, the one after it."""

    def __init__(self, width: int, layers: int, context: int):
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Embedding(context, width)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.1)  # so that what the blocks add to it counts from the start
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, CHARACTERS)

    def forward(self, text: torch.Tensor, seen: list[list[torch.Tensor]] | None = None) -> torch.Tensor:
        """Takes int64[batch, length] and returns float[batch, length, CHARACTERS].

        With `seen`, a list for each block, the text goes on where that of the last call ended, by one character.
        """
        seen = seen if seen is not None else [[] for _ in self.blocks]
        begin = seen[0][0].shape[2] if seen[0] else 0
        x = self.characters(text) + self.places.weight[begin : begin + text.shape[1]]
        for block, of_block in zip(self.blocks, seen, strict=True):
            x = block(x, of_block)
        scores: torch.Tensor = self.scores(self.norm(x))
        return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ringtrain", help="of torch.distributed, or gloo for comparison")
    parser.add_argument("--init-method", default="env://")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of an epoch")
    parser.add_argument("--width", type=int, default=128, help="of the model, a multiple of 16 for each rank")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--context", type=int, default=64, help="characters of a piece, and of the text it writes")
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend, init_method=arguments.init_method)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks make the same model, of which each then keeps its share
    model = make_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    pieces = torch.tensor(list("\n\n".join(topics.values()).encode("ascii", errors="ignore")))
    pieces = pieces.unfold(0, arguments.context + 1, 1)
    for epoch in range(arguments.epochs):
        began_s, losses = time.perf_counter(), []
        for _ in range(arguments.steps):
            batch = pieces[torch.randint(len(pieces), (8,))]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        characters_per_s = arguments.steps * 8 * arguments.context / (time.perf_counter() - began_s)
        mean = sum(losses) / len(losses)
        say(f"epoch {epoch + 1:2}: loss {mean:.4f} on average, {characters_per_s:,.0f} characters/s")

    began_s = time.perf_counter()
    start = "The "
    text = write(model, start, arguments.context)
    characters_per_s = (len(text) - len(start)) / (time.perf_counter() - began_s)
    own = sum(one.to_local().numel() if isinstance(one, DTensor) else one.numel() for one in model.parameters())
    say(f"this rank has {own} of {sum(parameter.numel() for parameter in model.parameters())} parameters")
    say(f"wrote {characters_per_s:,.0f} characters/s:\n{text}")
    dist.destroy_process_group()


def make_model(arguments: argparse.Namespace) -> Transformer:
    model = Transformer(arguments.width, arguments.layers, arguments.context)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN_OF_A_BLOCK)
    parallelize_module(model, mesh, PLAN)
    return model


@torch.no_grad()
def write(model: Transformer, start: str, length: int) -> str:
    """Returns a text of that length that begins with `start`, each character the likeliest after those before."""
    seen: list[list[torch.Tensor]] = [[] for _ in model.blocks]
    text = list(start.encode("ascii"))
    following = model(torch.tensor([text]), seen)[0, -1].argmax()
    while len(text) < length - 1:
        text.append(int(following))
        following = model(following.reshape(1, 1), seen)[0, -1].argmax()
    return bytes([*text, int(following)]).decode("ascii")


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
