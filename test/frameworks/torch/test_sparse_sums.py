"""Rows add up to what whole arrays add up to, bit for bit: every path of sparse values beside that of dense ones."""

import numpy as np
import pytest
from harness.exact import DTYPES, require_equal
from harness.frameworks import on_demand

from ringtrain import _core, kvstore
from ringtrain.arrays import numpy as numpy_adapter
from ringtrain.kvstore import places

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")

SHAPE = (7, 3)
NUMBERS = {"repeated": [5, 0, 5, 5, 2, 0], "none": [], "one": [6], "apart": [1, 0]}
REAL = [dtype for dtype in DTYPES if dtype.kind != "b"]


def rows_of(rank, dtype, numbers):
    """Values that no sum of 16 bits has right, and integers that overflow."""
    random = np.random.default_rng(rank)
    shape = (len(numbers), *SHAPE[1:])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(dtype)
    return (random.normal(size=shape) * 100).astype(dtype)


def whole_of(rows, numbers):
    """An array for each row, with zeros elsewhere."""
    arrays = [np.zeros(SHAPE, rows.dtype) for _ in numbers] or [np.zeros(SHAPE, rows.dtype)]
    for array, number, row in zip(arrays, numbers, rows, strict=False):
        array[number] = row
    return arrays


def to_torch(array):
    tensor = torch.from_numpy(np.array(array).view(np.uint16 if array.dtype.name == "bfloat16" else array.dtype))
    return tensor.view(torch.bfloat16) if array.dtype.name == "bfloat16" else tensor


def to_numpy(tensor, dtype):
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return (tensor.view(torch.uint8) if dtype.name == "bfloat16" else tensor).numpy().view(dtype).reshape(SHAPE)


def sparse_of(numbers, rows):
    indices = torch.tensor([numbers], dtype=torch.int64).reshape(1, -1)
    return torch.sparse_coo_tensor(indices, to_torch(rows), SHAPE, check_invariants=True)


# Each path: what the rows of this rank give, and what whole arrays give, on all ranks.


def through_a_store(kind, as_value):
    def sparse_and_dense(numbers, rows, _):
        kv = kvstore.create(kind)
        if "async" in kind:
            kv.set_optimizer("test")
        kv.init(["sparse", "dense"], [np.zeros(SHAPE, rows.dtype)] * 2)
        kv.push("sparse", as_value(numbers, rows))
        kv.push("dense", whole_of(rows, numbers))
        kv.wait()
        kv.barrier()
        return np.array(kv.pull("sparse")), np.array(kv.pull("dense"))

    return sparse_and_dense


def own_sum(numbers, rows):
    """The dense gradient of this rank."""
    return to_torch(np.array(places.sum_of(whole_of(rows, numbers), rows)))


def through_sparse_allreduce(numbers, rows, op):
    sparse = hvd.synchronize(hvd.sparse_allreduce_async(sparse_of(numbers, rows), "sparse sums", op))
    assert sparse.is_coalesced()
    dense = hvd.allreduce(own_sum(numbers, rows), op=op)
    return to_numpy(sparse, rows.dtype), to_numpy(dense, rows.dtype)


def through_an_optimizer(**options):
    def sparse_and_dense(numbers, rows, op):
        results = []
        for gradient in (sparse_of(numbers, rows), own_sum(numbers, rows)):
            parameter = torch.nn.Parameter(torch.zeros(SHAPE, dtype=gradient.dtype))
            made = torch.optim.SGD([parameter], lr=1.0)
            optimizer = hvd.DistributedOptimizer(made, op=op, **options)
            torch.autograd.backward([parameter], [gradient])
            optimizer.synchronize()
            results.append(to_numpy(parameter.grad, rows.dtype))
        return results

    return sparse_and_dense


def through_the_class_of_horovod(numbers, rows, op):
    from ringtrain.torch.wrapped import _DistributedOptimizer

    results = []
    for as_dense in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(SHAPE, dtype=to_torch(rows).dtype))
        cls = type("SGD", (torch.optim.SGD,), dict(_DistributedOptimizer.__dict__))
        optimizer = cls([{"params": [parameter], "lr": 1.0}], None, op=op, sparse_as_dense=as_dense)
        parameter.grad = sparse_of(numbers, rows)
        optimizer.synchronize()
        results.append(to_numpy(parameter.grad, rows.dtype))
    return results


