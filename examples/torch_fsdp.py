"""Parameters, gradients and the optimizer's state in shares, by fully_shard on ringtrain.

torchrun --nproc_per_node 2 examples/torch_fsdp.py
mpirun -np 2 python examples/torch_fsdp.py --init-method ringtrain://
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ringtrain.torch.distributed  # noqa: F401  registers the backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--init-method", default="env://")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of an epoch")
    arguments = parser.parse_args()

    dist.init_process_group("ringtrain", init_method=arguments.init_method)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [module for _ in range(3) for module in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)

    torch.manual_seed(1 + dist.get_rank())  # each rank has data of its own
    for epoch in range(arguments.epochs):
        began_s = time.perf_counter()
        for _ in range(arguments.steps):
            inputs = torch.randn(64, 64)
            optimizer.zero_grad()
            loss = (model(inputs)[:, 0] - inputs.sum(1) / 8).square().mean()
            loss.backward()
            optimizer.step()
        samples_per_s = arguments.steps * 64 * dist.get_world_size() / (time.perf_counter() - began_s)
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            line = f"epoch {epoch + 1:2}: loss {mean.item():.4f} of the last batch"
            print(f"{line}, {samples_per_s:,.0f} samples/s", flush=True)
    if dist.get_rank() == 0:
        own = sum(one.to_local().numel() for one in model.parameters() if isinstance(one, DTensor))
        print(f"this rank has {own} of {sum(parameter.numel() for parameter in model.parameters())} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
