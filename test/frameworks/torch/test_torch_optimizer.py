"""DistributedOptimizer for torch: N ranks on shards train as one process does on the whole batch."""

import copy
import gc
import pickle
import re
import time
import warnings

import numpy as np
import pytest
from harness.frameworks import on_demand
from harness.logged import messages

import ringtrain
from ringtrain import optim
from ringtrain.record import steps

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")

STEPS = 20
BATCH = 12  # of all ranks: a multiple of 1, 2, 3, 4 ranks and of 2 passes


def new_model(seed=1):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8, bias=False), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 3)).double()


def batches(steps=STEPS, batch=BATCH):
    random = torch.Generator().manual_seed(7)
    for _ in range(steps):
        yield (
            torch.randn(batch, 5, generator=random, dtype=torch.float64),
            torch.randint(0, 3, (batch,), generator=random),
        )


def shard(tensor):
    return tensor[hvd.rank() :: hvd.size()]


def loss_of(model, inputs, labels):
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def parameters_of(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def difference(one, other):
    return (parameters_of(one) - parameters_of(other)).abs().max().item()


def train(model, optimizer, is_sharded, passes=1, clip=None, steps=STEPS, context=None):
    """The usual loop; `passes` accumulates over parts of each batch."""
    for inputs, labels in batches(steps):
        optimizer.zero_grad()
        if is_sharded:
            inputs, labels = shard(inputs), shard(labels)
        for part, (some_inputs, some_labels) in enumerate(zip(inputs.chunk(passes), labels.chunk(passes), strict=True)):
            if context is not None and part < passes - 1:
                with context():
                    (loss_of(model, some_inputs, some_labels) / passes).backward()
            else:
                (loss_of(model, some_inputs, some_labels) / passes).backward()
        if clip is not None:
            clipping = hvd.clip_grad_norm_ if is_sharded else torch.nn.utils.clip_grad_norm_
            clipping(model.parameters(), clip)
        optimizer.step()
    return model


def trained_alone(make_optimizer, **how):
    model = new_model()
    return train(model, make_optimizer(model.parameters()), is_sharded=False, **how)


def trained_together(make_optimizer, options=None, **how):
    model = new_model()
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(model.parameters()), named_parameters=model.named_parameters(), **(options or {})
    )
    return train(model, optimizer, is_sharded=True, **how)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


OPTIMIZERS = {
    "sgd": sgd,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_train_as_the_whole_batch(name):
    assert difference(trained_together(OPTIMIZERS[name]), trained_alone(OPTIMIZERS[name])) < 1e-12


WAYS = {
    "groups": {"options": {"groups": 2}},
    "num_groups": {"options": {"num_groups": 3}},
    "groups and num_groups": {"options": {"groups": 2, "num_groups": 3}},
    "predivide": {"options": {"gradient_predivide_factor": 2.0}},
    "shared memory": {"options": {"gradient_as_shared_view": True}},
    "clipping": {"clip": 0.1},
    "inferred passes": {"passes": 2},
    "passes": {"passes": 2, "options": {"backward_passes_per_step": 2}},
    "passes in shared memory": {"passes": 2, "options": {"gradient_as_shared_view": True}},
    "passes in groups, clipped": {"passes": 2, "clip": 0.1, "options": {"groups": 2}},
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_trains_as_the_whole_batch(name, way):
    how = dict(WAYS[way])
    together = trained_together(OPTIMIZERS[name], how.pop("options", None), **how)
    assert difference(together, trained_alone(OPTIMIZERS[name], **how)) < 1e-12


@pytest.mark.ranks(2)
def test_no_sync_accumulates():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    train(model, optimizer, is_sharded=True, passes=3, context=optimizer.no_sync)
    assert difference(model, trained_alone(sgd, passes=3)) < 1e-12


@pytest.mark.ranks(2)
def test_the_number_of_passes_may_be_set_and_a_step_may_come_early():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), backward_passes_per_step=2)
    train(model, optimizer, is_sharded=True, passes=2)
    optimizer.set_backward_passes_per_step(3)
    train(model, optimizer, is_sharded=True, passes=3)
    train(model, optimizer, is_sharded=True, passes=1)
    alone = trained_alone(sgd, passes=2)
    for passes in (3, 1):
        train(alone, sgd(alone.parameters()), is_sharded=False, passes=passes)
    assert difference(model, alone) < 1e-12


