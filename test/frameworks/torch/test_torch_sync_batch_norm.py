"""SyncBatchNorm: every rank gets what BatchNorm computes of the batches of all ranks, one after the other."""

import copy
import io

import pytest
from harness.frameworks import on_demand

from ringtrain import global_process_set

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")

CHANNELS = 5
TRAILING = [(), (3,), (3, 2), (2, 1, 3)]


def random_tensor(*shape, seed=0, dtype=None):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype or torch.float64)


def even(rows):
    return [rows] * hvd.size()


def uneven(rows):
    """The last rank has the most rows, the first of several has none."""
    return [rows * rank for rank in range(hvd.size())] if hvd.size() > 1 else [rows]


def own_rows(whole, rows):
    return whole.split(rows)[hvd.rank()]


def new_pair(dtype=None, process_set=global_process_set, **options):
    """A BatchNorm with parameters that are not trivial, and the SyncBatchNorm of it."""
    plain = torch.nn.BatchNorm1d(CHANNELS, **options).to(dtype or torch.float64)
    plain._check_input_dim = lambda input: None  # one class for all numbers of dimensions
    if plain.affine:
        with torch.no_grad():
            plain.weight.copy_(random_tensor(CHANNELS, seed=1))
            plain.bias.copy_(random_tensor(CHANNELS, seed=2))
    return plain, hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), process_set)


def run(layer, input, of_output):
    """One pass forward and backward: the output, and the gradients of the input and of the parameters."""
    input = input.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    output = layer(input)
    output.backward(of_output)
    gradients = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    return output.detach(), input.grad, gradients


def require_close(actual, expected, tolerance=1e-12):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def require_same_everywhere(tensor):
    gathered = hvd.allgather(tensor.reshape(1, -1))
    assert all(torch.equal(row, gathered[0]) for row in gathered)


def require_like_whole_batch(layer, plain, rows, trailing, tolerance=1e-12, seed=0):
    whole = 3 * random_tensor(sum(rows), CHANNELS, *trailing, seed=seed) + 10
    of_whole = random_tensor(*whole.shape, seed=seed + 100)
    output, of_input, of_parameters = run(layer, own_rows(whole, rows), own_rows(of_whole, rows))
    expected, of_expected_input, of_expected_parameters = run(plain, whole, of_whole)
    require_close(output, own_rows(expected, rows), tolerance)
    require_close(of_input, own_rows(of_expected_input, rows), tolerance)
    for own, of_all in zip(of_parameters, of_expected_parameters, strict=True):
        require_close(hvd.allreduce(own, op=hvd.Sum), of_all, tolerance)
    for name, buffer in layer.named_buffers():
        require_close(buffer, plain.get_buffer(name), tolerance)
        require_same_everywhere(buffer)


# Like the whole batch


@pytest.mark.ranks(1, 2, 3, fast=[2])
@pytest.mark.parametrize("split", [even, uneven])
def test_outputs_gradients_and_statistics_are_those_of_the_whole_batch(split):
    for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.5}):
        plain, layer = new_pair(**options)
        for step, trailing in enumerate(TRAILING):
            require_like_whole_batch(layer, plain, split(3), trailing, seed=step)
    assert layer.num_batches_tracked == len(TRAILING)


@pytest.mark.ranks(2, 3)
def test_the_strides_of_the_input_change_nothing_and_stay():
    rows = even(4)
    whole, of_whole = random_tensor(sum(rows), CHANNELS, 3, 2), random_tensor(sum(rows), CHANNELS, 3, 2, seed=1)
    plain, layer = new_pair()
    expected = run(plain, whole, of_whole)
    for arrange in (
        lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
        lambda tensor: tensor.transpose(0, 3).contiguous().transpose(0, 3),
        lambda tensor: tensor.repeat_interleave(2, dim=3)[..., ::2],
    ):
        mine = arrange(own_rows(whole, rows))
        output, of_input, _ = run(layer, mine, arrange(own_rows(of_whole, rows)))
        require_close(output, own_rows(expected[0], rows))
        require_close(of_input, own_rows(expected[1], rows))
    channels_last = own_rows(whole, rows).contiguous(memory_format=torch.channels_last)
    assert layer(channels_last).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.ranks(1, 2)
