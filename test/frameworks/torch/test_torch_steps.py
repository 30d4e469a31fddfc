"""Steps that some ranks take in another way: without backward(), or with one that fails; and what they update with."""

import re

import numpy as np
import pytest
from harness.frameworks import on_demand
from harness.logged import messages

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")


def new_model():
    torch.manual_seed(1)
    layers = torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)
    return torch.nn.Sequential(*layers).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


def loss_of(model, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(3, 4, generator=generator, dtype=torch.float64)).square().mean()


def require_trained_alike(model, alone):
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert (mine - expected).abs().max().item() < 1e-12
    hvd.check_replicas(model.state_dict())


def twins(**options):
    """A model that the ranks train together, and one that a process trains alone, with their optimizers."""
    model, alone = new_model(), new_model()
    return model, alone, hvd.DistributedOptimizer(sgd(model.parameters()), **options), sgd(alone.parameters())


def step_alone(alone, plain, step, ranks=None, clip=None):
    """One step on the batches of these ranks, or of all, as the mean over all."""
    plain.zero_grad()
    losses = [loss_of(alone, step, rank) for rank in (range(hvd.size()) if ranks is None else ranks)]
    (sum(losses) / hvd.size()).backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(alone.parameters(), clip)
    plain.step()


# A rank without backward()


def by_hand(loss, model):
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        parameter.grad = gradient


GRADIENTS = {"backward": lambda loss, _model: loss.backward(), "autograd.grad": by_hand}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("idle_step", [0, 2])
@pytest.mark.parametrize("asks", ["step", "clip", "scaler", "scaler and clip", "synchronize"])
@pytest.mark.parametrize("gradients", GRADIENTS)
def test_a_rank_without_backward_contributes_zeros_whoever_asks_for_averages(idle_step, asks, gradients):
    model, alone, optimizer, plain = twins()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled="scaler" in asks)
    scaler.scale(torch.zeros(1))  # a scaler that has scaled nothing yet refuses to step
    idle = hvd.size() - 1
    for step in range(4):
        optimizer.zero_grad()
        if (step, hvd.rank()) != (idle_step, idle):
            GRADIENTS[gradients](scaler.scale(loss_of(model, step, hvd.rank())), model)
        if asks == "scaler and clip":
            scaler.unscale_(optimizer)
        if "clip" in asks:
            hvd.clip_grad_norm_(model.parameters(), 0.05)
        if asks == "synchronize":
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        ranks = [rank for rank in range(hvd.size()) if (step, rank) != (idle_step, idle)]
        step_alone(alone, plain, step, ranks, 0.05 if "clip" in asks or asks == "synchronize" else None)
    require_trained_alike(model, alone)


@pytest.mark.ranks(2)
def test_a_rank_that_does_nothing_but_step_contributes_zeros_and_not_the_last_averages():
    model, alone, optimizer, plain = twins()
    for step in range(4):
        is_idle = step == 2 and hvd.rank() == 1
        if not is_idle:
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
        step_alone(alone, plain, step, range(1 if step == 2 else 2))
    optimizer.step()  # with the same gradients once more, on all ranks
    plain.step()
    require_trained_alike(model, alone)


def copy_to_data(parameter, gradient):
    parameter.grad.data.copy_(gradient)


def replace_data(parameter, gradient):
    parameter.grad.data = gradient


def copy_to_numpy(parameter, gradient):
    parameter.grad.numpy()[...] = gradient.numpy()


def write_gradients(model, step, write):
    """As code with master parameters does, which calls zero_grad() of the model alone."""
    parameters = list(model.parameters())
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(loss_of(model, step, hvd.rank()), parameters), strict=True
    ):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        write(parameter, gradient)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("write", [copy_to_data, replace_data, copy_to_numpy])
@pytest.mark.parametrize(
    ("asks", "options"), [("step", {}), ("scaler", {"gradient_as_shared_view": True, "groups": 2}), ("synchronize", {})]
)
def test_gradients_that_are_written_past_autograd_in_every_step_are_averaged(write, asks, options):
    model, alone, optimizer, plain = twins(**options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=asks == "scaler")
    scaler.scale(torch.zeros(1))
    for step in range(4):
        write_gradients(model, step, write)
        if asks == "synchronize":
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        step_alone(alone, plain, step, clip=0.05 if asks == "synchronize" else None)
        if step == 1:
            hvd.join()  # the next step agrees anew on which gradients there are
    require_trained_alike(model, alone)


