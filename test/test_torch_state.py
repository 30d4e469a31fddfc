"""The same parameters, optimizer state and objects on all ranks, and what a checkpoint of them is good for."""

import copy
import inspect
import io

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed in this environment")

import ringtrain.torch as hvd  # noqa: E402

torch.set_num_threads(1)

# Every optimizer class, with what it needs beside parameters.
CLASSES = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}


def new_model(seed):
    torch.manual_seed(seed)
    # Muon wants matrices only, and no optimizer minds.
    return torch.nn.Sequential(torch.nn.Linear(4, 5, bias=False), torch.nn.Linear(5, 2, bias=False))


def new_optimizer(name, model):
    if name == "SparseAdam":
        return CLASSES[name](model.parameters(), lr=0.01)
    return CLASSES[name](model.parameters(), lr=0.01 * (hvd.rank() + 1))


def step(name, model, optimizer, seed):
    random = torch.Generator().manual_seed(seed)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4, generator=random)).square().sum()
        loss.backward()
        if name == "SparseAdam":
            for parameter in model.parameters():
                parameter.grad = parameter.grad.to_sparse()
        return loss

    optimizer.step(closure)


def same(one, other):
    """Whether two states are equal, element by element."""
    if torch.is_tensor(one):
        return torch.is_tensor(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", CLASSES)
def test_the_state_of_every_optimizer_goes_to_ranks_with_another_one_and_with_none(name):
    model = new_model(hvd.rank())
    optimizer = new_optimizer(name, model)
    if hvd.rank() != 0:  # rank 0 has none; the last, which is the root, has most
        for number in range(hvd.rank() + 1):
            step(name, model, optimizer, number)
    root = hvd.size() - 1
    hvd.broadcast_parameters(model.state_dict(), root)
    hvd.broadcast_optimizer_state(optimizer, root)
    for state, of_root in [
        (optimizer.state_dict(), hvd.broadcast_object(optimizer.state_dict(), root)),
        (model.state_dict(), hvd.broadcast_object(model.state_dict(), root)),
    ]:
        assert same(state, of_root)
    step(name, model, optimizer, 99)  # what was received can be used
    assert same(model.state_dict(), hvd.broadcast_object(model.state_dict(), root))


@pytest.mark.ranks(2)
def test_a_count_of_steps_does_not_keep_the_whole_message():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(100_000))])
    if hvd.rank() == 0:
        optimizer.param_groups[0]["params"][0].grad = torch.ones(100_000)
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    (state,) = optimizer.state.values()
    assert state["step"] == 1 and state["step"].untyped_storage().nbytes() < 100


@pytest.mark.ranks(2)
def test_options_of_every_type():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    options = {"betas": (0.5, 0.25), "name": "head", "schedule": {"steps": [1, 2]}, "flag": None, "rate": torch.ones(2)}
    if hvd.rank() == 1:
        optimizer.param_groups[1].update(copy.deepcopy(options))
        optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    received = optimizer.param_groups[1]
    assert same({key: received[key] for key in options}, options)
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.25)) and received["lr"] == 0.5
    assert received["params"][0] is parameters[1]


@pytest.mark.ranks(2)
def test_an_option_that_cannot_be_pickled_fails_on_every_rank():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    if hvd.rank() == 0:
        optimizer.param_groups[0]["schedule"] = lambda step: step
    with pytest.raises(Exception, match="lambda" if hvd.rank() == 0 else "rank 0 could not pickle"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


@pytest.mark.ranks(2)
def test_parameters_come_in_every_form():
    for form in (
        lambda model: model.state_dict(),
        lambda model: model.named_parameters(),
        lambda model: list(model.parameters()),
        lambda model: dict(model.named_parameters()),
    ):
        model = new_model(hvd.rank())
        hvd.broadcast_parameters(form(model), root_rank=1)
        assert same(model.state_dict(), new_model(1).state_dict())


@pytest.mark.ranks(2)
def test_buffers_of_any_dtype_and_layout_are_parameters_too():
    rank = hvd.rank()
    tensors = {
        "integer": torch.tensor(rank),
        "transposed": torch.full((3, 2), float(rank)).t(),
        "half": torch.full((3,), float(rank), dtype=torch.bfloat16),
        "flag": torch.tensor([rank == 1]),
        "empty": torch.empty(0),
    }
    hvd.broadcast_parameters(tensors, root_rank=1)
    assert tensors["integer"].item() == 1 and tensors["flag"].item() is True
    assert tensors["transposed"].tolist() == [[1.0] * 3] * 2 and tensors["half"].tolist() == [1.0] * 3


@pytest.mark.ranks(1, 2)
def test_objects_with_horovods_arguments():
    mine = {"rank": hvd.rank(), "tensor": torch.full((2,), float(hvd.rank()))}
    root = hvd.size() - 1
    received = hvd.broadcast_object(mine, root, "an object")
    assert received["rank"] == root and received["tensor"].tolist() == [float(root)] * 2
    assert hvd.broadcast_object_fn(root, "another")(hvd.rank()) == root
    assert hvd.allgather_object(hvd.rank(), "all") == list(range(hvd.size()))


def train(model, optimizer, steps, rank, size):
    """From step to step on the shard of each; sums, so that any number of ranks computes the same."""
    for number in steps:
        inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        optimizer.zero_grad()
        (model(inputs[rank::size]).square().sum() / 12).backward()
        optimizer.step()


@pytest.mark.ranks(1, 2, 3)
def test_a_checkpoint_resumes_at_another_number_of_ranks():
    """One process trains 5 steps and saves; the ranks go on from what rank 0 reads, as one process would."""
    alone = new_model(0).double()
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    train(alone, plain, range(5), 0, 1)
    checkpoint = io.BytesIO()
    torch.save({"model": alone.state_dict(), "optimizer": plain.state_dict(), "step": 5}, checkpoint)
    train(alone, plain, range(5, 10), 0, 1)

    model = new_model(7 + hvd.rank()).double()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.5), op=hvd.Sum)
    first = 0
    if hvd.rank() == 0:
        saved = torch.load(io.BytesIO(checkpoint.getvalue()), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(hvd.broadcast_object(first), 10), hvd.rank(), hvd.size())
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert (mine - expected).abs().max().item() < 1e-12