def test_narrow_inputs_are_normalized_in_float32():
    tolerances = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
    rows = uneven(8)
    for dtype, tolerance in tolerances.items():
        for parameters in (torch.float32, dtype):
            plain, layer = new_pair(parameters)
            whole = (random_tensor(sum(rows), CHANNELS, 6) + 2).to(dtype)
            of_whole = random_tensor(*whole.shape, seed=1, dtype=dtype)
            output, of_input, of_parameters = run(layer, own_rows(whole, rows), own_rows(of_whole, rows))
            expected, of_expected, _ = run(plain.double(), whole.double(), of_whole.double())
            assert (output.dtype, of_input.dtype, of_parameters[0].dtype) == (dtype, dtype, parameters)
            require_close(output.double(), own_rows(expected, rows), tolerance)
            require_close(of_input.double(), own_rows(of_expected, rows), tolerance)
            assert layer.running_var.dtype == parameters
            require_close(layer.running_var.double(), plain.running_var, 1e-5 if parameters != dtype else tolerance)
            require_same_everywhere(layer.running_var)


@pytest.mark.ranks(1, 2, 3)
def test_a_large_mean_costs_no_digits_of_the_variance():
    rows = even(50)
    whole = random_tensor(sum(rows), CHANNELS) + 1e5 + 1e3 * torch.arange(CHANNELS)
    _, layer = new_pair(momentum=1.0)
    layer(own_rows(whole, rows))
    require_close(layer.running_var, whole.var(0), 1e-5)


@pytest.mark.ranks(1, 2, 3)
def test_training_equals_that_of_one_process_on_the_whole_batch():
    torch.manual_seed(1)
    convolution = torch.nn.Conv2d(2, CHANNELS, 3)
    layers = [convolution, torch.nn.BatchNorm2d(CHANNELS), torch.nn.ReLU(), torch.nn.Conv2d(CHANNELS, CHANNELS, 2)]
    whole = torch.nn.Sequential(*layers, torch.nn.BatchNorm2d(CHANNELS), torch.nn.Flatten(), torch.nn.Linear(20, 1))
    whole = whole.double()
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole))
    reference = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    rows = even(2)
    for step in range(10):
        inputs = random_tensor(sum(rows), 2, 5, 5, seed=step)
        for trained, batch, its_optimizer in ((whole, inputs, reference), (model, own_rows(inputs, rows), optimizer)):
            its_optimizer.zero_grad()
            trained(batch).square().mean().backward()
            its_optimizer.step()
    for name, tensor in model.state_dict().items():
        require_close(tensor, whole.state_dict()[name], 1e-9)
        require_same_everywhere(tensor)


# Process sets, join


@pytest.mark.ranks(3)
def test_the_ranks_of_a_process_set_normalize_together_and_the_others_alone():
    pair = hvd.add_process_set([0, 2])
    plain, layer = new_pair(process_set=pair)
    inputs = [random_tensor(2 + rank, CHANNELS, 3, seed=rank) for rank in range(3)]
    of_outputs = [random_tensor(*input.shape, seed=9) for input in inputs]
    together, place = ([0, 2], pair.rank()) if pair.included() else ([1], 0)
    output, of_input, _ = run(layer, inputs[hvd.rank()], of_outputs[hvd.rank()])
    expected = run(plain, torch.cat([inputs[r] for r in together]), torch.cat([of_outputs[r] for r in together]))
    for actual, whole in zip((output, of_input), expected[:2], strict=True):
        require_close(actual, whole.split([len(inputs[rank]) for rank in together])[place])
    require_close(layer.running_var, plain.running_var)
    hvd.remove_process_set(pair)