@pytest.mark.ranks(2)
def test_clipping_gradients_that_were_written_past_autograd_is_an_error_on_all_ranks():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    write_gradients(model, 0, copy_to_data)
    optimizer.step()
    write_gradients(model, 1, copy_to_data)
    hvd.clip_grad_norm_(model.parameters(), 0.05)
    with pytest.raises(hvd.StepOrderError, match=r"2 of 2 ranks have clipped.*p\.grad\.data\.copy_\(\)"):
        optimizer.step()
    hvd.check_replicas(model.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_shared_view": True}], ids=str)
def test_a_second_step_has_the_gradients_of_the_first_one_also_where_a_rank_has_joined(options):
    model, alone, optimizer, plain = twins(**options)
    with hvd.Join(optimizer):
        for step in range(3 - hvd.rank()):
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()
            optimizer.step()
    for step in range(3):
        ranks = range(1 if step == 2 else 2)
        plain.zero_grad()
        (sum(loss_of(alone, step, rank) for rank in ranks) / len(ranks)).backward()
        plain.step()
        plain.step()
    require_trained_alike(model, alone)


@pytest.mark.ranks(2)
def test_clipping_the_gradients_of_the_last_step_where_others_have_new_ones_is_an_error_on_all_ranks():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    for step in range(3):
        is_idle = step == 1 and hvd.rank() == 1
        if not is_idle:
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
        if step == 1:
            with pytest.raises(hvd.StepOrderError, match=r"1 of 2 ranks.*call zero_grad\(\) on all ranks"):
                hvd.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
        else:
            hvd.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    hvd.check_replicas(model.state_dict())


@pytest.mark.ranks(2)
def test_steps_that_a_scaler_or_a_norm_skips_are_followed_by_new_averages():
    """Also where the model drops the gradients, and where a rank has none then."""
    model, alone, optimizer, plain = twins()
    for step in range(4):
        model.zero_grad()
        if not (step == 2 and hvd.rank() == 1):
            loss_of(model, step, hvd.rank()).backward()
        norm = hvd.clip_grad_norm_(model.parameters(), 0.05)
        assert len(set(hvd.allgather(norm[None]).tolist())) == 1
        if step == 1:
            continue
        optimizer.step()
        step_alone(alone, plain, step, range(1 if step == 2 else 2), clip=0.05)
    require_trained_alike(model, alone)


@pytest.mark.ranks(2)
def test_gradients_that_are_dropped_after_clipping_stay_so():
    """As of a layer that is not trained in the first epochs."""
    model, alone, optimizer, plain = twins()
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        (sum(loss_of(alone, step, rank) for rank in range(2)) / 2).backward()
        hvd.clip_grad_norm_(model.parameters(), 0.05)
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        for one in (model, alone):
            one[2].weight.grad = one[2].bias.grad = None
        optimizer.step()
        plain.step()
    require_trained_alike(model, alone)


@pytest.mark.ranks(2)
def test_ranks_may_have_different_numbers_of_passes_in_the_first_step():
    model, alone, optimizer, plain = twins()
    for step, passes in enumerate([(1, 2), (2, 2), (2, 1)]):
        optimizer.zero_grad()
        for number in range(passes[hvd.rank()]):
            loss_of(model, step + 10 * number, hvd.rank()).backward()
        optimizer.step()
        plain.zero_grad()
        for rank in range(2):
            for number in range(passes[rank]):
                (loss_of(alone, step + 10 * number, rank) / 2).backward()
        plain.step()
    require_trained_alike(model, alone)


@pytest.mark.ranks(2)
def test_clipping_waits_for_the_averages_inside_an_island():
    """Also of a rank without backward()."""
    model, alone = new_model(), new_model()
    optimizer, plain = hvd.DiLoCo(sgd(model.parameters()), every=10, islands=[[0, 1]]), sgd(alone.parameters())
    for step in range(3):
        optimizer.zero_grad()
        if step != 1 or hvd.rank() == 0:
            loss_of(model, step, hvd.rank()).backward()
        hvd.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        step_alone(alone, plain, step, range(1 if step == 1 else 2), clip=0.05)
    require_trained_alike(model, alone)
    hvd.remove_process_set(optimizer._local_steps.islands.of_rank)


# Parameters without a gradient on any rank


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"sparse_as_dense": True}], ids=str)
def test_a_parameter_that_no_rank_has_used_is_left_alone_until_one_does(options):
    def embeddings():
        torch.manual_seed(3)
        return torch.nn.ModuleList(torch.nn.Embedding(6, 2, sparse="groups" not in options).double() for _ in range(2))

    def optimizer_of(model):
        kind = torch.optim.Adam if "groups" in options else torch.optim.SparseAdam
        return kind(list(model.parameters()), lr=0.1)

    def loss_of_words(model, step, rank):
        words = torch.tensor([rank, 2 + rank])
        loss = model[0](words).square().sum()
        return loss + model[1](words).square().sum() if step >= 2 and rank == 1 else loss

    model, alone = embeddings(), embeddings()
    optimizer, plain = hvd.DistributedOptimizer(optimizer_of(model), **options), optimizer_of(alone)
    for step in range(4):
        optimizer.zero_grad()
        loss_of_words(model, step, hvd.rank()).backward()
        optimizer.step()
        assert (model[1].weight.grad is None) == (step < 2)
        plain.zero_grad()
        (sum(loss_of_words(alone, step, rank) for rank in range(2)) / 2).backward()
        plain.step()
    require_trained_alike(model, alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("idle", [None, 1])
def test_a_parameter_may_be_frozen_between_backward_and_step_and_thawed_later(idle):
    model, alone, optimizer, plain = twins()
    for step in range(6):
        optimizer.zero_grad()
        plain.zero_grad()
        ranks = [rank for rank in range(2) if step != 2 or rank != idle]
        if hvd.rank() in ranks:
            loss_of(model, step, hvd.rank()).backward()
        (sum(loss_of(alone, step, rank) for rank in ranks) / 2).backward()
        for one in (model, alone):
            if step == 2:
                one[0].weight.requires_grad_(False)
        optimizer.step()
        plain.step()
        for one in (model, alone):
            if step == 4:
                one[0].weight.requires_grad_(True)
    require_trained_alike(model, alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_added", [False, True], ids=["from the start", "added"])
@pytest.mark.parametrize("frozen_then", [[], [0]], ids=["thawed", "swapped"])
@pytest.mark.parametrize("idle", [None, 1])
def test_a_parameter_that_is_thawed_after_zero_grad_is_averaged_in_this_step(is_added, frozen_then, idle):
    model, alone = new_model(), new_model()
    for one in (model, alone):
        one[2].requires_grad_(False)
    first = [sgd((one[0] if is_added else one).parameters()) for one in (model, alone)]
    optimizer, plain = hvd.DistributedOptimizer(first[0]), first[1]
    for step in range(5):
        for one, by in ((model, optimizer), (alone, plain)):
            if step == 2 and is_added:
                by.add_param_group({"params": list(one[2].parameters())})
            by.zero_grad()
            one[2].requires_grad_(step >= 2)
            for place in frozen_then:
                one[place].requires_grad_(step < 2)
        ranks = [rank for rank in range(2) if step != 2 or rank != idle]
        if hvd.rank() in ranks:
            loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
        (sum(loss_of(alone, step, rank) for rank in ranks) / 2).backward()
        plain.step()
    require_trained_alike(model, alone)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_shared_view": True}], ids=str)
def test_gradients_may_have_another_dtype_than_their_parameters(options):
    model = new_model().bfloat16()
    if not hasattr(model[0].weight, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), **options)
    for step in range(3):
        optimizer.zero_grad()
        if (step, hvd.rank()) != (step, step % 2):
            model(torch.ones(2, 4).bfloat16()).float().square().mean().backward()
        optimizer.synchronize()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient.dtype == torch.float32 and gradient.abs().max() > 0 for gradient in gradients)
        hvd.check_replicas(gradients)