def through_torch_distributed(numbers, rows, _):
    import torch.distributed as dist

    import ringtrain.torch.distributed  # noqa: F401

    dist.init_process_group("ringtrain", init_method="ringtrain://")
    try:
        sparse, dense = sparse_of(numbers, rows), own_sum(numbers, rows)
        dist.all_reduce(sparse)
        dist.all_reduce(dense)
    finally:
        dist.destroy_process_group()
    return to_numpy(sparse, rows.dtype), to_numpy(dense, rows.dtype)


def as_rows(numbers, rows):
    return kvstore.RowSparse(np.array(numbers, np.int32), rows)


def as_parts(numbers, rows):
    """A list of two, and one with nothing."""
    middle = len(numbers) // 2
    parts = [as_rows(numbers[:middle], rows[:middle]), as_rows(numbers[middle:], rows[middle:])]
    return [*parts, kvstore.RowSparse()]


STORES = ["local", "device", "dist_sync", "dist_sync_device", "dist_async"]
FLOATS_ONLY = ("float16", "bfloat16", "float32", "float64")
PATHS = {
    **{f"{kind}, rows": (through_a_store(kind, as_rows), None) for kind in STORES},
    **{f"{kind}, lists": (through_a_store(kind, as_parts), None) for kind in STORES},
    **{f"{kind}, tensor": (through_a_store(kind, sparse_of), None) for kind in STORES},
    "sparse_allreduce_async, sum": (through_sparse_allreduce, "Sum"),
    "sparse_allreduce_async, average": (through_sparse_allreduce, "Average"),
    "optimizer, sum": (through_an_optimizer(), "Sum"),
    "optimizer, average": (through_an_optimizer(), "Average"),
    "optimizer, sparse_as_dense": (through_an_optimizer(sparse_as_dense=True), "Average"),
    "class of Horovod": (through_the_class_of_horovod, "Average"),
    "torch.distributed": (through_torch_distributed, None),
}


