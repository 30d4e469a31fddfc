"""Allreduces whose sums travel between hosts in two bits or one, against a model in NumPy, bit for bit."""

import numpy as np
import pytest
from exact_cupy import on_gpu, require_on_gpu
from harness.exact import require_equal
from harness.gpu_arrays import GPU
from quantization import QuantizedSum

import ringtrain as hvd
from ringtrain.optim import SGD

THRESHOLD = 0.5
KINDS = {"2bit": hvd.Compression.two_bit, "1bit": hvd.Compression.one_bit}
# Less than a word of codes, a line, several slices, several blocks of the decoder and of the network.
COUNTS = [1, 31, 64, 1000, 300_001]
STEPS = 3


def gradients(seed, count):
    """Those of all ranks, the same wherever this is called."""
    return list(np.random.default_rng(seed).standard_normal((hvd.size(), count)).astype("f4"))


def check_sums(hosts, force=False):
    for kind, make in KINDS.items():
        model, compression = QuantizedSum(hosts, kind, THRESHOLD), make(THRESHOLD, force=force)
        for step in range(STEPS):
            for count in COUNTS:
                arrays, name = gradients(100 * step + count, count), f"{kind}.{count}"
                result = hvd.allreduce(arrays[hvd.rank()], op=hvd.Sum, name=name, compression=compression)
                require_equal(result, model(name, arrays))
                assert np.array_equal(arrays[hvd.rank()], gradients(100 * step + count, count)[hvd.rank()])


def check_factors(hosts, force=False):
    model, compression = QuantizedSum(hosts, "2bit", THRESHOLD), hvd.Compression.two_bit(THRESHOLD, force=force)
    for step in range(STEPS):
        arrays = gradients(step, 5000)
        tensor = arrays[hvd.rank()].copy()
        factors = {"prescale_factor": 0.7, "postscale_factor": 1.3}
        result = hvd.allreduce_(tensor, name="factors", compression=compression, **factors)
        assert result is tensor
        require_equal(tensor, model("factors", arrays, 0.7, 1.3 / hvd.size()))


def check_many_at_once(hosts, force=False):
    """Joined into plans or not, and in groups, as they come."""
    model, compression = QuantizedSum(hosts, "2bit", THRESHOLD), hvd.Compression.two_bit(THRESHOLD, force=force)
    counts = [3, 100, 4096, 20_000, 77, 300_000, 1]
    for step in range(STEPS):
        batches = [gradients(1000 * step + count, count) for count in counts]
        handles = [
            hvd.allreduce_async(
                arrays[hvd.rank()], name=f"many.{count}", op=hvd.Sum, compression=compression, priority=step * count
            )
            for count, arrays in zip(counts, batches, strict=True)
        ]
        for count, arrays, handle in zip(counts, batches, handles, strict=True):
            require_equal(hvd.synchronize(handle), model(f"many.{count}", arrays))
        own = [arrays[hvd.rank()] for arrays in batches]
        results = hvd.grouped_allreduce(own, name="group", op=hvd.Sum, compression=compression)
        for count, arrays, result in zip(counts, batches, results, strict=True):
            require_equal(result, model(f"group.{count}", arrays))


def check_all(hosts, force=False):
    check_sums(hosts, force)
    check_factors(hosts, force)
    check_many_at_once(hosts, force)


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, fast=[2])
def test_one_host_that_is_forced_has_the_bits_of_the_model():
    check_all((hvd.size(),), force=True)


@pytest.mark.ranks(2, env={"RINGTRAIN_SHARED_MEMORY": "off"}, way="mpi")
@pytest.mark.ranks(2, env={"RINGTRAIN_SHARED_MEMORY": "off", "RINGTRAIN_NETWORK": "sockets"}, way="sockets")
def test_ranks_that_share_no_memory_are_hosts_of_their_own():
    check_all((1, 1), force=True)


@pytest.mark.ranks(2, hosts=(1, 1), timeout=120)
def test_two_hosts_have_the_bits_of_the_model():
    check_all((1, 1))


