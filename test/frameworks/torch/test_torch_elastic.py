"""Elastic trainings in PyTorch: states of models, optimizers and samplers."""

import pickle

import pytest
from elastic_ranks import elastic_job
from harness.forked import forks_of
from harness.frameworks import on_demand

from ringtrain.elastic import states
from ringtrain.errors import MismatchError, NonFiniteError, StepOrderError

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")

SLOW = pytest.mark.slow

forks = forks_of("torch", "ringtrain.torch")

# ------------------------------------------------------------------------------------------------------- in one job


def model_and_optimizer(seed, steps=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(6, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def all_tensors(model, optimizer):
    """Copies."""
    of_optimizer = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [tensor.clone() for tensor in [*model.state_dict().values(), *of_optimizer]]


def require_equal_tensors(found, expected):
    assert len(found) == len(expected) and all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.ranks(1, 2)
def test_restore_goes_back_to_the_last_commit():
    model, optimizer = model_and_optimizer(1, steps=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, losses=[1.0], epoch=3)
    before = all_tensors(model, optimizer)
    for _ in range(3):  # what is restored must not be what is trained on
        model(torch.randn(6, 5)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        state.losses.append(2.0)
        state.epoch = 4
        state.restore()
        require_equal_tensors(all_tensors(model, optimizer), before)
        assert (state.losses, state.epoch, scheduler.last_epoch) == ([1.0], 3, 0)
        assert optimizer.param_groups[0]["lr"] == 0.01


def state_of_other_types(optimizer, number):
    """Puts values into the state that load_state_dict would cast to bfloat16, or could not copy. Returns them."""
    (parameter,) = optimizer.param_groups[0]["params"]
    optimizer.state[parameter] = {
        "step": torch.tensor(float(number)),
        "wide": torch.full((3,), 1.0009765625 + number),
        "codes": torch.tensor([17, 255 - number], dtype=torch.uint8),
        "seen": torch.tensor(2**40 + 1 + number),
        "history": [torch.tensor(0.1, dtype=torch.float64), number],
        "name": f"state {number}",
    }
    return optimizer.state[parameter].copy()


def require_equal_states(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert type(found[key]) is type(value) and str(found[key]) == str(value), key
        if torch.is_tensor(value):
            assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


@pytest.mark.ranks(2)
@pytest.mark.parametrize("have_state", ["all", "root"])
def test_state_of_an_optimizer_keeps_its_dtypes_through_restore_and_sync(have_state):
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
    if hvd.rank() == 0 or have_state == "all":
        state_of_other_types(optimizer, hvd.rank())
    state = hvd.elastic.TorchState(optimizer=optimizer)
    state.sync()
    first = state_of_other_types(torch.optim.SGD([torch.nn.Parameter(torch.ones(3))]), 0)
    require_equal_states(optimizer.state[parameter], first)
    state_of_other_types(optimizer, 7)
    state.restore()
    require_equal_states(optimizer.state[parameter], first)
    state.load_content(pickle.loads(pickle.dumps(state.saved_content())))  # as a file of save_to
    require_equal_states(optimizer.state[parameter], first)


@pytest.mark.ranks(2)
def test_modules_are_told_the_version_of_their_own_state():
    class Versioned(torch.nn.Linear):
        _version = 2
        extra = 0

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
            assert local_metadata.get("version") == 2, "taken for an old checkpoint"
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    model = torch.nn.Sequential(Versioned(2, 1))
    model[0].extra = hvd.rank() + 5
    state = hvd.elastic.TorchState(model)
    state.sync()
    assert model[0].extra == 5
    model[0].extra = 9
    state.restore()
    assert model[0].extra == 5


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("steps", [(1, 1, 1), (2, 0, 1), (1, 0, 0)], ids=str)
def test_sync_gives_all_ranks_the_state_of_rank_0(steps):
    expected = all_tensors(*model_and_optimizer(0, steps[0]))
    model, optimizer = model_and_optimizer(hvd.rank(), steps[hvd.rank()])
    state = hvd.elastic.TorchState(model, optimizer, epoch=hvd.rank(), names=["a"] * hvd.rank())
    state.sync()
    require_equal_tensors(all_tensors(model, optimizer), expected)
    assert (state.epoch, state.names) == (0, [])
    state.epoch = 7
    state.restore()
    assert state.epoch == 0


@pytest.mark.ranks(3)
def test_sync_takes_the_state_of_the_rank_with_the_most_commits():
    model, optimizer = model_and_optimizer(hvd.rank())
    state = hvd.elastic.TorchState(model, optimizer, value=hvd.rank())
    for _ in range(hvd.rank() % 2):
        state.commit()
    state.sync()
    require_equal_tensors(all_tensors(model, optimizer), all_tensors(*model_and_optimizer(1)))
    assert state.value == 1


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_equal_parts_are_not_sent():
    model, optimizer = model_and_optimizer(1, steps=1)
    with torch.no_grad():
        model[0].bias.fill_(hvd.rank())
    sent = hvd.metrics().get("broadcast", {"bytes": 0})["bytes"]
    hvd.elastic.TorchState(model, optimizer).sync()
    assert hvd.metrics()["broadcast"]["bytes"] - sent == model[0].bias.nbytes
    assert torch.equal(model[0].bias, torch.zeros(4))


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_differing_finds_what_is_not_the_same_on_all_ranks():
    largest = 2**63 - 1
    numbers = [5, -5, largest, -largest - 1, 3 + hvd.rank(), -hvd.rank(), [largest, -largest - 1][hvd.rank()]]
    assert states.differing(numbers, "test") == [False] * 4 + [True] * 3


@pytest.mark.ranks(1)
def test_another_object_for_an_attribute_is_the_one_that_is_saved():
    state = hvd.elastic.TorchState(*model_and_optimizer(1), epoch=1)
    other, _ = model_and_optimizer(2)
    state.model = other
    expected = other[0].weight.clone()
    with torch.no_grad():
        other[0].weight.zero_()
    state.restore()
    assert torch.equal(state.model[0].weight, expected)


@pytest.mark.ranks(1)
def test_the_registry_takes_handlers_for_other_classes():
    class Counter:
        count = 0

    class CounterHandler(hvd.elastic.StateHandler):
        def save(self):
            self.saved = self.value.count

        def restore(self):
            self.value.count = self.saved

        def sync(self):
            self.value.count = hvd.broadcast_object(self.value.count)

    usual = hvd.elastic.get_handler_registry()
    hvd.elastic.set_handler_registry([*usual, (Counter, CounterHandler)])
    try:
        state = hvd.elastic.TorchState(counter=Counter())
        state.counter.count = 3
        state.commit()
        state.counter.count = 4
        state.restore()
        assert state.counter.count == 3
        state.sync()
    finally:
        hvd.elastic.set_handler_registry(usual)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("samples", [1, 2, 10, 11])
def test_a_sampler_shares_out_what_nobody_has_seen(samples):
    sampler = hvd.elastic.ElasticSampler(range(samples), seed=3)
    of_all = hvd.allgather_object(list(sampler))
    assert {len(one) for one in of_all} == {len(sampler)} and set().union(*of_all) == set(range(samples))
    if samples > hvd.size():
        sampler.record_batch(0, 1)
        sampler.load_state_dict(sampler.state_dict())
        assert sampler.processed_num == hvd.size() and len(sampler.processed_indices) == hvd.size()
        assert set(sampler.remaining_indices) == set(range(samples)) - sampler.processed_indices
        assert sampler.processed_indices == {one[0] for one in of_all}
    sampler.set_epoch(1)
    assert sampler.processed_num == 0 and set(sampler.remaining_indices) == set(range(samples))


@pytest.mark.ranks(2)
def test_a_sampler_has_another_order_in_each_epoch_and_for_each_seed_unless_it_does_not_shuffle():
    def orders(**how):
        sampler = hvd.elastic.ElasticSampler(range(100), **how)
        found = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            own = hvd.allgather_object(list(sampler))
            found.append([number for pair in zip(*own, strict=True) for number in pair])
        return found

    shuffled, other = orders(), orders(seed=100)
    assert shuffled == orders() and other == orders(seed=100)
    different = [*shuffled, *other, list(range(100))]
    assert all(one != two for place, one in enumerate(different) for two in different[:place])
    assert orders(shuffle=False) == [list(range(100))] * 3


# --------------------------------------------------------------------------------- the cases of Horovod's own tests


@pytest.mark.ranks(1)
def test_run_comes_back_to_the_last_commit_after_a_failure():
    resets = []
    state = hvd.elastic.TorchState(value=0)

    def train(state, more):
        state.value += more
        if len(resets) < 3:
            raise hvd.HorovodInternalError("a rank is lost")
        return state.value

    def reset():
        resets.append(state.value)

    assert hvd.elastic.run_fn(train, reset)(state, 5) == 5
    assert resets == [0, 0, 0]


@pytest.mark.ranks(1)
def test_run_goes_on_with_what_it_has_when_hosts_have_changed():
    calls = []
    state = hvd.elastic.TorchState(value=0)
    state.register_reset_callbacks([lambda: calls.append(state.value)])

    def train(state):
        state.value += 1
        if state.value < 3:
            state.on_hosts_updated(1.0, None)
        state.commit()
        return state.value

    assert hvd.elastic.run_fn(train, lambda: None)(state) == 3
    assert calls == [1, 2]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("error", [MismatchError, NonFiniteError, StepOrderError, ValueError])
def test_run_raises_what_would_come_again(error):
    def train(state):
        raise error("again")

    with pytest.raises(error, match="again"):
        hvd.elastic.run_fn(train, lambda: pytest.fail("no reset"))(hvd.elastic.TorchState(value=0))


@pytest.mark.ranks(2)
def test_a_state_as_horovod_lets_one_be_written():
    class Own(hvd.elastic.State):
        def save(self):
            self.saved = self.value

        def restore(self):
            self.value = self.saved

        def sync(self):
            self.value = self._bcast_object(self.value)
            self.save()

    state = Own(hvd.broadcast_object, hvd.rank)
    state.value = hvd.rank() + 1
    assert hvd.elastic.run(lambda state: state.value)(state) == 1


# --------------------------------------------------------------------------------------------- ranks that are killed

TRAINING = """
import os, time, torch, ringtrain.torch as hvd
torch.set_num_threads(1)
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model.named_parameters(), op=hvd.OPERATION, **OPTIONS)
random = torch.Generator().manual_seed(5)
inputs = torch.randn(240, 8, generator=random, dtype=torch.float64)
targets = inputs.sin().sum(1, keepdim=True)
sampler = hvd.elastic.ElasticSampler(inputs, shuffle=False)

@hvd.elastic.run
def train(state):
    print("synced", state.step, hvd.rank(), hvd.size(), flush=True)
    while state.step < 40:
        batch = torch.arange(state.step * 12 % 240, state.step * 12 % 240 + 12)[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        ((model(inputs[batch]) - targets[batch]) ** 2).sum().div(12).backward()
        time.sleep(0.005)
        optimizer.step()
        state.step += 1
        state.sampler.record_batch(0, 1)
        state.commit()
        print("step", state.step, hvd.size(), flush=True)

state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=0)
train(state)
print("sum", sum(p.sum() for p in model.parameters()).item(), flush=True)
"""


@pytest.fixture(scope="module")
def clean(forks, tmp_path_factory):
    """The sum of all parameters after a training that nobody disturbs."""
    program = TRAINING.replace("OPTIONS", "{}").replace("OPERATION", "Sum")
    with elastic_job(program, tmp_path_factory.mktemp("clean"), 2, forks=forks) as job:
        return float(job.processes[0].ends().split("sum ")[1])


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"gradient_as_shared_view": True}, marks=SLOW), pytest.param({"num_groups": 2}, marks=SLOW)],
    ids=str,
)
def test_a_training_loses_one_rank_and_gains_another(forks, tmp_path, clean, options):
    program = TRAINING.replace("OPTIONS", repr(options)).replace("OPERATION", "Sum")
    with elastic_job(program, tmp_path, 3, most=3, forks=forks) as job:
        job.start()  # one too many: it waits
        victim = job.process(job.formed(1).members[0])
        victim.wait_for("step 20 ")
        victim.kill()
        for process in job.processes:
            if process is not victim:
                text = process.ends()
                assert abs(float(text.split("sum ")[1]) / clean - 1) < 1e-9
                assert "step 40 3" in text


