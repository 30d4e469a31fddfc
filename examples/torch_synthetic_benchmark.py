"""Measure how many images per second a ResNet trains on, with random images, on any number of ranks.

    ringrun -np 2 python examples/torch_synthetic_benchmark.py

The flags and the output are those of Horovod's pytorch_synthetic_benchmark.py, but --cuda in place of --no-cuda. The
defaults are for CPUs and end within two minutes on two cores; for the usual figures of ResNet-50 take --image-size 224
--batch-size 32. Needs tqdm (the progress bar) and, for --plot, matplotlib.
"""

import argparse
import os
import timeit
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

import ringtrain.torch as hvd


def main() -> None:
    options = parse_options()
    hvd.init()  # makes the GPU of this rank the current one
    device, unit = ("cuda", "GPU") if options.cuda else ("cpu", "CPU")
    torch.set_num_threads(options.threads)

    model = MODELS[options.model]()
    memory_format = torch.channels_last if options.channels_last else torch.contiguous_format
    model.to(device, memory_format=memory_format)  # type: ignore[call-overload]
    optimizer = hvd.DistributedOptimizer(
        # Adasum finds the length of a step by itself; otherwise it grows with the batch of all ranks.
        torch.optim.SGD(model.parameters(), lr=0.01 * (1 if options.use_adasum else hvd.size())),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
        gradient_as_shared_view=options.gradient_as_shared_view,
    )
    rates = resume(options.checkpoint, model, optimizer)

    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
    images = images.to(memory_format=memory_format)
    labels = torch.randint(1000, (options.batch_size,), device=device)

    def train_one_batch() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=options.bf16):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    def train(batches: int) -> None:
        for _ in range(batches):
            train_one_batch()
        if options.cuda:
            torch.cuda.synchronize()  # the host is ahead of the GPU

    say(f"Model: {options.model}")
    say(f"Batch size: {options.batch_size}")
    say(f"Number of {unit}s: {hvd.size()}")
    say("Running warmup...")
    train(options.num_warmup_batches)

    say("Running benchmark...")
    with tqdm(total=options.num_iters, initial=len(rates), unit=" iters", disable=hvd.rank() != 0) as progress:
        for iteration in range(len(rates), options.num_iters):
            time_s = timeit.timeit(lambda: train(options.num_batches_per_iter), number=1)
            rates.append(options.batch_size * options.num_batches_per_iter / time_s)
            progress.update()
            if hvd.rank() == 0:
                progress.write(f"Iter #{iteration}: {rates[-1]:.1f} img/sec per {unit}")
                save(options.checkpoint, model, optimizer, rates)

    mean, spread = np.mean(rates), 1.96 * np.std(rates)
    say(f"Img/sec per {unit}: {mean:.1f} +-{spread:.1f}")
    say(f"Total img/sec on {hvd.size()} {unit}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
    if hvd.rank() == 0:
        plot(options.plot, rates, options)
    hvd.shutdown()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="resnet50", help="what is trained (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="images per step and rank (default %(default)s)")
    parser.add_argument("--image-size", type=int, default=64, help="pixels in each direction (default %(default)s)")
    parser.add_argument("--num-warmup-batches", type=int, default=5, help="not measured (default %(default)s)")
    parser.add_argument("--num-batches-per-iter", type=int, default=3, help="measured at once (default %(default)s)")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements (default %(default)s)")
    parser.add_argument("--cuda", action="store_true", help="train on GPUs, one for each rank where there are as many")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 what autocast holds to be safe")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send the gradients in 16 bits")
    parser.add_argument("--use-adasum", action="store_true", help="combine the updates of the ranks adaptively")
    parser.add_argument(
        "--gradient-as-shared-view", action="store_true", help="keep the gradients where all ranks of a node see them"
    )
    parser.add_argument("--channels-last", action="store_true", help="keep the colours of a pixel side by side")
    parser.add_argument("--threads", type=int, default=1, help="that compute, of each rank (default %(default)s)")
    parser.add_argument(
        "--checkpoint", metavar="FILE", help="save each iteration here, and go on from here if it exists"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the rate of each iteration, such as rates.png")
    options = parser.parse_args()
    if options.cuda and not torch.cuda.is_available():
        raise SystemExit("--cuda needs a GPU and a PyTorch that was built for CUDA: this one finds no GPU")
    return options


class Residual(nn.Module):
    """Layers whose output is added to their input, or to a projection of it where the shape changes."""

    def __init__(self, layers: nn.Sequential, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.layers = layers
        changes = stride > 1 or inputs != outputs
        self.shortcut = convolution(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, kernel_size: int, stride: int = 1) -> nn.Sequential:
    padding = kernel_size // 2
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel_size, stride, padding, bias=False), nn.BatchNorm2d(outputs))


def basic_block(inputs: int, width: int, stride: int) -> Residual:
    layers = nn.Sequential(convolution(inputs, width, 3, stride), nn.ReLU(), convolution(width, width, 3))
    return Residual(layers, inputs, width, stride)


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    layers = nn.Sequential(
        convolution(inputs, width, 1),
        nn.ReLU(),
        convolution(width, width, 3, stride),
        nn.ReLU(),
        convolution(width, 4 * width, 1),
    )
    return Residual(layers, inputs, 4 * width, stride)


def resnet(block: Callable[[int, int, int], Residual], expansion: int, depths: list[int]) -> nn.Module:
    """The network of He et al., arXiv 1512.03385, with the strides where torchvision has them.

    It takes float[batch, 3, height, width] and gives scores, float[batch, 1000].
    """
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for place in range(depth):
            blocks.append(block(inputs, width, 2 if stage > 0 and place == 0 else 1))
            inputs = expansion * width
    return nn.Sequential(
        convolution(3, 64, 7, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inputs, 1000),
    )


MODELS = {
    "resnet18": partial(resnet, basic_block, 1, [2, 2, 2, 2]),
    "resnet34": partial(resnet, basic_block, 1, [3, 4, 6, 3]),
    "resnet50": partial(resnet, bottleneck, 4, [3, 4, 6, 3]),
}


def say(line: str) -> None:
    if hvd.rank() == 0:
        print(line, flush=True)


def resume(path: str | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Rank 0 reads the checkpoint, if there is one, and the others get everything from rank 0.

    Returns the rates, in images per second, that were measured on as many ranks as there are now.
    """
    rates: list[float] = []
    if hvd.rank() == 0 and path is not None and os.path.exists(path):
        checkpoint = torch.load(path, map_location="cpu")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        rates = checkpoint["rates"] if checkpoint["ranks"] == hvd.size() else []
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    received: list[float] = hvd.broadcast_object(rates, root_rank=0)
    return received


def save(path: str | None, model: nn.Module, optimizer: torch.optim.Optimizer, rates: list[float]) -> None:
    if path is None:
        return
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "rates": rates, "ranks": hvd.size()}, f"{path}.part")
    os.replace(f"{path}.part", path)  # a job that is stopped now leaves the old checkpoint or the new one, whole


def plot(path: str | None, rates: list[float], options: argparse.Namespace) -> None:
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    pyplot.plot(rates, marker="o")
    pyplot.ylim(bottom=0)
    pyplot.gca().xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    pyplot.xlabel("iteration")
    pyplot.ylabel("images per second and rank")
    pyplot.title(f"{options.model} on {hvd.size()} ranks")
    pyplot.savefig(path)


if __name__ == "__main__":
    main()
