"""Gradients of DistributedOptimizer that need care: sparse, complex, missing, clipped, scaled, changed too early."""

import pytest
from harness.frameworks import on_demand

from ringtrain import Average, _core

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")


def new_model(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def inputs_of(rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def loss_of(model, rank):
    return model(inputs_of(rank)).square().mean()


def mean_loss(model):
    return torch.stack([loss_of(model, rank) for rank in range(hvd.size())]).mean()


def require_same(one, other):
    for mine, expected in zip(one.parameters(), other.parameters(), strict=True):
        assert (mine - expected).abs().max().item() < 1e-12


# Clipping


def two_optimizers(model, op=Average):
    """Over one model, at addresses that are in another order on each rank."""
    junk = [torch.zeros(length) for length in range(1, 1 + 400 * hvd.rank())]
    optimizers = [hvd.DistributedOptimizer(sgd(layer.parameters()), op=op) for layer in model]
    del junk
    return optimizers


@pytest.mark.ranks(2, 3)
def test_one_norm_over_the_gradients_of_several_optimizers():
    model, alone = new_model(), new_model()
    optimizers, plain = two_optimizers(model), sgd(alone.parameters())
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, hvd.rank()).backward()
        norm = hvd.clip_grad_norm_(model.parameters(), 0.01)
        for optimizer in reversed(optimizers):
            optimizer.step()
        plain.zero_grad()
        mean_loss(alone).backward()
        assert abs(norm - torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)).item() < 1e-12
        plain.step()
    require_same(model, alone)


@pytest.mark.ranks(2)
def test_clipping_waits_for_all_though_a_rank_has_no_gradient_of_one_optimizer():
    model, alone = new_model(), new_model()
    optimizers, plain = two_optimizers(model), sgd(alone.parameters())
    is_first = hvd.rank() == 0
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        hidden = model[0](inputs_of(hvd.rank()))
        (hidden if is_first else model[1](hidden)).square().mean().backward()
        norm = hvd.clip_grad_norm_(model.parameters(), 0.01)
        for optimizer in optimizers:
            optimizer.step()
        plain.zero_grad()
        losses = [alone[0](inputs_of(0)).square().mean(), alone(inputs_of(1)).square().mean()]
        torch.stack(losses).mean().backward()
        assert abs(norm - torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)).item() < 1e-12
        plain.step()
    require_same(model, alone)


@pytest.mark.ranks(2)
def test_clipping_disturbs_no_adasum_optimizer_and_no_replaced_one():
    model, other = new_model(), new_model(2)
    replaced = hvd.DistributedOptimizer(sgd(model.parameters()))
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    adasum = hvd.DistributedOptimizer(sgd(other.parameters()), op=hvd.Adasum)
    loss_of(model, hvd.rank()).backward()
    loss_of(other, hvd.rank()).backward()
    own = torch.nn.utils.get_total_norm([parameter.grad for parameter in other.parameters()])
    norms = hvd.allgather(hvd.clip_grad_norm_(model.parameters(), 1.0)[None])
    assert norms[0] == norms[1]
    assert hvd.clip_grad_norm_(other.parameters(), 1.0) == own
    optimizer.step()
    adasum.step()
    del replaced


@pytest.mark.ranks(2)
def test_gradients_of_no_sync_alone_are_averaged_before_they_are_clipped():
    model, alone = new_model(), new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(model, hvd.rank()).backward()
            own = hvd.clip_grad_norm_(model.parameters(), float("inf"))
        norms = hvd.allgather(own[None])
        assert norms[0] != norms[1]  # within no_sync they are this rank's own
        norm = hvd.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        assert hvd.rank() == 1 or hvd.clip_grad_norm_(model.parameters(), 1.0) > 0  # nothing is left to wait for
        alone.zero_grad()
        mean_loss(alone).backward()
        assert abs(norm - torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)).item() < 1e-12
        sgd(alone.parameters()).step()
    require_same(model, alone)


# Gradients that somebody changes before they are averages


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"backward_passes_per_step": 2}], ids=str)
def test_clipping_ones_own_gradients_is_an_error_from_the_first_step_on(options):
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), **options)
    passes = options.get("backward_passes_per_step", 1)
    for _ in range(2):
        model.zero_grad()
        for _ in range(passes):
            loss_of(model, hvd.rank()).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(
            hvd.StepOrderError, match=r'"0\.1".* was changed between backward\(\) and step\(\).*clip_grad_'
        ):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
    model.zero_grad()
    for _ in range(passes):
        loss_of(model, hvd.rank()).backward()
    optimizer.step()