# A backward() that fails


def fail(model):
    """After the gradients of the last layer are on their way."""

    def raise_error(_gradient):
        raise ZeroDivisionError

    inner = model[1](model[0](torch.ones(2, 4, dtype=torch.float64)))
    inner.register_hook(raise_error)
    with pytest.raises(ZeroDivisionError):
        model[2](inner).sum().backward()


@pytest.mark.ranks(2)
def test_zero_grad_drops_a_step_whose_backward_has_failed_on_all_ranks():
    model, alone, optimizer, plain = twins()
    for step in range(4):
        optimizer.zero_grad()
        if step in (0, 2):
            fail(model)
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
        step_alone(alone, plain, step)
    require_trained_alike(model, alone)


@pytest.mark.ranks(2)
def test_dropping_a_step_that_another_rank_takes_is_an_error_on_both():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if step == 1:
            if hvd.rank() == 0:
                fail(model)
            else:
                loss_of(model, step, 1).backward()
            with pytest.raises(hvd.StepOrderError, match=r"backward\(\) failed on 1 of 2 ranks.*no rank has updated"):
                optimizer.zero_grad() if hvd.rank() == 0 else optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))
        else:
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()
    hvd.check_replicas(model.state_dict())


# Options and states that differ


def lr_of_rank(optimizer, step):
    optimizer.param_groups[0]["lr"] = 0.5 + 0.5 * hvd.rank() * (step >= 2)


def momentum_of_rank(optimizer, step):
    optimizer.param_groups[0]["momentum"] = 0.5 + 0.25 * hvd.rank() * (step >= 2)


def state_of_rank_0(optimizer, step):
    if step == 2 and hvd.rank() == 0:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


def lr_of_one_element(optimizer, step):
    optimizer.param_groups[0]["lr"] = torch.tensor([0.5 + 0.5 * hvd.rank() * (step >= 2)])