@pytest.mark.ranks(2, env=GPU)
def test_arrays_on_a_gpu_have_the_bits_of_the_model():
    compression = hvd.Compression.two_bit(THRESHOLD, force=True)
    model = QuantizedSum((hvd.size(),), "2bit", THRESHOLD)
    for step in range(STEPS):
        arrays = gradients(step, 5000)
        result = hvd.allreduce(on_gpu(arrays[hvd.rank()]), op=hvd.Sum, name="on GPU", compression=compression)
        require_on_gpu(result, model("on GPU", arrays))


@pytest.mark.ranks(3, hosts=(2, 1), timeout=120)
def test_hosts_with_different_numbers_of_ranks_have_the_bits_of_the_model():
    check_all((2, 1))


@pytest.mark.ranks(4, hosts=(2, 2), timeout=120)
def test_lanes_have_the_bits_of_the_model():
    check_all((2, 2))


@pytest.mark.ranks(4, hosts=(2, 2), timeout=120)
def test_a_process_set_on_one_host_is_refused_and_one_across_is_not():
    within, across = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
    compression = hvd.Compression.two_bit(THRESHOLD)
    grad = np.full(100, 0.75, "f4")
    if within.included():
        with pytest.raises(ValueError, match="are on one"):
            hvd.allreduce(grad, name="within", compression=compression, process_set=within)
    if across.included():
        for expected in (1.0, 1.0):  # 0.5 of each host; the second time of 0.25 and 0.75
            result = hvd.allreduce(grad, name="across", op=hvd.Sum, compression=compression, process_set=across)
            require_equal(result, np.full(100, expected, "f4"))
    hvd.remove_process_set(within)
    hvd.remove_process_set(across)


@pytest.mark.ranks(4, hosts=(1, 1, 1, 1), timeout=120)
def test_four_hosts_have_the_bits_of_the_model():
    check_all((1, 1, 1, 1))


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_arrays_that_cannot_travel_in_two_bits_are_refused_on_the_callers_line():
    grad, two_bit = np.ones(4, "f4"), hvd.Compression.two_bit(0.5, force=True)
    with pytest.raises(ValueError, match=r'"x": Compression.two_bit\(0.5\) .* all ranks of the process set are on one'):
        hvd.allreduce(grad, name="x", compression=hvd.Compression.two_bit(0.5))
    with pytest.raises(ValueError, match="is for float32, not for float64"):
        hvd.allreduce(grad.astype("f8"), name="x", compression=two_bit)
    with pytest.raises(ValueError, match="op=Sum and op=Average, not for op=Max"):
        hvd.allreduce(grad, name="x", op=hvd.Max, compression=two_bit)
    with pytest.raises(ValueError, match="op=Sum and op=Average, not for op=Adasum"):
        hvd.allreduce(grad, name="x", op=hvd.Adasum, compression=two_bit)
    with pytest.raises(ValueError, match="needs a name"):
        hvd.allreduce(grad, compression=two_bit)
    with pytest.raises(ValueError, match="is for allreduce"):
        hvd.reducescatter(grad, name="x", compression=two_bit)
    for threshold in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite number above 0"):
            hvd.Compression.one_bit(threshold)


@pytest.mark.ranks(2)
def test_ranks_with_other_thresholds_are_told():
    compression = hvd.Compression.two_bit(0.5 + hvd.rank(), force=True)
    with pytest.raises(hvd.MismatchError, match=r"Compression.two_bit\(0.5\).*Compression.two_bit\(1.5\)"):
        hvd.allreduce(np.ones(4, "f4"), name="other", compression=compression)
    how = {"compression": hvd.Compression.two_bit(0.5, force=True)} if hvd.rank() == 0 else {}
    with pytest.raises(hvd.MismatchError, match=r"Compression.two_bit\(0.5\).*all bits|all bits.*two_bit"):
        hvd.allreduce(np.ones(4, "f4"), name="other", **how)
    # The residual is that of what was carried out: nothing yet.
    result = hvd.allreduce(
        np.full(4, 0.2, "f4"), name="other", op=hvd.Sum, compression=hvd.Compression.two_bit(0.5, force=True)
    )
    require_equal(result, np.zeros(4, "f4"))