@SLOW
def test_a_training_begins_with_one_rank_and_grows(forks, tmp_path, clean):
    program = TRAINING.replace("OPTIONS", "{}").replace("OPERATION", "Sum")
    waits = "\n    while hvd.size() == 1 and state.step == 3: time.sleep(0.01); state.check_host_updates()"
    program = program.replace("while state.step < 40:", f"while state.step < 40:{waits.replace('    ', '        ')}")
    with elastic_job(program, tmp_path, 1, forks=forks) as job:
        job.start()
        for process in job.processes:
            text = process.ends()
            assert "step 40 2" in text and abs(float(text.split("sum ")[1]) / clean - 1) < 1e-9


@SLOW
def test_adasum_goes_on_with_other_ranks(forks, tmp_path):
    program = TRAINING.replace("OPTIONS", "{}").replace("OPERATION", "Adasum")
    with elastic_job(program, tmp_path, 3, forks=forks) as job:
        job.processes[0].wait_for("step 10 ")
        job.processes[1].kill()
        sums = {process.ends().split("sum ")[1] for process in (job.processes[0], job.processes[2])}
        assert len(sums) == 1


@pytest.mark.ranks(2)
def test_objects_of_a_state_go_back_and_become_those_of_rank_0():
    state = hvd.elastic.ObjectState(seen=[hvd.rank()], epoch=3)
    state.save()
    state.seen.append(7)
    state.epoch += 1
    state.restore()
    assert (state.seen, state.epoch) == ([hvd.rank()], 3)
    state.sync()
    assert (state.seen, state.epoch) == ([0], 3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("handler", "number"),
    [("ModelStateHandler", 0), ("OptimizerStateHandler", 1), ("LRSchedulerStateHandler", 2), ("StateDictHandler", 2)],
)
def test_a_handler_saves_restores_and_shares_its_object(handler, number):
    model, optimizer = model_and_optimizer(seed=hvd.rank(), steps=1 + hvd.rank())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1 + hvd.rank())
    it = (model, optimizer, scheduler)[number]
    own = getattr(hvd.elastic, handler)(it)
    before = str(it.state_dict())
    (other_model, other_optimizer), other_scheduler = model_and_optimizer(seed=5, steps=3), None
    if number == 2:
        other_scheduler = torch.optim.lr_scheduler.StepLR(other_optimizer, step_size=9)
    it.load_state_dict((other_model, other_optimizer, other_scheduler)[number].state_dict())
    assert str(it.state_dict()) != before
    own.restore()
    assert str(it.state_dict()) == before
    own.sync()
    first, second = hvd.allgather_object(str(it.state_dict()))
    assert first == second