@pytest.mark.ranks(2)
def test_sum_and_a_list_of_groups():
    model = new_model()
    parameters = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), op=hvd.Sum, groups=[[parameters[0], parameters[3]], [parameters[1]]]
    )
    train(model, optimizer, is_sharded=True)
    alone = new_model()
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1 * hvd.size()), is_sharded=False)
    assert difference(model, alone) < 1e-12


@pytest.mark.ranks(2)
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients_are_close_and_equal_on_all_ranks(compression):
    model = new_model().float()
    start = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), compression=getattr(hvd.Compression, compression))
    for inputs, labels in batches():
        optimizer.zero_grad()
        loss_of(model, shard(inputs).float(), shard(labels)).backward()
        optimizer.step()
    assert difference(model, start) > 1e-4
    assert difference(model.double(), trained_alone(sgd)) < 0.02
    assert len({tuple(one.tolist()) for one in hvd.allgather_object(parameters_of(model))}) == 1


@pytest.mark.ranks(3)
def test_a_process_set_averages_among_its_ranks():
    pair = hvd.add_process_set([0, 2])
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), process_set=pair)
    inputs, labels = next(batches())
    loss_of(model, inputs[hvd.rank() :: 3], labels[hvd.rank() :: 3]).backward()
    optimizer.step()
    expected = new_model()
    ranks = [0, 2] if pair.included() else [1]
    sum(loss_of(expected, inputs[rank::3], labels[rank::3]) / len(ranks) for rank in ranks).backward()
    sgd(expected.parameters()).step()
    assert difference(model, expected) < 1e-12
    hvd.remove_process_set(pair)


@pytest.mark.ranks(3)
def test_ranks_outside_of_the_process_set_count_the_same_steps():
    """From the first one on, or a window of the timeline would begin apart."""
    pair = hvd.add_process_set([0, 2])
    model, before = new_model(), steps.count()
    train(model, hvd.DistributedOptimizer(sgd(model.parameters()), process_set=pair), is_sharded=True, steps=3)
    arrays = ringtrain.DistributedOptimizer(optim.SGD(0.1), process_set=pair)
    arrays.step([np.ones(2)], [np.ones(2)])
    assert steps.count() - before == 4
    hvd.remove_process_set(pair)


@pytest.mark.ranks(2)
def test_channels_last_gradients_are_averaged_where_they_lie():
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    inputs = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    alone = copy.deepcopy(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs[hvd.rank() :][:1]).square().mean().backward()
        assert not model.weight.grad.is_contiguous()
        optimizer.synchronize()
        alone.zero_grad()
        alone(inputs).square().mean().backward()
        for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(mine.grad, whole.grad, atol=1e-6)


@pytest.mark.ranks(2)
def test_late_layers_are_averaged_while_early_ones_are_computed():
    """backward() of the first layer waits until the last one's gradient is the average."""
    first, last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(sgd([*first.parameters(), *last.parameters()]))
    rank, seen = hvd.rank(), []
    for step in range(3):
        optimizer.zero_grad()
        hidden = first(torch.ones(1, 4))

        def wait_for_the_last(gradient):
            deadline = time.monotonic() + 10
            while last.weight.grad[0, 0] != 2.5 and time.monotonic() < deadline:
                time.sleep(0.001)
            seen.append(last.weight.grad[0, 0].item())

        if step > 0:  # the first one only counts the passes
            hidden.register_hook(wait_for_the_last)
        (last(hidden) * 0 + last.weight.sum() * (rank * 3 + 1)).sum().backward()
        optimizer.step()
    assert seen == [2.5, 2.5]


# The class, the state, and what works with it