@pytest.mark.ranks(2, 3)
def test_ranks_that_have_joined_are_left_out():
    plain, layer = new_pair()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.0), layer.named_parameters())
    with hvd.Join(optimizer):
        for batch in range(2 * hvd.rank()):
            working = [rank for rank in range(hvd.size()) if batch < 2 * rank]
            inputs = [random_tensor(3, CHANNELS, 2, seed=10 * batch + rank) for rank in working]
            place = working.index(hvd.rank())
            output = layer(inputs[place])
            expected = plain(torch.cat(inputs))
            require_close(output, expected[3 * place : 3 * place + 3])
            output.square().sum().backward()
            plain.zero_grad()
            expected.square().sum().backward()
            optimizer.step()
            require_close(layer.weight.grad, plain.weight.grad / len(working))
            optimizer.zero_grad()
            require_close(layer.running_mean, plain.running_mean)


# Order and names


@pytest.mark.ranks(2, 3)
def test_a_layer_that_only_one_rank_has_constructed_disturbs_nobody():
    if hvd.rank() == 0:
        hvd.SyncBatchNorm(CHANNELS)
    layers = [hvd.SyncBatchNorm(channels).double() for channels in (CHANNELS, 3, CHANNELS)]
    whole = random_tensor(4 * hvd.size(), CHANNELS)
    for layer in (layers[0], layers[2], layers[0]):
        plain = torch.nn.BatchNorm1d(CHANNELS).double()
        require_close(layer(own_rows(whole, even(4))), own_rows(plain(whole), even(4)))


@pytest.mark.ranks(2)
def test_operations_without_a_name_may_come_in_between():
    plain, layer = new_pair()
    whole = random_tensor(4 * hvd.size(), CHANNELS, 2)
    handles = []
    if hvd.rank() == 0:
        handles.append(hvd.allreduce_async(torch.ones(CHANNELS), op=hvd.Sum))
    require_close(layer(own_rows(whole, even(4))), own_rows(plain(whole), even(4)))
    if hvd.rank() == 1:
        handles.append(hvd.allreduce_async(torch.ones(CHANNELS), op=hvd.Sum))
    assert torch.equal(hvd.synchronize(handles[0]), torch.full((CHANNELS,), 2.0))


@pytest.mark.ranks(2)
def test_only_gradients_that_are_wanted_travel():
    _, layer = new_pair()
    output = layer(random_tensor(3, CHANNELS, seed=hvd.rank()))
    if hvd.rank() == 0:  # the other rank need not come: the input has no gradient
        output.sum().backward()
        require_close(layer.bias.grad, torch.full((CHANNELS,), 3.0, dtype=torch.float64))
    hvd.barrier()


@pytest.mark.ranks(2)
def test_a_gradient_of_the_gradient_is_an_error():
    _, layer = new_pair()
    input = random_tensor(3, CHANNELS, seed=hvd.rank()).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(input).square().sum(), input, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# eval()


@pytest.mark.ranks(2)
def test_eval_uses_running_statistics_and_needs_nobody():
    plain, layer = new_pair()
    whole = random_tensor(4 * hvd.size(), CHANNELS)
    plain(whole)
    layer(own_rows(whole, even(4)))
    if hvd.rank() == 0:
        require_close(layer.eval()(whole[:1]), plain.eval()(whole[:1]))
        assert layer.num_batches_tracked == 1
    hvd.barrier()


@pytest.mark.ranks(1, 2)
def test_eval_without_running_statistics_uses_the_batches_of_all_ranks():
    plain, layer = new_pair(track_running_stats=False)
    require_like_whole_batch(layer.eval(), plain.eval(), uneven(3), (2,))
    plain, layer = new_pair()
    layer.track_running_stats = plain.track_running_stats = False  # keeps what it has, but does not update it
    require_like_whole_batch(layer, plain, uneven(3), (2,))
    assert layer.num_batches_tracked == 0


