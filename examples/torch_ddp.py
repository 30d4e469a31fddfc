"""DistributedDataParallel on ringtrain: the backend is the only line that differs from a script for gloo.

torchrun --nproc_per_node 2 examples/torch_ddp.py
mpirun -np 2 python examples/torch_ddp.py --init-method ringtrain://
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ringtrain.torch.distributed  # noqa: F401  registers the backend


def make_data() -> TensorDataset:
    """Points in four quarters of a plane, and the number of the quarter."""
    points = torch.randn(2048, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--init-method", default="env://")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()

    dist.init_process_group("ringtrain", init_method=arguments.init_method)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(make_data())
    loader = DataLoader(make_data(), batch_size=32, sampler=sampler)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        right = torch.zeros(())
        began_s = time.perf_counter()
        for points, quarters in loader:
            optimizer.zero_grad()
            scores = model(points)
            loss = torch.nn.functional.cross_entropy(scores, quarters)
            loss.backward()
            optimizer.step()
            right += (scores.argmax(1) == quarters).sum()
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            points_per_s = len(make_data()) / (time.perf_counter() - began_s)
            accuracy = right.item() / len(make_data())
            line = f"epoch {epoch + 1:2}: loss {loss.item():.4f} of the last batch, accuracy {accuracy:.3f}"
            print(f"{line}, {points_per_s:,.0f} points/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