@pytest.mark.ranks(1, 2)
def test_it_is_still_an_instance_of_the_class_and_shares_its_state():
    model = new_model()
    inner = torch.optim.Adam(model.parameters(), lr=0.5)
    optimizer = hvd.DistributedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.Adam) and type(optimizer).__name__ == "Adam"
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    loss_of(model, *next(batches())).backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    other = hvd.DistributedOptimizer(torch.optim.Adam(new_model().parameters()))
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.5
    assert len(inner.state) == len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_made_before", [True, False])
def test_schedulers_made_before_or_after_drive_it(is_made_before):
    model = new_model()
    optimizer = sgd(model.parameters())
    if is_made_before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer)
    if not is_made_before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    alone = new_model()
    plain = sgd(alone.parameters())
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that step() came too late, or was replaced
        for inputs, labels in batches(4):
            for one, how, by in ((model, shard, optimizer), (alone, lambda whole: whole, plain)):
                by.zero_grad()
                loss_of(one, how(inputs), how(labels)).backward()
                by.step()
            scheduler.step()
            plain_scheduler.step()
            if is_made_before:  # loading makes new groups, which the scheduler must see
                optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    assert difference(model, alone) < 1e-12


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_a_grad_scaler_needs_no_dance_and_all_ranks_skip_the_same_step(options):
    def loop(model, optimizer, is_sharded):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        for step, (inputs, labels) in enumerate(batches(8)):
            if is_sharded:
                inputs, labels = shard(inputs), shard(labels)
            optimizer.zero_grad()
            loss = loss_of(model, inputs, labels)
            # Only the last rank overflows.
            if step == 4 and (not is_sharded or hvd.rank() == hvd.size() - 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                (hvd.clip_grad_norm_ if is_sharded else torch.nn.utils.clip_grad_norm_)(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    model, alone = new_model(), new_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, **options))
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, **options)
    assert loop(model, optimizer, True) == loop(alone, plain, False)
    assert difference(model, alone) < 1e-7


@pytest.mark.ranks(2)
def test_horovods_dance_works_too():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    for inputs, labels in batches():
        optimizer.zero_grad()
        loss_of(model, shard(inputs), shard(labels)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert difference(model, trained_alone(sgd, clip=0.1)) < 1e-12


@pytest.mark.ranks(2)
def test_a_closure_sees_averages_and_the_average_loss():
    def closure_of(model, optimizer, inputs, labels):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, inputs, labels)
            loss.backward()
            return loss

        return closure

    model, alone = new_model(), new_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    )
    plain = torch.optim.LBFGS(alone.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    for inputs, labels in batches(3):
        together = optimizer.step(closure_of(model, optimizer, shard(inputs), shard(labels)))
        whole = plain.step(closure_of(alone, plain, inputs, labels))
        assert abs(together.item() - whole.item()) < 1e-9
    assert difference(model, alone) < 1e-9


@pytest.mark.ranks(2, timeout=180)  # inductor runs a compiler
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model(backend):
    model = new_model()
    compiled = torch.compile(model, backend=backend)
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=compiled.named_parameters())
    train(compiled, optimizer, is_sharded=True, steps=3)
    assert difference(model, trained_alone(sgd, steps=3)) < 1e-9


@pytest.mark.ranks(2)
def test_two_optimizers_of_one_process():
    generator, critic = new_model(1), torch.nn.Linear(3, 1).double()
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.fill_(0.5)
    of_generator = hvd.DistributedOptimizer(sgd(generator.parameters()))
    of_critic = hvd.DistributedOptimizer(sgd(critic.parameters()))
    for inputs, _ in batches(3):
        inputs = shard(inputs)
        of_critic.zero_grad()
        (critic(generator(inputs).detach()).mean() - critic(torch.ones(1, 3).double()).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        with of_critic.no_sync():
            (-critic(generator(inputs)).mean()).backward()
        of_generator.step()
    for model in (generator, critic):
        assert len({tuple(one.tolist()) for one in hvd.allgather_object(parameters_of(model))}) == 1


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_its_arguments_can_be_read_as_in_horovod(op):
    model = new_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2,
        op=getattr(hvd, op),
        sparse_as_dense=True,
    )
    assert optimizer.backward_passes_per_step == 2
    optimizer.set_backward_passes_per_step(3)
    assert optimizer.backward_passes_per_step == 3
    assert (optimizer.op, optimizer.process_set) == (getattr(hvd, op), hvd.global_process_set)
    assert (optimizer.sparse_as_dense, optimizer.gradient_predivide_factor) == (True, 1.0)
    assert optimizer._parameter_names == {parameter: name for name, parameter in model.named_parameters()}


