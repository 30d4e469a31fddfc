"""hvd.Join and hvd.join: an epoch ends everywhere, though the ranks have different numbers of batches."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed in this environment")

import ringtrain.torch as hvd  # noqa: E402

torch.set_num_threads(1)


def new_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()


def batch_of(rank, number):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * number + rank), dtype=torch.float64)


def batches_of(rank):
    """How many a rank has in an epoch; the first has none."""
    return 2 * rank


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"gradient_as_shared_view": True}], ids=str)
def test_averages_are_over_the_ranks_that_contribute(options):
    model, alone = new_model(), new_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), **options)
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    ranks = range(hvd.size())
    for _ in range(2):
        with hvd.Join(optimizer) as join:
            for number in range(batches_of(hvd.rank())):
                optimizer.zero_grad()
                model(batch_of(hvd.rank(), number)).square().mean().backward()
                optimizer.step()
        for number in range(max(map(batches_of, ranks))):
            contributing = [rank for rank in ranks if number < batches_of(rank)]
            plain.zero_grad()
            losses = [alone(batch_of(rank, number)).square().mean() for rank in contributing]
            torch.stack(losses).mean().backward()
            plain.step()
        assert join.last_rank == hvd.size() - 1
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert (mine - expected).abs().max().item() < 1e-12
    steps = [state["step"].item() for state in optimizer.state.values()]
    assert steps == [state["step"].item() for state in plain.state.values()]


@pytest.mark.ranks(1, 2)
def test_join_without_the_context_as_in_horovod():
    for _ in range(hvd.rank()):
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="batch").tolist() == [hvd.size() - 1] * 2
    assert hvd.join() == hvd.size() - 1


@pytest.mark.ranks(2)
def test_losses_may_be_averaged_within():
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(new_model().parameters(), lr=0.1))
    with hvd.Join(optimizer):
        for number in range(1 + 2 * hvd.rank()):
            contributing = 2 if number == 0 else 1
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="loss").item() == contributing
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="loss").item() == 2


@pytest.mark.ranks(2)
def test_an_error_within_is_not_hidden_by_waiting():
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(new_model().parameters(), lr=0.1))
    with pytest.raises(ZeroDivisionError), hvd.Join(optimizer):
        1 / 0  # noqa: B018
    with hvd.Join(optimizer):
        pass


@pytest.mark.ranks(2)
def test_it_takes_distributed_optimizers_only():
    plain = torch.optim.SGD(new_model().parameters(), lr=0.1)
    with pytest.raises(TypeError, match="Join takes what DistributedOptimizer returned, not SGD"):
        hvd.Join(plain)
    with pytest.raises(TypeError, match="Join takes"):
        hvd.Join(hvd.DistributedOptimizer(plain, op=hvd.Adasum))