@pytest.mark.ranks(2)
def test_the_handler_of_a_sampler_keeps_what_was_processed():
    sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
    handler = hvd.elastic.SamplerStateHandler(sampler)
    sampler.record_batch(0, 2)
    handler.restore()
    assert sampler.processed_num == 0
    sampler.record_batch(0, 2)
    handler.save()
    handler.sync()
    assert sampler.processed_num == 4


@pytest.mark.ranks(1, 2)
def test_an_elastic_sampler_shuffles_in_another_way_in_each_epoch_and_for_each_seed():
    def order(**options):
        """Of all ranks, in which every sample is once."""
        sampler = hvd.elastic.ElasticSampler(range(60), **options)
        orders = []
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            of_ranks = hvd.allgather_object(list(sampler))
            orders.append([index for together in zip(*of_ranks, strict=True) for index in together])
        return orders

    first, second, again = order(seed=3)
    assert sorted(first) == sorted(second) == list(range(60))
    assert first == again != second
    assert list(range(60)) not in (first, second)
    assert order(seed=40)[0] not in (first, second)
    assert order(shuffle=False) == [list(range(60))] * 3


# ------------------------------------------------------------------------------------------------- batches by speed

BY_SPEED = """
import time
import torch
import ringtrain.torch as hvd

hvd.init()
torch.set_num_threads(1)
inputs = torch.arange(90.0, dtype=torch.float64)[:, None]
model = torch.nn.Linear(1, 1, dtype=torch.float64)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-4), model.named_parameters())
sampler = hvd.SpeedSampler(inputs, batch_size=9, every=2)
loader = torch.utils.data.DataLoader(torch.arange(90), batch_sampler=sampler)

@hvd.elastic.run
def train(state):
    while state.epoch < 2:
        for indices in loader:
            optimizer.set_weight(len(indices))
            optimizer.zero_grad()
            model(inputs[indices]).square().mean().backward()
            time.sleep(0.002 * len(indices) * (1 + hvd.rank()))
            sampler.arrive()
            optimizer.step()
            for of_rank in hvd.allgather_object(indices.tolist()):
                state.seen[state.epoch] += of_rank
            state.commit()
            print("step", hvd.size(), flush=True)
        state.epoch += 1
        sampler.set_epoch(state.epoch)

state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, seen=[[], []])
train(state)
for seen in state.seen:
    print("whole", sorted(seen) == list(range(90)), flush=True)
"""


@SLOW
def test_a_sampler_by_speed_has_each_sample_once_although_a_rank_dies_in_the_epoch(forks, tmp_path):
    with elastic_job(BY_SPEED, tmp_path, 3, forks=forks) as job:
        job.processes[0].wait_for("step 3", 4)
        job.processes[1].kill()
        for process in (job.processes[0], job.processes[2]):
            text = process.ends()
            assert "step 2" in text and text.count("whole True") == 2, text