@pytest.mark.ranks(1, 2)
def test_a_step_after_synchronize_says_what_horovod_would_do():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    sentence = (
        r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\) context after optimizer\.synchronize"
    )
    for way in ("asked", "skipped", "clipped"):
        optimizer.zero_grad()
        loss_of(model, *map(shard, next(batches()))).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if way == "clipped":
                hvd.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            else:
                optimizer.synchronize()
            if way == "skipped":
                with optimizer.skip_synchronize():
                    optimizer.step()
        if way == "asked":
            with pytest.warns(UserWarning, match=sentence) as caught:
                optimizer.step()
            assert caught[0].filename == __file__


# Copies


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("options", [{}, {"groups": "lists"}, {"op": ringtrain.Adasum, "check_every": 2}], ids=str)
@pytest.mark.parametrize("is_named", [False, True])
def test_a_copy_of_model_and_optimizer_trains_on_by_itself(options, is_named):
    model = new_model()
    if options.get("groups"):
        options = {"groups": [list(model[0].parameters()), list(model[2].parameters())]}
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model.parameters()),
        named_parameters=model.named_parameters() if is_named else None,
        **options,
    )
    train(model, optimizer, is_sharded=True, steps=3)
    start = copy.deepcopy(model)
    copied_model, copied = copy.deepcopy((model, optimizer))
    assert type(copied).__name__ == "SGD" and copied is not optimizer
    assert list(copied._parameter_names.values()) == list(optimizer._parameter_names.values())
    assert all(map(lambda one, other: one is other, copied._parameter_names, copied_model.parameters()))
    train(copied_model, copied, is_sharded=True, steps=3)
    assert difference(model, start) == 0 and difference(copied_model, start) > 0
    train(model, optimizer, is_sharded=True, steps=3)
    assert difference(model, copied_model) < 1e-12


@pytest.mark.ranks(2)
def test_a_copy_on_one_rank_is_a_snapshot_that_disturbs_nobody():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adam"](model.parameters()), named_parameters=model.named_parameters()
    )
    train(model, optimizer, is_sharded=True, steps=2)
    snapshot = copy.deepcopy(optimizer) if hvd.rank() == 0 else None
    second = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()))
    if hvd.rank() == 0:
        second.load_state_dict(snapshot.state_dict())
    hvd.broadcast_optimizer_state(second, root_rank=0)
    train(model, second, is_sharded=True, steps=2)
    assert len({tuple(one.tolist()) for one in hvd.allgather_object(parameters_of(model))}) == 1


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("make", [pickle.dumps, copy.copy])
def test_an_optimizer_that_cannot_be_copied_says_what_can(make):
    optimizer = hvd.DistributedOptimizer(sgd(new_model().parameters()))
    with pytest.raises(TypeError, match=r"neither pickled nor copied by copy\.copy: save its state_dict\(\)"):
        make(optimizer)


# Ranks that have made other optimizers before


