"""The same parameters, optimizer state and objects on all ranks, and what a checkpoint of them is good for."""

import collections
import copy
import functools
import inspect
import io
from pathlib import Path

import pytest
from harness.frameworks import on_demand

from ringtrain import _core

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")
functions = on_demand("ringtrain.torch.functions")


@functools.cache
def optimizer_classes():
    return {
        name: cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }


def new_model(seed):
    torch.manual_seed(seed)
    # Muon needs matrices only, and no optimizer minds.
    return torch.nn.Sequential(torch.nn.Linear(4, 5, bias=False), torch.nn.Linear(5, 2, bias=False))


def new_optimizer(name, model):
    if name == "SparseAdam":
        return optimizer_classes()[name](model.parameters(), lr=0.01)
    return optimizer_classes()[name](model.parameters(), lr=0.01 * (hvd.rank() + 1))


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
    if isinstance(one, dict) and type(one) is type(other):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.ranks(2, 3)
def test_the_state_of_every_optimizer_goes_to_ranks_with_another_one_and_with_none():
    for name in optimizer_classes():
        try:
            check_that_a_state_is_received(name)
        except BaseException as failure:
            raise AssertionError(f"{name}: {failure}") from failure


def check_that_a_state_is_received(name):
    model = new_model(hvd.rank())
    optimizer = new_optimizer(name, model)
    if hvd.rank() != 0:  # rank 0 has none; the last, which is the root, has most
        for number in range(hvd.rank() + 1):
            step(name, model, optimizer, number)
    root = hvd.size() - 1
    hvd.broadcast_parameters(model.state_dict(), root)
    hvd.broadcast_optimizer_state(optimizer, root)
    for mine, of_root in [
        (optimizer.state_dict(), hvd.broadcast_object(optimizer.state_dict(), root)),
        (model.state_dict(), hvd.broadcast_object(model.state_dict(), root)),
    ]:
        assert same(mine, of_root)
    step(name, model, optimizer, 99)  # what was received can be used
    assert same(model.state_dict(), hvd.broadcast_object(model.state_dict(), root))


def other_state(parameter, seed):
    """Values that `Optimizer.load_state_dict` casts to the dtype of the parameter, or cannot copy."""
    random = torch.Generator().manual_seed(seed)
    return {
        "step": torch.tensor(5.0),
        "eta": torch.tensor(0.001),  # as the next one: ASGD looks for it
        "mu": torch.tensor(0.1),
        "mu_product": torch.tensor(0.9),  # NAdam looks for it
        "wide": torch.randn(parameter.shape, generator=random, dtype=torch.float64),
        "single": torch.randn(parameter.shape, generator=random),
        "codes": torch.randint(0, 256, (7,), generator=random).to(torch.uint8),
        "seen": torch.tensor(2**40 + 1 + seed),
        "flags": torch.tensor([True, False]),
        "pair": (torch.tensor([300], dtype=torch.int16), [torch.tensor(0.1, dtype=torch.float64), "text", None]),
        "nested": {"scale": torch.tensor(1.001), "name": "blockwise", 3: 2.5},
        "name": "first",
        "bytes": b"code",
        "count": 3 + seed,
        "rate": 0.1,
        "nothing": None,
        "numbers": collections.deque([1, 2], maxlen=5),
        "size": torch.Size([2, 3]),
        "ordered": collections.OrderedDict(a=torch.tensor([7], dtype=torch.int32)),
        "set": {1, 2},
    }


def options_of(name):
    """Of an optimizer: its own ones, and those that change what load_state_dict does."""
    known = inspect.signature(optimizer_classes()[name]).parameters
    usual = {"tensor lr": {"lr": torch.tensor(0.01)}} if name not in ("LBFGS", "SparseAdam") else {}
    return {"": {}, **usual, **{flag: {flag: True} for flag in ("fused", "capturable", "foreach") if flag in known}}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_state_of_any_type_keeps_its_dtype_and_bits_in_every_optimizer(dtype):
    for name, cls in optimizer_classes().items():
        for options in options_of(name).values():
            shapes, of = [(2, 3), (4, 2)], getattr(torch, dtype)
            parameters = [torch.nn.Parameter(torch.ones(shape, dtype=of)) for shape in shapes]
            optimizer = cls(parameters, **options)
            if hvd.rank() == 1:
                for number, parameter in enumerate(parameters):
                    optimizer.state[parameter] = other_state(parameter, number)
            hvd.broadcast_optimizer_state(optimizer, root_rank=1)
            for number, parameter in enumerate(parameters):
                assert same(optimizer.state[parameter], other_state(parameter, number)), f"{name} {options}"


@pytest.mark.ranks(2)
def test_an_optimizer_that_keeps_another_dtype_than_its_parameters_updates_all_ranks_alike():
    model = new_model(0).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if hvd.rank() == 0:
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.full(parameter.shape, 1.0009765625)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for number in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.001 * number)
        optimizer.step()
    assert same(optimizer.state_dict(), hvd.broadcast_object(optimizer.state_dict(), 0))
    assert same(model.state_dict(), hvd.broadcast_object(model.state_dict(), 0))


@pytest.mark.ranks(2)
def test_a_class_with_a_format_of_its_own_loads_it_itself():
    class Packed(torch.optim.SGD):
        def state_dict(self):
            return {"packed": [self.param_groups[0]["lr"]], "param_groups": []}

        def load_state_dict(self, state_dict):
            self.param_groups[0]["lr"] = state_dict["packed"][0]

    optimizer = Packed([torch.nn.Parameter(torch.ones(2))], lr=0.5 + hvd.rank())
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert optimizer.param_groups[0]["lr"] == 1.5


