"""Parameters that are not the same on all ranks, and gradients that are NaN, are named before they do harm."""

import numpy as np
import pytest

import ringtrain as hvd
from ringtrain import _core
from ringtrain.arrays import numpy as numpy_adapter
from ringtrain.optim import SGD


def parameters():
    return {
        "encoder": [np.arange(12, dtype=np.float32).reshape(3, 4), np.zeros(5, np.int64)],
        "head": np.array(2.5),
        "empty": np.zeros((0, 3)),
        "strided": np.arange(20.0)[::2],
    }


@pytest.mark.ranks(1, 2, 3)
def test_equal_parameters_pass():
    hvd.check_replicas(parameters())


@pytest.mark.ranks(2)
def test_tensors_in_another_order_are_copied_for_as_long_as_they_are_read():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    kernel = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    for _ in range(20):
        hvd.check_replicas({"kernel": kernel, "weight": torch.arange(12.0).reshape(3, 4).t()})


@pytest.mark.ranks(2, 3)
def test_the_first_difference_is_named():
    mine = parameters()
    if hvd.rank() == 1:
        mine["encoder"][0][1, 2] += 0.5
        mine["strided"][3] = -1
    with pytest.raises(hvd.ReplicaError) as raised:
        hvd.check_replicas(mine)
    message = str(raised.value)
    assert 'parameter "encoder.0" is not the same on all ranks' in message and "1 more parameters differ" in message
    if hvd.size() == 3:  # with two nobody knows who is right
        assert "rank 1 differs from ranks 0, 2; on rank 1 first at [1, 2]: 6.5 instead of 6.0" in message
    assert ("nobody knows which is right" in message) == (hvd.size() == 2)
    hvd.check_replicas(parameters())  # goes on


@pytest.mark.ranks(5)
def test_most_ranks_are_right_also_where_the_first_one_is_not_among_them():
    mine = {"weight": np.full(3, hvd.rank() in (0, 3), np.float32)}
    with pytest.raises(hvd.ReplicaError, match=r"ranks 0, 3 differ from ranks 1-2, 4; on rank 0 first at \[0\]: 1.0"):
        hvd.check_replicas(mine)


@pytest.mark.ranks(4)
def test_a_tie_is_said():
    mine = {"weight": np.full(3, hvd.rank() >= 2, np.float32)}
    with pytest.raises(hvd.ReplicaError, match=r"ranks 2-3 differ from ranks 0-1;.* nobody knows which is right"):
        hvd.check_replicas(mine)


@pytest.mark.ranks(3)
def test_a_number_and_a_process_set():
    pair = hvd.add_process_set([0, 2])
    mine = {"scale": np.array(float(hvd.rank() == 2))}
    if pair.included():
        with pytest.raises(hvd.ReplicaError, match=r'parameter "scale".* first at \[\]: '):
            hvd.check_replicas(mine, process_set=pair)
    hvd.remove_process_set(pair)