@pytest.mark.ranks(2, initialised=False)
def test_optimizers_of_a_new_rank_meet_those_that_others_have_kept():
    """As after a rank was replaced: only one of the two has what it had before shutdown()."""

    def begin():
        model, words = new_model(), torch.nn.Embedding(4, 2, sparse=True).double()
        torch.nn.init.ones_(words.weight)
        return model, words, *(hvd.DistributedOptimizer(sgd(one.parameters())) for one in (model, words))

    def step(optimizer, gives_gradients):
        optimizer.zero_grad()
        gives_gradients().backward()
        optimizer.step()

    hvd.init()
    model, words, of_model, of_words = begin()
    for _ in range(2):
        step(of_model, lambda: loss_of(model, *next(batches())))
        step(of_words, lambda: words(torch.tensor([1, hvd.rank()])).sum())
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 1:
        model, words, of_model, of_words = begin()
    hvd.broadcast_parameters([*model.parameters(), *words.parameters()])
    step(of_words, lambda: words(torch.tensor([2])).sum() if hvd.rank() == 0 else words.weight.sum() * 0)
    step(of_model, lambda: loss_of(model, *next(batches())))
    hvd.check_replicas([*model.parameters(), *words.parameters()])


# Parameters that come, go, and get nothing


@pytest.mark.ranks(2)
def test_a_parameter_without_a_gradient_contributes_zeros_with_one_warning():
    used, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(sgd([used, unused]), named_parameters=[("used", used), ("unused", unused)])
    is_last = hvd.rank() == hvd.size() - 1

    def step():
        optimizer.zero_grad()
        (used.sum() + (unused.sum() if is_last else 0)).backward()
        optimizer.step()

    if is_last:
        step()
    else:
        with pytest.warns(UserWarning, match='backward\\(\\) gave no gradient to "unused"'):
            step()
    assert unused.grad.tolist() == [0.5, 0.5]
    step()
    assert unused.grad.tolist() == [0.5, 0.5]


@pytest.mark.ranks(2)
def test_parameters_may_be_frozen_and_unfrozen():
    model, alone = new_model(), new_model()
    model[0].requires_grad_(False)
    alone[0].requires_grad_(False)
    optimizer, plain = hvd.DistributedOptimizer(sgd(model.parameters()), groups=2), sgd(alone.parameters())
    for frozen in (0, 2, 4, 0):
        for one, by, is_sharded in ((model, optimizer, True), (alone, plain, False)):
            by.zero_grad()
            one.requires_grad_(True)
            one[frozen].requires_grad_(False)
            train(one, by, is_sharded, steps=3)
    assert difference(model, alone) < 1e-12


@pytest.mark.ranks(2)
def test_a_parameter_group_may_be_added():
    model, alone = new_model(), new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model[0].parameters()))
    plain = sgd(alone[0].parameters())
    for one, by, is_sharded in ((model, optimizer, True), (alone, plain, False)):
        train(one, by, is_sharded, steps=2)
        by.zero_grad()
        by.add_param_group({"params": list(one[2:].parameters()), "lr": 0.05})
        one.zero_grad()
        train(one, by, is_sharded, steps=2)
    assert difference(model, alone) < 1e-12


@pytest.mark.ranks(2)
def test_the_latest_optimizer_of_a_parameter_gets_its_gradients():
    model = new_model()
    first = hvd.DistributedOptimizer(sgd(model.parameters()))
    train(model, first, is_sharded=True, steps=2)
    second = hvd.DistributedOptimizer(sgd(model.parameters()))
    train(model, second, is_sharded=True, steps=2)
    with pytest.raises(hvd.StepOrderError, match="another DistributedOptimizer was made for these parameters"):
        first.step()
    del second
    gc.collect()
    train(model, first, is_sharded=True, steps=2)
    del first
    gc.collect()
    model.zero_grad()
    loss_of(model, *next(batches())).backward()  # submits nothing
    alone = new_model()
    for _ in range(3):
        train(alone, sgd(alone.parameters()), is_sharded=False, steps=2)
    assert difference(model, alone) < 1e-12


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients(sparse_as_dense):
    def embedding():
        torch.manual_seed(3)
        return torch.nn.Embedding(10, 4, sparse=True).double()

    model, alone = embedding(), embedding()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), sparse_as_dense=sparse_as_dense)
    plain = sgd(alone.parameters())
    words = torch.tensor([[1, 2], [2, 3]])
    for _ in range(3):
        optimizer.zero_grad()
        model(words[hvd.rank() % 2]).square().mean().backward()
        optimizer.step()
        assert model.weight.grad.is_sparse
        plain.zero_grad()
        alone(words).square().mean().backward()
        plain.step()
    assert difference(model, alone) < 1e-12


