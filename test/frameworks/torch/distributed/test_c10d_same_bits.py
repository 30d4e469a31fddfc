"""Calls of torch.distributed on the backend, twice, with other delays: their results have the same bits."""

import random
import time

import pytest
from harness.frameworks import need_torch_of_backend, on_demand
from test_c10d import default_group

need_torch_of_backend()

torch = on_demand("torch")
dist = on_demand("torch.distributed")

SOCKETS = {"RINGTRAIN_NETWORK": "sockets", "RINGTRAIN_SHARED_MEMORY": "off"}
SIZES = [3, 700, 20_000, 90_001, 400_000, 64, 150_000, 5, 31_000, 9000]


def drawn(size, rank):
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * size + rank))


@pytest.mark.ranks(3, 4, env=SOCKETS, initialised=False)
def test_sums_repeat():
    with default_group():
        stories = []
        for story in range(2):
            delays = random.Random(10 * story + dist.get_rank())
            tensors, works = [drawn(size, dist.get_rank()) for size in SIZES], []
            for tensor in tensors:
                time.sleep(delays.random() * 0.004)
                works.append(dist.all_reduce(tensor, async_op=True))
            for work in works:
                work.wait()
            stories.append(tensors)
        assert all(torch.equal(one, other) for one, other in zip(*stories, strict=True))


@pytest.mark.ranks(3, env=SOCKETS, initialised=False)
def test_gradients_of_ddp_repeat():
    with default_group():
        stories = []
        for story in range(2):
            torch.manual_seed(1)
            layers = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(6)))
            model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.3)
            delays = random.Random(10 * story + dist.get_rank())
            for layer in layers:
                layer.register_full_backward_hook(lambda *_, delays=delays: time.sleep(delays.random() * 0.004))
            for _ in range(3):
                model.zero_grad()
                model(drawn(300, dist.get_rank())).sum().backward()
            stories.append([parameter.grad.clone() for parameter in model.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(*stories, strict=True))
