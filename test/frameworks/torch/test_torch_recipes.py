"""Losses over all ranks, SAM and several optimizers, written as docs/pytorch.md says, are those of one process."""

import contextlib

import pytest
from harness.frameworks import on_demand

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")


def linear(outputs, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(10, outputs).double()


def batch_of(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 10, generator=generator, dtype=torch.float64)


def batch_of_all(step=0):
    return torch.cat([batch_of(rank, step) for rank in range(hvd.size())])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def distributed(model):
    return hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())


def require_equal_models(own, alone):
    """The losses are not exact in binary, so the last bits differ."""
    own, alone = (torch.nn.utils.parameters_to_vector(one.parameters()) for one in (own, alone))
    torch.testing.assert_close(own, alone, rtol=0, atol=1e-12)
    assert torch.equal(own, hvd.broadcast(own.detach(), root_rank=0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("takes_own_rows", [False, True], ids=["all_rows", "own_rows"])
def test_a_loss_over_the_batches_of_all_ranks_times_their_number_is_that_of_one_process(takes_own_rows):
    own, alone = linear(8), linear(8)
    optimizer = distributed(own)
    rows = hvd.allgather(torch.nn.functional.normalize(own(batch_of(hvd.rank())), dim=1))
    mine = rows[4 * hvd.rank() : 4 * hvd.rank() + 4] if takes_own_rows else rows
    loss = torch.logsumexp(mine @ rows.T, 1).mean()
    (loss * hvd.size()).backward()
    optimizer.step()

    rows = torch.nn.functional.normalize(alone(batch_of_all()), dim=1)
    torch.logsumexp(rows @ rows.T, 1).mean().backward()
    sgd(alone).step()
    require_equal_models(own, alone)


def step_of_sam(model, optimizer, inputs):
    parameters = list(model.parameters())
    model(inputs).square().mean().backward()
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    norm = torch.linalg.vector_norm(torch.cat([one.grad.flatten() for one in parameters]))
    moves = [one.grad * (0.05 / (norm + 1e-12)) for one in parameters]
    with torch.no_grad():
        torch._foreach_add_(parameters, moves)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    with torch.no_grad():
        torch._foreach_sub_(parameters, moves)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(2)
def test_sam_with_averages_of_both_passes_is_that_of_one_process():
    own, alone = linear(1), linear(1)
    optimizer, of_one = distributed(own), sgd(alone)
    for step in range(3):
        step_of_sam(own, optimizer, batch_of(hvd.rank(), step))
        step_of_sam(alone, of_one, batch_of_all(step))
    require_equal_models(own, alone)


def step_of_gan(generator, discriminator, of_generator, of_discriminator, inputs):
    of_discriminator.zero_grad()
    fakes = generator(inputs).detach()
    (discriminator(inputs).square() - discriminator(fakes)).mean().backward()
    of_discriminator.step()
    of_generator.zero_grad()
    no_sync = getattr(of_discriminator, "no_sync", contextlib.nullcontext)
    with no_sync():
        discriminator(generator(inputs)).square().mean().backward()
    of_generator.step()


@pytest.mark.ranks(2)
def test_a_gan_with_two_optimizers_is_that_of_one_process():
    own, alone = [(linear(10, seed=1), linear(1, seed=2)) for _ in range(2)]
    optimizers, of_one = [distributed(one) for one in own], [sgd(one) for one in alone]
    for step in range(3):
        step_of_gan(*own, *optimizers, batch_of(hvd.rank(), step))
        step_of_gan(*alone, *of_one, batch_of_all(step))
    for one, other in zip(own, alone, strict=True):
        require_equal_models(one, other)