def takes(path, dtype):
    """Updates and gradients are floats; torch and its sparse tensors lack some integers."""
    if "async," in path and not path.startswith("sparse_allreduce"):
        return dtype.name in FLOATS_ONLY
    if "optimizer" in path or "Horovod" in path:
        return dtype.name in FLOATS_ONLY
    with_torch = not path.endswith((", rows", ", lists"))
    return not (with_torch and dtype.name in ("uint16", "uint32", "uint64"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_rows_add_up_as_whole_arrays_do(dtype):
    for path, (sparse_and_dense, op) in PATHS.items():
        if not takes(path, dtype):
            continue
        for case in NUMBERS:
            numbers = NUMBERS[case] if hvd.rank() == 0 else NUMBERS["repeated"][::-1]
            rows = rows_of(hvd.rank(), dtype, numbers)
            sparse, dense = sparse_and_dense(numbers, rows, op and getattr(hvd, op))
            assert (sparse == dense).all(), f"{path}, {case}: {sparse} but dense {dense}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_ones_of_16_bits_are_counted(dtype):
    numbers, expected = [2] * 4096, np.zeros(SHAPE, np.float32)
    expected[2] = 4096
    rows = np.ones((4096, *SHAPE[1:]), numpy_adapter.cast(np.empty(0, np.float32), dtype).dtype)
    for path, (sparse_and_dense, op) in PATHS.items():
        sparse, _ = sparse_and_dense(numbers, rows, op and getattr(hvd, op))
        is_of_one = op == "Average" or path.startswith(("local", "device"))
        require_equal(sparse.astype(np.float32), expected * (1 if is_of_one else 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", STORES)
def test_rows_that_a_key_cannot_hold_are_refused(kind):
    kv = kvstore.create(kind)
    if "async" in kind:
        kv.set_optimizer("test")
    kv.init(["f", "h"], [np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float16)])
    one = np.ones((1, 1), np.float32)
    wrong = [
        ("f", kvstore.RowSparse([1], [[1e300]]), "is float32, but the value is float64; convert it"),
        ("f", kvstore.RowSparse([1], [[1]]), "is float32, but the value is int64; convert it"),
        ("f", torch.sparse_coo_tensor([[1]], torch.ones(1, 1).double(), (4, 1)), "the value is float64; convert it"),
        ("f", [kvstore.RowSparse([1], one), kvstore.RowSparse([1], one.astype(np.float16))], "value is float16"),
        ("f", kvstore.RowSparse([-1], one), "has rows 0 to 3, not -1"),
        ("f", kvstore.RowSparse([4], one), "has rows 0 to 3, not 4"),
        ("h", kvstore.RowSparse([1], one.astype(np.float64)), "is float16, but the value is float64"),
    ]
    if "async" not in kind:
        kv.init("i", np.zeros((4, 1), np.int32))
        wrong.append(("i", kvstore.RowSparse([1], [[1.7]]), "is int32, but the value is float64; convert it"))
        wrong.append(("i", kvstore.RowSparse([1], [[1]]), "is int32, but the value is int64; convert it"))
    for key, value, message in wrong:
        with pytest.raises(ValueError, match=message):
            kv.push(key, value)
    for numbers in ([1.5], [float("nan")], [np.inf], ["1"]):
        with pytest.raises(ValueError):
            kvstore.RowSparse(numbers, one)
        with pytest.raises(ValueError):
            kv.row_sparse_pull("f", row_ids=numbers)
    kv.push("f", kvstore.RowSparse([1.0], one))
    kv.push("h", kvstore.RowSparse([1], one * 2049))  # float32 is for 16-bit floats, too
    kv.wait()
    kv.barrier()
    workers = 2 if kind.startswith("dist") else 1
    assert kv.pull("f")[1] == workers and kv.pull("h")[1] == np.float16(2049 * workers)


@pytest.mark.ranks(2)
def test_indices_outside_of_a_tensor_are_refused_on_the_line_that_sends_it():
    def with_indices(*indices):
        made = torch.sparse_coo_tensor([[0] * len(indices)], torch.ones(len(indices), 2), (4, 2))
        made._indices().copy_(torch.tensor([indices]))
        return made

    for indices in ((-1, 2), (0, 4)):
        with pytest.raises(ValueError, match=r"indices of dimension 0 must be in 0..3, not in"):
            hvd.sparse_allreduce_async(with_indices(*indices), "outside")
    assert hvd.synchronize(hvd.sparse_allreduce_async(with_indices(0, 3), "outside")).is_coalesced()


@pytest.mark.ranks(2)
def test_a_tensor_with_several_sparse_dimensions():
    rank = hvd.rank()
    for shape, sparse_dimensions in (((3, 4, 2), 2), ((3, 4, 2), 3), ((2, 0, 3), 1), ((5,), 1)):
        dense = torch.zeros(shape, dtype=torch.bfloat16)
        dense.reshape(-1)[rank::3] = 1.5 + rank
        handle = hvd.sparse_allreduce_async(dense.to_sparse(sparse_dimensions), "dimensions", op=hvd.Sum)
        assert torch.equal(hvd.synchronize(handle).to_dense(), hvd.allreduce(dense, op=hvd.Sum))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "int64"])
def test_a_sum_by_coalesce_has_the_rule_of_the_kernel(dtype):
    """It is for GPUs; here in host memory, with values that are exact in any order."""
    from ringtrain.arrays import torch as torch_adapter

    indices = torch.cat([torch.tensor([[2, 0, 2, 3], [1, 1, 1, 0]]), torch.ones(2, 4096, dtype=torch.int64)], 1)
    values = torch.ones(4100, 2, dtype=getattr(torch, dtype))
    values[:4] = torch.tensor([[-7, 5], [11, 3], [-4, 8], [9, -1]])
    for divisor in (1, 2, 4):
        arguments = indices, values, (4, 2, 2), divisor
        found, expected = torch_adapter._sum_by_coalesce(*arguments), torch_adapter.sum_sparse(*arguments)
        assert found.dtype == values.dtype and found.is_coalesced()
        assert torch.equal(found.indices(), expected.indices()) and torch.equal(found.values(), expected.values())


@pytest.mark.ranks(1)
def test_a_sum_of_rows_refuses_places_that_do_not_exist():
    def view(array):
        return numpy_adapter.view(np.ascontiguousarray(array))

    rows, sums = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    for places_of_rows, message in (([0, 2], "2 sums"), ([-1, 0], "2 sums"), ([0, 0], "sum 1 has no rows")):
        with pytest.raises(ValueError, match=message):
            _core.sum_rows(view(np.array(places_of_rows)), view(rows), view(sums), 1.0)
    for wrong in (np.array([0]), np.array([0, 1], np.int32)):
        with pytest.raises(ValueError):
            _core.sum_rows(view(wrong), view(rows), view(sums), 1.0)
    _core.sum_rows(view(np.array([0, 1])), view(rows), view(sums), 0.5)
    require_equal(sums, np.full((2, 3), 0.5, np.float32))