def test_the_digest_sees_every_bit():
    def digest(array):
        return _core.digest(numpy_adapter.view(array))

    random = np.random.default_rng(1)
    for size in (0, 1, 7, 8, 31, 32, 33, 100, 4096):
        base = random.integers(0, 256, size, np.uint8)
        seen = {digest(base), digest(np.zeros(size + 1, np.uint8)), digest(np.zeros(size + 2, np.uint8))}
        for bit in range(8 * size)[:: max(1, size // 16)]:
            other = base.copy()
            other[bit // 8] ^= 1 << bit % 8
            seen.add(digest(other))
        assert len(seen) == 3 + len(range(8 * size)[:: max(1, size // 16)])
        assert digest(base) == digest(base.copy())
    words = np.array([1, 2, 3, 4], np.int64)
    assert len({digest(words[list(order)]) for order in ([0, 1, 2, 3], [1, 0, 2, 3], [3, 2, 1, 0])}) == 3


def new_model(torch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return model, torch.ones(2, 3)


@pytest.mark.ranks(2)
def test_an_optimizer_compares_replicas_every_so_many_steps():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    import ringtrain.torch as hvd

    model, inputs = new_model(torch)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), check_every=2
    )
    for step in range(1, 5):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        if step == 3 and hvd.rank() == 1:
            with torch.no_grad():
                model[1].bias[1] += 1
        if step < 4:
            optimizer.step()
        else:
            with pytest.raises(hvd.ReplicaError, match=r'parameter "1\.bias" is not the same'):
                optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_and_not_used(value):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    import ringtrain.torch as hvd

    model, inputs = new_model(torch)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), nan_check=True
    )
    for step in range(1, 5):
        optimizer.zero_grad()
        loss = model(inputs).sum()
        if step == 3 and hvd.rank() == 1:
            loss = loss + model[0].bias[0] * value
        loss.backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if step == 3:
            with pytest.raises(hvd.NonFiniteError, match=r'"0\.bias" is NaN or infinite on rank 1 in step 3'):
                optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))
        else:
            optimizer.step()


def test_finite_is_not_the_same_as_a_sum_that_is():
    large = np.full(10, 3e38, np.float32)
    assert numpy_adapter.is_finite(large) and numpy_adapter.is_finite(np.ones(3, np.int64))
    assert not numpy_adapter.is_finite(np.array([1, np.nan])) and not numpy_adapter.is_finite(np.array([np.inf]))


@pytest.mark.ranks(2)
def test_read_only_arrays_can_be_compared():
    frozen = np.ones(3)
    frozen.flags.writeable = False
    hvd.check_replicas({"frozen": frozen})
    with pytest.raises(TypeError, match=r'check_replicas: params\["step"\] is int'):
        hvd.check_replicas({"step": 1})


@pytest.mark.ranks(2)
def test_an_optimizer_of_arrays_compares_replicas_every_so_many_steps():
    weights, zeros = [np.zeros(2), np.full(3, float(hvd.rank()))], [np.zeros(2), np.zeros(3)]
    optimizer = hvd.DistributedOptimizer(SGD(0.1), {"a": None, "b": None}, check_every=2)
    optimizer.step(weights, zeros)
    with pytest.raises(hvd.ReplicaError, match='parameter "b" is not the same'):
        optimizer.step(weights, zeros)
    with pytest.raises(ValueError, match="check_every"):
        hvd.DistributedOptimizer(SGD(0.1), check_every=-1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("passes", [1, 2])
def test_a_gradient_of_arrays_that_is_not_finite_is_not_used(passes):
    weights = [np.ones(2), np.ones(3)]
    optimizer = hvd.DistributedOptimizer(
        SGD(0.1), {"a": None, "b": None}, backward_passes_per_step=passes, nan_check=True
    )
    gradients = [np.zeros(2), np.array([0.0, np.nan if hvd.rank() == 1 else 1.0, 0.0])]
    for _ in range(passes - 1):
        optimizer.step(weights, gradients)
    with pytest.raises(hvd.NonFiniteError, match='gradient of "b" is NaN or infinite on rank 1 in step 1'):
        optimizer.step(weights, gradients)
    assert all((weight == 1).all() for weight in weights)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_gradients_of_a_rank_that_averages_with_nobody_are_looked_at(op):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    import ringtrain.torch as hvd

    ranks = list(range(max(1, hvd.size() - 1)))
    some = hvd.add_process_set(ranks) if hvd.size() > 1 else hvd.global_process_set
    model, inputs = new_model(torch)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        op=getattr(hvd, op),
        process_set=some,
        nan_check=True,
        check_every=1,
    )
    is_last = hvd.rank() == hvd.size() - 1  # it does not belong to the set of several ranks
    for step in range(1, 4):
        optimizer.zero_grad()
        (model(inputs).sum() * (float("inf") if step == 2 and is_last else 1)).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        if step == 2 and is_last:
            with pytest.raises(hvd.NonFiniteError, match=rf"is NaN or infinite on rank {hvd.rank()} in step 2;"):
                optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))
        else:
            optimizer.step()
            assert not all(map(torch.equal, before, model.parameters()))
    if hvd.size() > 1:
        hvd.remove_process_set(some)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("has_closure", [False, True])
def test_adasum_looks_at_gradients_before_the_update_and_compares_replicas(has_closure):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed in this environment")
    import ringtrain.torch as hvd

    model, inputs = new_model(torch)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        op=hvd.Adasum,
        nan_check=True,
        check_every=2,
    )
    factor = 1.0

    def closure():
        optimizer.zero_grad()
        loss = model(inputs).sum() + model[0].bias[0] * factor
        loss.backward()
        return loss

    def step():
        if has_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    factor = float("nan") if hvd.rank() == 1 else 1.0
    with pytest.raises(hvd.NonFiniteError, match=r'"0\.bias" is NaN or infinite on rank 1 in step 2'):
        step()
    assert all(map(torch.equal, before, model.parameters()))
    factor = 1.0
    if hvd.rank() == 1:
        with torch.no_grad():
            model[1].bias[1] += 1
    with pytest.raises(hvd.ReplicaError, match=r'parameter "1\.bias" is not the same'):
        step()


@pytest.mark.ranks(3)
def test_a_rank_outside_of_the_process_set_looks_at_its_arrays():
    pair = hvd.add_process_set([0, 1])
    optimizer = hvd.DistributedOptimizer(SGD(0.1), {"a": None}, process_set=pair, nan_check=True)
    weights = [np.ones(2)]
    optimizer.step(weights, [np.zeros(2)])
    if hvd.rank() == 2:
        with pytest.raises(hvd.NonFiniteError, match='gradient of "a" is NaN or infinite on rank 2 in step 2'):
            optimizer.step(weights, [np.full(2, np.inf)])
        assert (weights[0] == 1).all()
    hvd.remove_process_set(pair)


@pytest.mark.ranks(3)
def test_all_ranks_with_such_gradients_are_named():
    optimizer = hvd.DistributedOptimizer(SGD(0.1), {"weight of Größe": None, "b": None}, nan_check=True)
    bad = np.full(2, np.inf if hvd.rank() else 1.0)
    message = 'gradient of "weight of Größe" is NaN or infinite on rank 1 in step 1, as others on rank 2; no rank'
    with pytest.raises(hvd.NonFiniteError, match=message):
        optimizer.step([np.ones(2)] * 2, [bad, np.ones(2)] if hvd.rank() == 1 else [np.ones(2), bad])