# Errors


@pytest.mark.ranks(2)
def test_calls_that_would_lose_gradients_are_errors():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), backward_passes_per_step=1)
    train(model, optimizer, is_sharded=True, steps=1)
    optimizer.zero_grad()
    inputs, labels = next(batches())

    loss_of(model, inputs, labels).backward()
    with pytest.raises(hvd.StepOrderError, match=r"zero_grad\(\) after backward\(\) and before step\(\)"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="set_backward_passes_per_step"):
        loss_of(model, inputs, labels).backward()
    with optimizer.skip_synchronize(), pytest.raises(hvd.StepOrderError, match="not synchronized"):
        optimizer.step()
    with pytest.raises(hvd.StepOrderError, match=r'"0\.4" was changed'):  # by the backward() that was one too many
        optimizer.step()
    optimizer.step()

    optimizer.zero_grad()
    loss_of(model, inputs, labels).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(hvd.StepOrderError, match=r'"0.4" was changed between backward\(\) and step'):
        optimizer.step()
    model.zero_grad()
    train(model, optimizer, is_sharded=True, steps=1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dropping", [(0, 1), (1,)], ids=str)
def test_gradients_that_the_model_has_dropped_before_the_step_are_an_error(dropping):
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), named_parameters=model.named_parameters())
    inputs, labels = next(batches())
    for _ in range(3):  # in the first step nothing is submitted before step()
        loss_of(model, inputs, labels).backward()
        if hvd.rank() in dropping:
            model.zero_grad()
            with warnings.catch_warnings(), pytest.raises(hvd.StepOrderError) as seen:
                warnings.simplefilter("error")
                optimizer.step()
            assert 'the gradient of "0.weight", "0.bias"' in str(seen.value)
            assert "was set to None between backward() and step(), as model.zero_grad() does: call" in str(seen.value)
        else:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "wrong", ["parameters", "frozen", "data", "zeros", "unused", "learning rate", "compiled", None]
)
def test_the_first_step_says_once_what_is_wrong_and_how_to_mend_it(wrong):
    ranks = f"ranks 0-{hvd.size() - 1}"
    require_first_step(
        wrong,
        {
            "parameters": f"{ranks} begin with different parameters.*call hvd.broadcast_parameters",
            "frozen": f"{ranks} begin with different parameters.*call hvd.broadcast_parameters",
            "data": rf"{ranks} have the same gradients in the first step.*DistributedSampler\(",
            "unused": r'2 of 4 parameters have no gradient.*such as "0.weight", "0.bias".*requires_grad_\(False\)',
            "learning rate": r"0.001, is the default of SGD.*0.001 \* hvd.size\(\) is usual",
            "compiled": r"the end of backward\(\).*layer.compile\(\)",
        }.get(wrong),
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zeroed_by", ["optimizer", "model", "filling", None])
def test_a_forgotten_zero_grad_is_said_once(zeroed_by):
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()))
    zero = {
        "optimizer": optimizer.zero_grad,
        "model": model.zero_grad,
        "filling": lambda: [parameter.grad.zero_() for parameter in model.parameters() if parameter.grad is not None],
        None: lambda: None,
    }[zeroed_by]
    with messages() as said:
        for inputs, labels in [map(shard, batch) for batch in batches()][:3]:
            zero()
            loss_of(model, inputs, labels).backward()
            optimizer.step()
    found = [one for one in said if "call optimizer.zero_grad() in every step" in one]
    assert len(found) == (zeroed_by is None and hvd.rank() == 0), said


@pytest.mark.ranks(2)
def test_statistics_of_a_batch_norm_that_differ_are_said_to_be_each_ranks_own():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    model(torch.full((4, 2), float(hvd.rank())))
    with pytest.raises(hvd.ReplicaError, match=r'parameter "1.running_mean" is not .* hvd.SyncBatchNorm, or check'):
        hvd.check_replicas(model.state_dict())
    hvd.check_replicas(dict(model.named_parameters()))