def test_eval_works_without_init():
    layer = hvd.SyncBatchNorm(CHANNELS)
    assert layer.eval()(torch.ones(2, CHANNELS)).shape == (2, CHANNELS)
    with pytest.raises(hvd.NotInitializedError, match="call init"):
        layer.train()(torch.ones(2, CHANNELS))


# Conversion and copies


def test_every_batch_norm_is_converted_with_what_it_has():
    inner = torch.nn.Sequential(torch.nn.BatchNorm2d(3, eps=0.1, momentum=None), torch.nn.BatchNorm3d(2, affine=False))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(4, track_running_stats=False), inner)
    model[1].eval()
    before, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    layers = [model[1], *inner]
    assert all(type(layer) is hvd.SyncBatchNorm for layer in layers)
    assert [layer.training for layer in layers] == [False, True, True]
    assert [layer.num_features for layer in layers] == [4, 3, 2]
    assert (inner[0].eps, inner[0].momentum, inner[1].affine, model[1].track_running_stats) == (0.1, None, False, False)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.ranks(1)
def test_a_norm_of_two_names_is_converted_once():
    model = torch.nn.Module()
    model.norm = model.again = torch.nn.BatchNorm1d(3)
    model.parts = torch.nn.ModuleList([torch.nn.Sequential(model.norm), torch.nn.Sequential(model.norm), None])
    model.nothing = None
    model.register_module("left_out", None)
    weight = model.norm.weight
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model and isinstance(model.norm, hvd.SyncBatchNorm) and model.norm.weight is weight
    assert all(one is model.norm for one in (model.again, model.parts[0][0], model.parts[1][0]))
    shared = torch.nn.Sequential(torch.nn.Linear(3, 3))
    twice = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(shared, shared))
    assert twice[0] is shared and twice[1] is shared


def test_a_layer_by_itself_is_converted():
    pair = hvd.ProcessSet([0, 1])
    layer = hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm2d(3), pair)
    assert type(layer) is hvd.SyncBatchNorm and layer.process_set is pair
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(layer).process_set is hvd.global_process_set


@pytest.mark.parametrize("settings", [{}, {"affine": False}])
def test_a_lazy_layer_is_converted_once_it_has_seen_a_batch(settings):
    layer = torch.nn.LazyBatchNorm1d(**settings)
    with pytest.raises(ValueError, match="LazyBatchNorm1d does not know its features yet: call the network"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(layer)
    layer(torch.ones(2, 3))
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(layer).num_features == 3


@pytest.mark.ranks(2)
def test_copied_and_saved_models_keep_the_process_set():
    layer = hvd.SyncBatchNorm(CHANNELS)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert other.process_set is hvd.global_process_set
        other(torch.ones(1, CHANNELS))


# Errors


BAD_INPUTS = {
    "one dimension": (lambda: torch.ones(CHANNELS), ValueError, r"\(N, 5, \.\.\.\), not \[5\]"),
    "too few channels": (lambda: torch.ones(2, CHANNELS - 1), ValueError, r"not \[2, 4\]"),
    "integers": (lambda: torch.ones(2, CHANNELS, dtype=torch.int32), TypeError, "not torch.int32"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("which", BAD_INPUTS)
def test_a_bad_input_is_refused_on_the_callers_line(which):
    make, error, message = BAD_INPUTS[which]
    layer = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(error, match=message):
        layer(make())
    layer(torch.ones(2, CHANNELS))


@pytest.mark.ranks(1, 2, 3)
def test_too_few_values_are_an_error_on_all_ranks():
    layer = hvd.SyncBatchNorm(CHANNELS)
    for rows_of_last in (0, 1):
        with pytest.raises(ValueError, match=f"at least 2 values per channel over all ranks.*not {rows_of_last};"):
            layer(torch.ones(rows_of_last if hvd.rank() == hvd.size() - 1 else 0, CHANNELS))
    assert layer.num_batches_tracked == 0
    assert torch.equal(layer.running_mean, torch.zeros(CHANNELS))
    layer(torch.ones(2, CHANNELS))
    assert layer.num_batches_tracked == 1