@pytest.mark.ranks(2)
def test_a_rank_that_has_joined_counts_with_zeros():
    compression, grad = hvd.Compression.two_bit(0.5, force=True), np.full(100, 0.375, "f4")
    first = hvd.allreduce(grad, name="uneven", op=hvd.Sum, compression=compression)
    require_equal(first, np.full(100, 0.5, "f4"))  # of 0.75
    if hvd.rank() == 1:
        second = hvd.allreduce(grad, name="uneven", op=hvd.Sum, compression=compression)
        require_equal(second, np.full(100, 0.5, "f4"))  # of 0.25 and 0.375
    hvd.join()


@pytest.mark.ranks(2)
def test_residuals_are_gone_after_another_init():
    compression, grad = hvd.Compression.two_bit(0.5, force=True), np.full(100, 0.125, "f4")
    for _ in range(2):
        for expected in (0, 0.5):  # of 0.25, and of 0.5
            result = hvd.allreduce(grad, name="again", op=hvd.Sum, compression=compression)
            require_equal(result, np.full(100, expected, "f4"))
        result = hvd.allreduce(grad, name="again", op=hvd.Sum, compression=compression)
        hvd.shutdown()
        hvd.init()


@pytest.mark.ranks(2)
def test_a_name_with_another_shape_begins_anew():
    compression = hvd.Compression.two_bit(0.5, force=True)
    for count in (10, 20):
        for expected in (0, 0.5):
            result = hvd.allreduce(np.full(count, 0.125, "f4"), name="shape", op=hvd.Sum, compression=compression)
            require_equal(result, np.full(count, expected, "f4"))


def digits_accuracy(compression):
    """Train a softmax on each rank's share of the digits, and return the share of all that it gets right."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.hstack([images / 16, np.ones((len(images), 1))]).astype("f4")
    own, wanted = images[hvd.rank() :: hvd.size()], np.eye(10, dtype="f4")[labels[hvd.rank() :: hvd.size()]]
    weights = np.zeros((65, 10), "f4")
    optimizer = hvd.DistributedOptimizer(SGD(lr=2.0), compression=compression)
    for _ in range(200):
        scores = own @ weights
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        optimizer.step([weights], [own.T @ (shares - wanted) / len(own)])
    return float(np.mean((images @ weights).argmax(1) == labels)), weights


@pytest.mark.ranks(2)
def test_digits_are_learnt_in_two_bits_as_well():
    in_full, _ = digits_accuracy(hvd.Compression.none)
    in_two_bits, weights = digits_accuracy(hvd.Compression.two_bit(0.01, force=True))
    assert in_full > 0.94
    assert in_two_bits > in_full - 0.02
    for other in hvd.allgather_object(weights):
        require_equal(weights, other)


@pytest.mark.ranks(2)
def test_a_distributed_optimizer_of_torch_sends_two_bits():
    torch = pytest.importorskip("torch")

    import ringtrain.torch as hvd_torch

    model = torch.nn.Linear(40, 3)
    hvd_torch.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd_torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        named_parameters=model.named_parameters(),
        compression=hvd_torch.Compression.two_bit(0.25, force=True),
    )
    of_model = QuantizedSum((hvd.size(),), "2bit", 0.25)
    for step in range(STEPS):
        before = model.weight.detach().numpy().copy()
        images = np.random.default_rng(step).standard_normal((hvd.size(), 4, 40)).astype("f4")
        scores = [model(torch.from_numpy(of_rank)).sum() for of_rank in images]
        grads = [torch.autograd.grad(score, model.weight, retain_graph=True)[0].numpy() for score in scores]
        optimizer.zero_grad()
        scores[hvd.rank()].backward()
        optimizer.step()
        expected = of_model("weight", grads, after=1 / hvd.size())
        require_equal(model.weight.grad.numpy(), expected)
        require_equal(model.weight.detach().numpy(), before - np.float32(0.5) * expected)
