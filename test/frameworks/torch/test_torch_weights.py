"""optimizer.set_weight: ranks with batches of different sizes do what one process does with all samples."""

import math

import numpy as np
import pytest
from harness.frameworks import on_demand

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")

STEPS = 4
# Powers of two that add up to one: with small integers every mean is exact.
BATCHES = {1: [8], 2: [6, 2], 3: [4, 3, 1], 4: [8, 4, 3, 1]}


def samples_of(rank, step):
    """Rows of integers whose sum is a multiple of their number: so is that of the gradients."""
    count = BATCHES[hvd.size()][rank]
    random = np.random.default_rng([rank, step])
    rows = random.integers(-4, 5, (count, 4)) * count
    return torch.tensor(rows, dtype=torch.float32)


def new_model():
    model = torch.nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    return model


def loss_of(model, inputs):
    """Linear, so the gradient of each sample is an integer: its mean over a rank, times its number, is exact."""
    return model(inputs).sum(1).mean()


def train_alone(steps=STEPS, lr=0.5):
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, torch.cat([samples_of(rank, step) for rank in range(hvd.size())])).backward()
        optimizer.step()
    return model


def trained_together(parts_of=lambda inputs: [inputs], **options):
    """The same by all ranks, each with its samples."""
    model = new_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), **options)
    for step in range(STEPS):
        inputs = samples_of(hvd.rank(), step)
        optimizer.set_weight(len(inputs))
        optimizer.zero_grad()
        for part in parts_of(inputs):
            (model(part).sum() / len(inputs)).backward()
        optimizer.step()
    return model


def require_same(model, expected):
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, other), (mine, other)


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 1}, {"gradient_predivide_factor": 2.0}, {"gradient_as_shared_view": True}, {"nan_check": True}],
    ids=str,
)
def test_unequal_batches_train_as_one_process_with_all_samples(options):
    require_same(trained_together(**options), train_alone())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_with_compression(compression):
    require_same(trained_together(compression=getattr(hvd.Compression, compression)), train_alone())


@pytest.mark.ranks(2, 3)
def test_several_backward_passes_that_each_have_their_part_of_the_mean():
    together = trained_together(lambda inputs: (inputs[:1], inputs[1:]), backward_passes_per_step=2)
    require_same(together, train_alone())


@pytest.mark.ranks(2, 3)
def test_the_weight_may_change_in_every_step_and_end():
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    size = hvd.size()
    for step, weights in enumerate(
        [[1] * size, [0] * (size - 1) + [1], None, [16 - size + 1] + [1] * (size - 1), None]
    ):
        optimizer.set_weight(None if weights is None else weights[hvd.rank()])
        before = model.weight.item()
        optimizer.zero_grad()
        (model.weight * (16.0 * hvd.rank() + step)).sum().backward()
        optimizer.step()
        weights = weights or [1] * size
        expected = sum(w * (16.0 * r + step) for r, w in enumerate(weights)) / sum(weights)
        assert model.weight.grad.item() == pytest.approx(expected, rel=1e-6)
        assert model.weight.item() == pytest.approx(before - expected, rel=1e-5)


@pytest.mark.ranks(2, 3)
def test_join_weighs_the_ranks_that_still_train():
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    expected = 0.0
    with hvd.Join(optimizer):
        for _ in range(2 * hvd.rank()):
            optimizer.set_weight(4 ** hvd.rank())
            optimizer.zero_grad()
            (model.weight * 5.0 * hvd.rank()).sum().backward()
            optimizer.step()
    for step in range(2 * (hvd.size() - 1)):
        weights = {rank: 4**rank for rank in range(hvd.size()) if step < 2 * rank}
        expected -= sum(w * 5.0 * rank for rank, w in weights.items()) / sum(weights.values())
    assert model.weight.item() == pytest.approx(expected, rel=1e-6)
    if hvd.size() == 2:  # one rank trains alone, and its gradient is what it has
        assert model.weight.item() == -10.0


@pytest.mark.ranks(2)
def test_a_rank_without_samples_takes_the_step_of_the_others():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), nan_check=True)
    for _ in range(2):
        optimizer.set_weight(hvd.rank())
        optimizer.zero_grad()
        loss = loss_of(model, samples_of(1, 0))
        (loss if hvd.rank() else loss * math.nan).backward()
        optimizer.step()
    alone = new_model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.5)
    for _ in range(2):
        plain.zero_grad()
        loss_of(alone, samples_of(1, 0)).backward()
        plain.step()
    require_same(model, alone)