@pytest.mark.ranks(2)
def test_ones_own_gradients_may_be_changed_where_nothing_is_averaged_yet():
    """In no_sync, between the passes of a step, and when a step comes before its passes are complete."""
    model, alone = new_model(), new_model()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model.parameters())), sgd(alone.parameters())

    def halve(one):
        for parameter in one.parameters():
            parameter.grad.mul_(0.5)

    for by_passes in (False, True, True):
        model.zero_grad()
        with optimizer.no_sync():
            loss_of(model, hvd.rank()).backward()
        halve(model)
        if by_passes:
            loss_of(model, hvd.rank()).backward()
        optimizer.step()
        plain.zero_grad()
        mean_loss(alone).backward()
        halve(alone)
        if by_passes:
            mean_loss(alone).backward()
        plain.step()
    optimizer.set_backward_passes_per_step(2)
    model.zero_grad()
    loss_of(model, hvd.rank()).backward()
    halve(model)
    optimizer.step()
    plain.zero_grad()
    mean_loss(alone).backward()
    halve(alone)
    plain.step()
    require_same(model, alone)


@pytest.mark.ranks(2)
def test_a_graph_of_gradients_is_refused_by_backward_and_welcome_in_no_sync():
    model, alone = new_model(), new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    plain = sgd(alone.parameters())
    refusal = r'"1\.(weight|bias)" cannot be averaged.*create_graph=True.*torch\.autograd\.grad.*no_sync'
    for _ in range(2):
        optimizer.zero_grad()
        with pytest.raises(AssertionError, match=refusal):
            loss_of(model, hvd.rank()).backward(create_graph=True)
        optimizer.zero_grad()  # nothing is under way
        for one, how in ((model, lambda one: loss_of(one, hvd.rank())), (alone, mean_loss)):
            with optimizer.no_sync():
                how(one).backward(create_graph=True)
            if one is model:
                penalty = sum(parameter.grad.square().sum() for parameter in one.parameters())
            else:  # the mean of the ranks' penalties
                penalty = 0
                for rank in range(hvd.size()):
                    gradients = torch.autograd.grad(loss_of(one, rank), list(one.parameters()), create_graph=True)
                    penalty = penalty + sum(gradient.square().sum() for gradient in gradients) / hvd.size()
            penalty.backward()
        optimizer.step()
        plain.step()
        plain.zero_grad()
    require_same(model, alone)


# Scalers of a project's own


def own_scaler():
    class OwnScaler(torch.amp.GradScaler):
        """As of a project that looks at the gradients itself, with a function beside the class."""

        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            return unscale(optimizer, inv_scale, found_inf)

    return OwnScaler("cpu", init_scale=4.0)


def unscale(optimizer, inv_scale, found_inf):
    gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
    return {found_inf.device: found_inf}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_local", [False, True], ids=["", "no_sync"])
def test_a_scaler_of_ones_own_sees_averages(is_local):
    model, alone = new_model().float(), new_model().float()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model.parameters())), sgd(alone.parameters())
    scaler, plain_scaler = own_scaler(), own_scaler()
    inputs = [inputs_of(rank).float() for rank in range(hvd.size())]
    for step in range(4):
        model.zero_grad()
        alone.zero_grad()
        factors = [float("inf") if step in (0, 2) and rank == 1 else 1.0 for rank in range(hvd.size())]
        losses = [model(inputs[hvd.rank()]).square().mean() * factors[hvd.rank()]]
        whole = [alone(one).square().mean() * factor for one, factor in zip(inputs, factors, strict=True)]
        if is_local:
            with optimizer.no_sync():
                scaler.scale(losses[0]).backward()
        else:
            scaler.scale(losses[0]).backward()
        scaler.step(optimizer)
        scaler.update()
        plain_scaler.scale(torch.stack(whole).mean()).backward()
        plain_scaler.step(plain)
        plain_scaler.update()
        assert scaler.get_scale() == plain_scaler.get_scale()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert (mine - expected).abs().max().item() < 1e-6


# Sparse gradients


def embedding():
    torch.manual_seed(3)
    return torch.nn.Embedding(6, 2, sparse=True).double()


def words():
    return torch.tensor([[1, 2], [2, 4]])


SPARSE_OPTIMIZERS = {"sgd": sgd, "adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", SPARSE_OPTIMIZERS)
@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("submits_at_once", [False, True])
def test_sparse_gradients_may_be_missing_on_a_rank(optimizer, sparse_as_dense, submits_at_once):
    """In the first step, in a later one, and on all ranks."""
    model, alone = embedding(), embedding()
    inner = SPARSE_OPTIMIZERS[optimizer](model.parameters())
    distributed = hvd.DistributedOptimizer(inner, sparse_as_dense=sparse_as_dense)
    if submits_at_once:
        distributed.set_backward_passes_per_step(1)
    plain = SPARSE_OPTIMIZERS[optimizer](alone.parameters())
    for step, having in enumerate([(1,), (0, 1), (0,), (), (0, 1)]):
        distributed.zero_grad()
        if hvd.rank() in having:
            model(words()[hvd.rank()]).square().sum().backward()
        distributed.step()
        assert model.weight.grad.is_sparse, step
        plain.zero_grad()
        alone(words()[0, :0]).sum().backward()  # empty
        for rank in having:
            (alone(words()[rank]).square().sum() / 2).backward()
        plain.step()
        require_same(model, alone)