def almost_the_same_lr(optimizer, step):
    optimizer.param_groups[0]["lr"] = [0.3, 0.1 + 0.2][hvd.rank() * (step >= 2)]


def lr_of_another_type(optimizer, step):
    """As read from a file on one rank, and from the command line on the other."""
    optimizer.param_groups[0]["lr"] = [1, 1.0][hvd.rank()]


def the_same_state(optimizer, step):
    optimizer.load_state_dict(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=step % 2)


CHANGES = {
    "lr": (lr_of_rank, r"the option lr is 0\.5 on rank 0 and 1 on rank 1\..*ReduceLROnPlateau"),
    "momentum": (momentum_of_rank, r"the option momentum is 0\.5 on rank 0 and 0\.75 on rank 1"),
    "state": (state_of_rank_0, r"the state of the optimizer is not the same.*hvd.broadcast_optimizer_state\("),
    "lr of one element": (lr_of_one_element, r"the option lr is 0\.5 on rank 0 and 1 on rank 1"),
    "almost the same lr": (almost_the_same_lr, r"lr is 0\.3 on rank 0 and 0\.30000000000000004 on rank 1"),
    "lr of another type": (lr_of_another_type, None),
    "none": (the_same_state, None),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", CHANGES)
def test_ranks_that_update_in_different_ways_are_told_so_once(change):
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    make, text = CHANGES[change]
    with messages() as said:
        for step in range(5):
            make(optimizer, step)
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()
            assert step >= 2 or said == []
    assert len(said) == (text is not None and hvd.rank() == 0), said
    assert all(re.search(text, one) for one in said)


@pytest.mark.ranks(2)
def test_a_state_that_one_rank_alone_has_is_told_in_the_first_step():
    model = new_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    if hvd.rank() == 0:
        loss_of(model, 0, 0).backward()
        inner.step()
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(inner)
    with messages() as said:
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()
    assert len(said) == (hvd.rank() == 0), said
    assert all("the state of the optimizer is not the same on all ranks" in one for one in said)


def require_told(state_of_rank, is_told):
    model = torch.nn.Linear(10, 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        inner.state[parameter] = state_of_rank(hvd.rank())
    inner.state["of all"] = state_of_rank(0)
    optimizer = hvd.DistributedOptimizer(inner)
    with messages() as said:
        (model(torch.ones(1, 10)) * (1 + hvd.rank())).sum().backward()
        optimizer.step()
    assert len(said) == (is_told and hvd.rank() == 0), said
    assert all("the state of the optimizer is not the same on all ranks" in one for one in said)


STATES = {
    "last element": lambda rank: {"moment": torch.tensor([0.0] * 99 + [rank])},
    "list": lambda rank: {"moments": [torch.zeros(2), torch.full((2,), float(rank))]},
    "mapping": lambda rank: {"moments": {"first": {"count": rank}}},
    "array": lambda rank: {"moment": np.full(99, rank)},
    "tuple of None": lambda rank: {"moments": (None, None if rank else 0)},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("state", STATES)
def test_all_elements_and_levels_of_a_state_are_compared(state):
    require_told(STATES[state], True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["bool", "complex64", "bfloat16", "float8_e4m3fn", "int16"])
def test_states_of_any_dtype_and_layout_that_are_the_same_cause_no_message(dtype):
    moment = torch.ones(3, 4).to(getattr(torch, dtype))

    def state_of_rank(rank):
        views = {"turned": moment.t(), "empty": moment[:0], "number": moment[0, 0]}
        conjugated = {"conjugated": moment.conj(), "imaginary": moment.conj().imag} if moment.is_complex() else {}
        return {**views, **conjugated, "count": [1, 1.0][rank], "function": lambda: rank, "name": f"of rank {rank}"}

    require_told(state_of_rank, False)


@pytest.mark.ranks(2)
def test_parameters_that_differ_in_their_last_element_are_told():
    model = torch.nn.Linear(10, 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
        model.weight[9, 9] = hvd.rank()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with messages() as said:
        (model(torch.ones(1, 10)) * (1 + hvd.rank())).sum().backward()
        optimizer.step()
    assert len(said) == (hvd.rank() == 0), said
    assert all("ranks 0-1 begin with different parameters" in one for one in said)


@pytest.mark.ranks(2, 3)
def test_parameters_in_another_order_on_one_rank_are_refused_on_all():
    model = new_model()
    named = list(model.named_parameters())
    ordered = named[::-1] if hvd.rank() == 1 else named
    optimizer = hvd.DistributedOptimizer(sgd([parameter for _, parameter in ordered]), named_parameters=named)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(2):
        loss_of(model, step, hvd.rank()).backward()
        last = hvd.size() - 1
        with pytest.raises(hvd.MismatchError, match=rf"ranks 0-{last} have the same names in different orders.*a set"):
            optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    hvd.barrier()
