"""Buckets of DistributedDataParallel in memory that the ranks of a node share."""

import gc
import os

import pytest
from harness.frameworks import need_torch_of_backend, on_demand
from test_c10d import default_group

need_torch_of_backend()

torch = on_demand("torch")
dist = on_demand("torch.distributed")
_core = on_demand("ringtrain._core")

LARGE = 64 << 10


def trained(dtype, steps, **options):
    """A model whose gradients are exact: each is the mean of the ranks' inputs."""
    layers = torch.nn.ModuleList(torch.nn.Linear(128, 256, bias=False, dtype=dtype) for _ in range(2))
    layers.forward = lambda inputs: sum(layer(inputs).sum() for layer in layers)
    model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.1, **options)
    size = dist.get_world_size()
    for step in range(steps):
        model.zero_grad()
        model(torch.full((1, 128), size * (dist.get_rank() + step + 1.0), dtype=dtype)).backward()
        expected = torch.full((256, 128), sum(range(step + 1, step + 1 + size)), dtype=dtype)
        assert all(torch.equal(layer.weight.grad, expected) for layer in layers), step
    return model


def was_in_place():
    """Whether the last large allreduce was of memory that ranks share, on this rank."""
    large = [one for one in _core.last_operations() if one["kind"] == "allreduce" and one["bytes"] >= LARGE]
    return large[-1]["is_registered"]


@pytest.mark.ranks(2, 3, fast=[2])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_buckets_are_reduced_without_a_copy_before_and_after_they_are_rebuilt(options):
    with default_group():
        for dtype in (torch.float32, torch.bfloat16):
            for steps in (1, 4):
                model = trained(dtype, steps, **options)
                assert was_in_place()
                del model


@pytest.mark.ranks(2)
def test_a_group_of_some_ranks_and_unused_parameters_share_their_buckets_too():
    with default_group():
        own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        both = dist.new_group([0, 1])
        trained_alone = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(200, 200), process_group=own)
        trained_alone(torch.ones(1, 200)).sum().backward()
        trained(torch.float32, 3, process_group=both, find_unused_parameters=True)
        assert was_in_place()


@pytest.mark.ranks(2)
def test_buckets_are_elsewhere_where_a_rank_has_too_little_room():
    from ringtrain.torch.distributed.patches import shared_buckets

    has_room = shared_buckets._has_room
    try:
        with default_group() as rank:
            if rank == 1:
                shared_buckets._has_room = lambda bytes_: False
            trained(torch.float32, 4)
            assert was_in_place() == (rank == 0)  # as each rank submits it; the plan copies on both
    finally:
        shared_buckets._has_room = has_room


@pytest.mark.ranks(4, hosts=(2, 2), timeout=120)
def test_buckets_of_ranks_on_several_hosts_are_reduced_as_before():
    with default_group():
        trained(torch.float32, 4)
        assert not was_in_place()


@pytest.mark.ranks(1)
def test_half_of_the_file_system_is_left_for_others():
    from ringtrain.torch.distributed.patches import shared_buckets

    room = os.statvfs("/dev/shm")
    free, all_of_it = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    assert shared_buckets._has_room(1 << 10) == (free - all_of_it // 2 >= 1 << 10)
    assert not shared_buckets._has_room(free - all_of_it // 2 + (64 << 20))


@pytest.mark.ranks(2, initialised=False, isolated=True)
def test_gradients_in_shared_memory_outlive_the_group():
    with default_group():
        model = trained(torch.float32, 3, gradient_as_bucket_view=True)
        expected = [parameter.grad.clone() for parameter in model.parameters()]
    gc.collect()
    assert all(torch.equal(one.grad, want) for one, want in zip(model.parameters(), expected, strict=True))
    del model
    gc.collect()
    with default_group():
        trained(torch.float32, 3)
        assert was_in_place()