@pytest.mark.ranks(2, isolated=True)  # threads that other tests have left may end the deadlock, so it would be a stall
def test_the_first_step_says_that_ranks_train_other_parameters():
    hvd.init()
    require_first_step("names", "ranks 0-1 have other parameters to train.*freeze or compile it on all of them alike")


@pytest.mark.ranks(2)
def test_a_learning_rate_that_a_schedule_has_made_equal_to_the_default_is_not_taken_for_it():
    """Nor is it in a script that goes on from a checkpoint, as the first rate is in the state of the optimizer."""
    with messages() as said:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        descent = torch.optim.SGD(model.parameters(), lr=0.001 * hvd.size())
        optimizer = hvd.DistributedOptimizer(descent, named_parameters=model.named_parameters())
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5)
        assert descent.param_groups[0]["lr"] == 0.001
        model(torch.ones(4, 3) * (1 + hvd.rank())).sum().backward()
        optimizer.step()
    assert said == []


def require_first_step(wrong, told):
    with messages() as said:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).bfloat16().float())
        with torch.no_grad():
            model[0].weight += hvd.rank() * (wrong in ("parameters", "frozen"))
        model[0].requires_grad_(wrong != "frozen" and (wrong != "names" or hvd.rank() == 0))
        named = [(f"_orig_mod.{name}" if wrong == "compiled" else name, one) for name, one in model.named_parameters()]
        descent = torch.optim.SGD(model.parameters()) if wrong == "learning rate" else sgd(model.parameters())
        optimizer = hvd.DistributedOptimizer(descent, named_parameters=named)
        inputs = torch.ones(4, 3) * (1 if wrong == "data" else 1 + hvd.rank())
        for step in range(3):
            results = model[1](torch.ones(4, 2) * (1 + hvd.rank())) if wrong == "unused" else model(inputs)
            (results.sum() * (0 if wrong == "zeros" and step == 0 else 1)).backward()
            if wrong == "names":
                with pytest.raises(hvd.DeadlockError):
                    optimizer.step()
                break
            optimizer.step()
            model.zero_grad()
    assert len(said) == (told is not None and hvd.rank() == 0), said
    assert all(re.search(told, one) for one in said)


@pytest.mark.ranks(2)
def test_a_process_set_or_a_compression_of_another_type_is_refused():
    descent = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(TypeError, match=r"DistributedOptimizer: process_set must be a ProcessSet, not \[0\]"):
        hvd.DistributedOptimizer(descent, process_set=[0])
    with pytest.raises(TypeError, match=r"compression must be a Compressor.*; write compression=Compression.fp16"):
        hvd.DistributedOptimizer(descent, compression="fp16")


@pytest.mark.ranks(2)
def test_bad_arguments_are_refused_on_the_callers_line():
    model = new_model()
    named = list(model.named_parameters())
    optimizer = sgd(model.parameters())

    def refused(error, message, wrapped=optimizer, **options):
        with pytest.raises(error, match=message):
            hvd.DistributedOptimizer(wrapped, **options)

    refused(TypeError, "is not a torch.optim.Optimizer", wrapped=model)
    refused(ValueError, "more than one parameter named 0.weight", named_parameters=[*named, named[0]])
    refused(ValueError, r"those at 0\.0 \(parameter group\.place\) are missing", named_parameters=named[1:])
    refused(ValueError, "pairs of a name and a parameter", named_parameters=[parameter for _, parameter in named])
    refused(ValueError, "backward_passes_per_step must be an integer of at least 1", backward_passes_per_step=0)
    refused(ValueError, "groups must not be negative", groups=-1)
    refused(TypeError, "lists of the parameters", groups=["0.weight"])
    refused(ValueError, "in one group only", groups=[[named[0][1]], [named[0][1]]])
    refused(ValueError, "is not for op=Adasum", op=hvd.Adasum, gradient_as_shared_view=True)
    refused(ValueError, "needs op=Average", op=hvd.Sum, gradient_predivide_factor=2.0)
    refused(ValueError, "must be positive", gradient_predivide_factor=0.0)
    refused(TypeError, "op must be one of", op="average")
    refused(ValueError, "distributed already", wrapped=hvd.DistributedOptimizer(optimizer))
    refused(ValueError, "is not registered", process_set=hvd.ProcessSet([0]))