@pytest.mark.ranks(2)
def test_a_gradient_that_is_sparse_on_some_ranks_only_travels_dense():
    model, alone = embedding(), embedding()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model.parameters())), sgd(alone.parameters())
    for swapped in (0, 1, 0):
        is_sparse = hvd.rank() == swapped
        optimizer.zero_grad()
        torch.nn.functional.embedding(words()[hvd.rank()], model.weight, sparse=is_sparse).square().sum().backward()
        optimizer.step()
        plain.zero_grad()
        (alone(words()).square().sum() / 2).backward()
        plain.step()
        require_same(model, alone)


@pytest.mark.ranks(2)
def test_a_sparse_gradient_that_comes_later_for_the_first_time_travels_dense():
    model, dense = embedding(), torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    alone = embedding()
    optimizer, plain = hvd.DistributedOptimizer(sgd([model.weight, dense])), sgd(alone.parameters())
    for having in ((), (1,), (0, 1)):
        optimizer.zero_grad()
        loss = dense.sum()
        if hvd.rank() in having:
            loss = loss + model(words()[hvd.rank()]).square().sum()
        loss.backward()
        optimizer.step()
        plain.zero_grad()
        for rank in having:
            (alone(words()[rank]).square().sum() / 2).backward()
        plain.step()
        require_same(model, alone)


# Complex parameters


def complex_model():
    torch.manual_seed(5)
    return torch.nn.ParameterDict(
        {
            "weight": torch.nn.Parameter(torch.randn(3, 4, dtype=torch.complex128)),
            "bias": torch.nn.Parameter(torch.randn(4, dtype=torch.complex128)),
            "gain": torch.nn.Parameter(torch.randn(4, dtype=torch.float64)),
        }
    )


def complex_loss(model, rank):
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    outputs = inputs.to(torch.complex128) @ model["weight"].conj() + model["bias"]
    return (outputs.abs().square() * model["gain"]).mean() + (outputs * (1 + 2j)).imag.mean()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "options", [{}, {"groups": 2}, {"gradient_as_shared_view": True}, {"nan_check": True}], ids=str
)
def test_complex_parameters_train_as_one_process_does(options):
    model, alone = complex_model(), complex_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), **options)
    plain = torch.optim.Adam(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        complex_loss(model, hvd.rank()).backward()
        optimizer.step()
        plain.zero_grad()
        torch.stack([complex_loss(alone, rank) for rank in range(hvd.size())]).mean().backward()
        plain.step()
    require_same(model, alone)


@pytest.mark.ranks(2)
def test_complex_gradients_are_compressed_and_combined_by_adasum():
    model = complex_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), compression=hvd.Compression.fp16)
    complex_loss(model, hvd.rank()).backward()
    own = hvd.allgather(torch.view_as_real(model["bias"].grad.resolve_conj())[None])
    optimizer.step()
    assert (torch.view_as_real(model["bias"].grad) - own.mean(0)).abs().max().item() < 0.01

    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    adasum = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=hvd.Adasum)
    parameter.grad = torch.tensor([1 + 1j, 0] if hvd.rank() == 0 else [0, 2j], dtype=torch.complex128)
    adasum.step()
    assert parameter.tolist() == [-1 - 1j, -2j]  # these are orthogonal, so Adasum adds them


@pytest.mark.ranks(2, initialised=False)
def test_the_gradients_of_early_parameters_are_reduced_first():
    hvd.init(fusion_threshold_mb=0, cache_capacity=0)  # what is cached has the order of the first step
    parameters = {name: torch.nn.Parameter(torch.ones(1000)) for name in "abcd"}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), 0.1), named_parameters=parameters.items())
    in_order = [f"gradients0.{name}" for name in parameters]

    def are_in_order():
        hvd.barrier()
        before = hvd.allreduce_async_(torch.ones(8_000_000), name="before")  # all else is agreed on behind it
        product = torch.ones(1000)
        for parameter in parameters.values():
            product = product * parameter
        product.sum().backward()  # makes the gradient of d first
        optimizer.step()
        optimizer.zero_grad()
        hvd.synchronize(before)
        begun = {one["name"]: one["begun_s"] for one in _core.last_operations()}
        return sorted(in_order, key=begun.__getitem__) == in_order

    are_in_order()  # gradients are sent in backward() from the second step on
    for _ in range(30):  # in some steps a busy machine keeps backward() until the operation before is done
        if hvd.allreduce(torch.tensor(are_in_order()), op=hvd.Max):
            break
    else:
        raise AssertionError("the gradient of a was never the first")
    hvd.barrier()
    hvd.shutdown()