@pytest.mark.ranks(2)
def test_a_count_of_steps_does_not_keep_the_whole_message():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(100_000))])
    if hvd.rank() == 0:
        optimizer.param_groups[0]["params"][0].grad = torch.ones(100_000)
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    (of_parameter,) = optimizer.state.values()
    assert of_parameter["step"] == 1 and of_parameter["step"].untyped_storage().nbytes() < 100


@pytest.mark.ranks(2)
def test_a_model_in_the_place_of_its_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"not a Linear; for a model call broadcast_parameters\(model.state_dict"):
        hvd.broadcast_optimizer_state(torch.nn.Linear(2, 1), root_rank=0)


@pytest.mark.ranks(2)
def test_a_state_travels_in_messages_of_a_limited_size():
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((7, 3), (1,), (500,), (), (0,))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def made_by(rank):
        made = torch.Generator().manual_seed(rank)
        return [
            {
                "double": torch.randn(parameter.shape, generator=made, dtype=torch.float64),
                "flag": torch.randn(13, generator=made) > 0,
                "turned": torch.randn((5, 31), generator=made).t(),
                "complex": torch.randn(3, generator=made, dtype=torch.complex64),
            }
            for parameter in parameters
        ]

    whole, functions._MESSAGE_BYTES = functions._MESSAGE_BYTES, 1000
    try:
        if hvd.rank() == 1:
            optimizer.state.update(zip(parameters, made_by(1), strict=True))
        hvd.barrier()
        before = _core.last_operations()[-1]["number"]
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    finally:
        functions._MESSAGE_BYTES = whole
    for parameter, expected in zip(parameters, made_by(1), strict=True):
        assert same(optimizer.state[parameter], expected)
    operations = [one for one in _core.last_operations() if one["number"] > before and one["kind"] == "broadcast"]
    total = sum(value.nbytes for one in made_by(1) for value in one.values())
    messages = [one["bytes"] for one in operations][2:]  # behind the skeleton and its length
    assert messages == [1000] * (total // 1000) + [total % 1000]


def peak_of(work):
    """By how many bytes the memory of this process grows at most meanwhile."""

    def of_status(name):
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
        return 1024 * int(line.split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = of_status("VmRSS")
    work()
    return of_status("VmHWM") - before


@pytest.mark.ranks(2)
def test_a_large_state_is_never_twice_in_memory():
    parameter = torch.nn.Parameter(torch.ones(20_000_000))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    bytes_ = parameter.nbytes
    parameter.grad = torch.zeros_like(parameter)
    if hvd.rank() == 0:
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 2.0).detach()
    whole, functions._MESSAGE_BYTES = functions._MESSAGE_BYTES, 1 << 20
    try:
        peak = peak_of(lambda: hvd.broadcast_optimizer_state(optimizer, root_rank=0))
    finally:
        functions._MESSAGE_BYTES = whole
    assert peak < (0.3 if hvd.rank() == 0 else 1.3) * bytes_
    assert bool((optimizer.state[parameter]["momentum_buffer"] == 2.0).all())


@pytest.mark.ranks(2)
def test_none_is_part_of_a_state():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    mine = {"momentum_buffer": None, "history": [None, torch.ones(2), (None, 3)]}
    if hvd.rank() == 0:
        optimizer.state[parameters[0]] = mine
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert same(optimizer.state_dict()["state"], {0: mine})


@pytest.mark.ranks(2)
def test_gradients_are_left_as_by_horovod():
    """Where the optimizer was new they are zeros afterwards, and those that were there stay."""
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True), torch.nn.Linear(2, 2))
    frozen = model[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    model[1].weight.grad = torch.ones(2, 2)
    if hvd.rank() == 0:
        optimizer.state[model[1].weight]["momentum_buffer"] = torch.ones(2, 2)
    before = copy.deepcopy(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    gradient = model[0].weight.grad
    if hvd.rank() == 0:
        assert gradient is None
    else:
        assert gradient.is_sparse and torch.equal(gradient.to_dense(), torch.zeros(3, 2))
    assert frozen.grad is None and torch.equal(model[1].weight.grad, torch.ones(2, 2))
    assert same(model.state_dict(), before)
    new = torch.optim.Adam(new_model(0).parameters())
    hvd.broadcast_optimizer_state(hvd.DistributedOptimizer(new), root_rank=0)
    assert all(torch.equal(one.grad, torch.zeros_like(one)) for one in new.param_groups[0]["params"])


@pytest.mark.ranks(2)
def test_a_state_that_cannot_travel_fails_on_every_rank():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if hvd.rank() == 0:
        optimizer.state[parameter]["rows"] = torch.ones(2).to_sparse()
    error, message = (TypeError, "layout torch.sparse_coo") if hvd.rank() == 0 else (RuntimeError, "rank 0 could not")
    with pytest.raises(error, match=message):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert hvd.broadcast_object("still alive") == "still alive"


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


@pytest.mark.ranks(2)
def test_parameters_of_torch_and_of_numpy_travel_together():
    is_root = hvd.rank() == 0
    mine = {"matrix": torch.full((2, 3), float(hvd.rank())), "flag": torch.tensor([is_root])}
    versions = [tensor._version for tensor in mine.values()]
    sent = {name: tensor.numpy() for name, tensor in mine.items()} if is_root else mine
    hvd.broadcast_parameters(sent, root_rank=0, prefix="libraries")
    assert torch.equal(mine["matrix"], torch.zeros(2, 3)) and mine["flag"].item() is True
    assert is_root or all(tensor._version > old for tensor, old in zip(mine.values(), versions, strict=True))
    names = [one["name"] for one in _core.last_operations()[-2:]]
    assert names == ["libraries.<kinds>", "libraries"]


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