@pytest.mark.ranks(2)
def test_a_sparse_gradient_in_a_group_says_what_to_do():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    other = torch.nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(sgd([*embedding.parameters(), other]), groups=1)
    (embedding(torch.tensor([1])).sum() + other).sum().backward()
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        optimizer.step()


# op=Adasum


@pytest.mark.ranks(2, 3)
def test_adasum_combines_what_the_updates_change():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model.parameters()), op=hvd.Adasum)
    replicas = [new_model() for _ in range(hvd.size())]
    plain = [OPTIMIZERS["momentum"](replica.parameters()) for replica in replicas]
    for inputs, labels in batches(5):
        optimizer.zero_grad()
        loss_of(model, shard(inputs), shard(labels)).backward()
        optimizer.step()
        before = [parameter.detach().clone() for parameter in replicas[0].parameters()]
        for rank, (replica, by) in enumerate(zip(replicas, plain, strict=True)):
            by.zero_grad()
            loss_of(replica, inputs[rank :: hvd.size()], labels[rank :: hvd.size()]).backward()
            by.step()
        for position, start in enumerate(before):
            same = [list(replica.parameters())[position].detach() for replica in replicas]
            combined = start + adasum([parameter - start for parameter in same])
            for parameter in same:
                parameter.copy_(combined)
    assert difference(model, replicas[0]) < 1e-12


def adasum(vectors):
    """The specification: neighbours are combined as a tree."""
    while len(vectors) > 1:
        pairs = [vectors[place : place + 2] for place in range(0, len(vectors), 2)]
        vectors = [combined(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return vectors[0]


def combined(a, b):
    dot, of_a, of_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * of_a) if of_a > 0 else 1) * a + (1 - dot / (2 * of_b) if of_b > 0 else 1) * b


@pytest.mark.ranks(2)
def test_adasum_combines_groups_in_one_operation_each():
    def operations():
        return hvd.metrics().get("allreduce", {"operations": 0})["operations"]

    def trained(groups):
        before = operations()
        model = trained_together(sgd, {"op": hvd.Adasum, "groups": groups}, steps=3)
        return model, (operations() - before) // 3

    alone, of_alone = trained(0)
    grouped, of_grouped = trained(2)
    assert (of_alone, of_grouped) == (len(list(alone.parameters())), 2)
    assert difference(alone, grouped) < 1e-12


@pytest.mark.ranks(2)
def test_adasum_under_a_grad_scaler_skips_on_all_ranks():
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, (inputs, labels) in enumerate(batches(4)):
        before = parameters_of(model)
        optimizer.zero_grad()
        loss = loss_of(model, shard(inputs), shard(labels))
        scaler.scale(loss * float("inf") if step == 2 and hvd.rank() == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, parameters_of(model)) == (step == 2)
        assert torch.isfinite(parameters_of(model)).all()
    assert len({tuple(one.tolist()) for one in hvd.allgather_object(parameters_of(model))}) == 1
    with pytest.raises(AssertionError, match="op=Adasum"):
        optimizer.skip_synchronize()


@pytest.mark.ranks(2, initialised=False)
def test_adasum_marks_its_steps_in_the_timeline(tmp_path):
    path = tmp_path / "timeline.json"
    hvd.init(timeline_filename=str(path))
    model = new_model()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum)
    for inputs, labels in batches(3):
        loss_of(model, shard(inputs), shard(labels)).backward()
        optimizer.step()
    hvd.stop_timeline()
    hvd.barrier()
    assert all(f'"step {number}"' in path.read_text() for number in (1, 2, 3))
