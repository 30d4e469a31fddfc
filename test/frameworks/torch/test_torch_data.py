"""Data for training: each rank takes its share, and processes that load it work beside MPI."""

import pytest
from harness.frameworks import on_demand

import ringtrain as hvd

torch = on_demand("torch")
data = on_demand("torch.utils.data")

COUNT = 24


def loader_of(dataset, **options):
    sampler = data.DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=True)
    return data.DataLoader(dataset, batch_size=4, sampler=sampler, **options)


def load_and_sum(loader):
    """All that this rank loads, with an allreduce after each batch, as in training."""
    seen, total = [], 0
    for (batch,) in loader:
        seen += batch.tolist()
        total += hvd.allreduce(batch.sum(), op=hvd.Sum).item()
    return seen, total


def of_all_ranks(seen):
    return [value for one in hvd.allgather_object(seen) for value in one]


@pytest.mark.ranks(1, 2, 3)
def test_the_ranks_share_the_data():
    seen, total = load_and_sum(loader_of(data.TensorDataset(torch.arange(COUNT))))
    assert len(seen) == COUNT // hvd.size()
    assert total == sum(range(COUNT))
    assert sorted(of_all_ranks(seen)) == list(range(COUNT))


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_worker_processes_load_while_the_ranks_communicate(method):
    dataset = data.TensorDataset(torch.arange(COUNT))
    loader = loader_of(dataset, num_workers=1, multiprocessing_context=method, persistent_workers=True)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        seen, total = load_and_sum(loader)
        assert total == sum(range(COUNT))
        assert sorted(of_all_ranks(seen)) == list(range(COUNT))


@pytest.mark.ranks(2)
def test_a_forked_worker_is_told_that_it_is_no_rank():
    def collate(batch):
        with pytest.raises(hvd.NotInitializedError):
            hvd.rank()
        return data.default_collate(batch)

    loader = loader_of(
        data.TensorDataset(torch.arange(COUNT)), num_workers=1, multiprocessing_context="fork", collate_fn=collate
    )
    _, total = load_and_sum(loader)
    assert total == sum(range(COUNT))