@pytest.mark.ranks(2)
def test_the_loss_of_a_closure_is_averaged_by_weight():
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    optimizer.set_weight([6, 2][hvd.rank()])

    def closure():
        optimizer.zero_grad()
        loss = (model.weight * 0).sum() + 4.0 * hvd.rank()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0


@pytest.mark.ranks(2, 3)
def test_the_gradient_of_a_weighted_average():
    weights = [6] + [2] * (hvd.size() - 1)
    for call in (
        lambda tensor: hvd.allreduce(tensor, weight=weights[hvd.rank()], name="one"),
        lambda tensor: hvd.grouped_allreduce([tensor], weight=weights[hvd.rank()], name="group")[0],
    ):
        tensor = torch.full((3,), float(hvd.rank()), requires_grad=True)
        call(tensor).mul(hvd.rank() + 1.0).sum().backward()
        # As for an average: of the mean of the losses, times the number of ranks.
        sums = sum(rank + 1.0 for rank in range(hvd.size()))
        assert tensor.grad.tolist() == [pytest.approx(sums * weights[hvd.rank()] / sum(weights))] * 3


@pytest.mark.ranks(2, 3)
def test_a_scattered_average_by_weight_and_its_gradient():
    weights = [6] + [2] * (hvd.size() - 1)
    for call in (
        lambda tensor: hvd.reducescatter(tensor, weight=weights[hvd.rank()], name="one"),
        lambda tensor: hvd.grouped_reducescatter([tensor], weight=weights[hvd.rank()], name="group")[0],
    ):
        tensor = torch.full((3 * hvd.size(),), float(hvd.rank()), requires_grad=True)
        rows = call(tensor)
        expected = sum(rank * weight for rank, weight in enumerate(weights)) / sum(weights)
        assert rows.tolist() == [pytest.approx(expected)] * 3
        rows.mul(hvd.rank() + 1.0).sum().backward()
        # As for an average: of the sum of the losses, times the number of ranks.
        share = hvd.size() * weights[hvd.rank()] / sum(weights)
        expected = [pytest.approx((rank + 1.0) * share) for rank in range(hvd.size()) for _ in range(3)]
        assert tensor.grad.tolist() == expected


@pytest.mark.ranks(2)
def test_wrong_weights_are_refused():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for weight in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight must be a finite number that is not negative"):
            optimizer.set_weight(weight)
    with pytest.raises(TypeError, match="weight must be a number, not 'many'"):
        optimizer.set_weight("many")
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, torch.ones(2, 4)).backward()
        optimizer.step()
    loss_of(model, torch.ones(2, 4)).backward()
    with pytest.raises(hvd.StepOrderError, match=r"call it before backward\(\), or after step\(\)"):
        optimizer.set_weight(3)
    optimizer.step()
    for op in (hvd.Sum, hvd.Adasum):
        other = new_model()
        of_other = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.5), op=op)
        with pytest.raises(ValueError, match=f"weight is for op=Average, not for op={op.name}"):
            of_other.set_weight(3)


@pytest.mark.ranks(2)
def test_a_sparse_gradient_is_refused_unless_it_is_reduced_as_a_dense_one():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    hvd.broadcast_parameters(embedding.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(embedding.parameters(), lr=1.0), sparse_as_dense=True)
    optimizer.set_weight([6, 2][hvd.rank()])
    embedding(torch.tensor([hvd.rank()])).sum().backward()
    optimizer.step()
    assert embedding.weight.grad.to_dense()[:2].tolist() == [[0.75] * 2, [0.25] * 2]
    other = torch.nn.Embedding(4, 2, sparse=True)
    hvd.broadcast_parameters(other.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=1.0))
    optimizer.set_weight(1)
    other(torch.tensor([hvd.rank()])).sum().backward()
    with pytest.raises(ValueError, match="is sparse and has no weight; use sparse_as_dense=True"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_a_weight_on_one_rank_only_fails_on_both():
    model = new_model()
    named = model.named_parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=named)
    if hvd.rank() == 0:
        optimizer.set_weight(3)
    loss_of(model, torch.ones(2, 4)).backward()
    with pytest.raises(hvd.MismatchError, match=r'"gradients\d+\.weight": rank 0 gave a weight, rank 1 gave no weight'):
        optimizer.step()
