"""hvd.Join and hvd.join: an epoch ends everywhere, though the ranks have different numbers of batches."""

import contextlib
import io

import pytest
from harness.frameworks import on_demand

import ringtrain

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")


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


def epoch(model, optimizer, batches):
    """With so many batches on this rank; the gradients are the same on all ranks."""
    with hvd.Join(optimizer):
        for number in range(batches):
            optimizer.zero_grad()
            model(batch_of(0, number)).square().mean().backward()
            optimizer.step()


@pytest.mark.ranks(3)
def test_a_gradient_that_is_not_finite_is_named_though_a_rank_has_joined():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), nan_check=True
    )
    with hvd.Join(optimizer):
        for number in range(1 if hvd.rank() == 0 else 4):
            optimizer.zero_grad()
            loss = model(batch_of(hvd.rank(), number)).square().mean()
            if number == 2 and hvd.rank() == 2:
                loss = loss + model[2].bias[0] * float("nan")
            loss.backward()
            if number == 2:
                with pytest.raises(hvd.NonFiniteError, match=r'"2\.bias" is NaN or infinite on rank 2 in step 3'):
                    optimizer.step()
            else:
                optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    hvd.check_replicas(model.state_dict())


@pytest.mark.ranks(2)
def test_replicas_are_compared_in_steps_that_all_take_and_in_the_same_ones_afterwards():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), check_every=2)
    epoch(model, optimizer, 1 + 2 * hvd.rank())  # three steps for one rank, one for the other
    if hvd.rank() == 1:
        with torch.no_grad():
            model[0].bias[0] += 1
    optimizer.zero_grad()
    model(batch_of(0, 0)).square().mean().backward()
    with pytest.raises(hvd.ReplicaError, match="is not the same on all ranks"):
        optimizer.step()  # the fourth
    hvd.broadcast_parameters(model.state_dict())
    model[0].bias.data[0] += hvd.rank()
    with pytest.raises(hvd.ReplicaError, match="is not the same on all ranks"):
        epoch(model, optimizer, 2)  # the sixth is one that all take


@pytest.mark.ranks(2, initialised=False)
@pytest.mark.parametrize(("window", "shown"), [("3-6", [5, 6]), ("1-2", [1]), ("3-4", None)])
def test_a_window_of_the_timeline_begins_and_ends_in_steps_that_all_take(tmp_path, window, shown):
    from ringtrain.timeline.report.trace import read

    path = tmp_path / "timeline.json"
    hvd.init(timeline_filename=str(path), timeline_steps=window)
    model, rank, said = new_model(), hvd.rank(), io.StringIO()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    epoch(model, optimizer, 2 + 2 * rank)  # from the third step on one rank is alone
    epoch(model, optimizer, 3)
    hvd.barrier()
    with contextlib.redirect_stderr(said):
        hvd.shutdown()
    if shown is None:
        sentence = "timeline_steps is 3-4, and the optimizers made 7 steps; ranks had joined in those of the window"
        assert (sentence in said.getvalue()) == (rank == 0)
        assert not path.exists()
    elif rank == 0:
        assert read(path).steps == shown


@pytest.mark.ranks(2)
def test_a_rank_without_a_batch_knows_afterwards_what_the_others_do():
    """Which optimizer was first, and which gradients are sparse."""
    torch.manual_seed(1)
    words = torch.nn.Embedding(5, 2, sparse=True)
    model = new_model()
    of_words = hvd.DistributedOptimizer(torch.optim.SGD(words.parameters(), lr=0.1), sparse_as_dense=True)
    of_model = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def train_model():
        of_model.zero_grad()
        model(batch_of(0, 0)).square().mean().backward()
        of_model.step()

    def train_words():
        of_words.zero_grad()
        if hvd.rank() == 1:
            words(torch.tensor([1, 2])).square().sum().backward()
        of_words.step()
        assert words.weight.grad.is_sparse

    for is_first in (True, False):
        if hvd.rank() == 1 or not is_first:
            for train in (train_model, train_words) if is_first else (train_words, train_model):
                train()
        last = ringtrain.join()
        hvd.broadcast_parameters([*words.parameters(), *model.parameters()], root_rank=last if is_first else 0)
    train_words()
    train_model()
    hvd.check_replicas([*words.parameters(), *model.parameters()])
