"""Tensors of PyTorch that come again in every step: they are looked at without Python, and what has changed is seen."""

import pytest
from exact_torch import TORCH_DTYPES, require_tensor, tensor_of
from harness.exact import data_of_ranks, reference
from harness.frameworks import on_demand

import ringtrain as hvd

torch = on_demand("torch")


def numbers(first=0):
    return torch.arange(6).reshape(2, 3) + first


def sum_of_all():
    return hvd.size() * numbers() + sum(range(hvd.size()))


CHANGES = {
    "dtype": lambda tensor: tensor.double(),
    "integers": lambda tensor: tensor.to(torch.int32),
    "shape": lambda tensor: tensor.reshape(3, 2),
    "dimensions": lambda tensor: tensor.reshape(-1),
    "order": lambda tensor: tensor.t().contiguous().t(),
    "strides": lambda tensor: tensor.repeat_interleave(2, 1)[:, ::2],
    "sign": lambda tensor: torch._neg_view(-tensor),
    "class": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "library": lambda tensor: tensor.numpy(),
}


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_prepared_tensor_is_seen(change):
    for changes in (False, False, False, True, False):
        tensor = numbers(hvd.rank()).float()
        tensor = CHANGES[change](tensor) if changes else tensor
        assert hvd.allreduce_(tensor, name=f"prepared tensor: {change}", op=hvd.Sum) is tensor
        assert torch.equal(torch.as_tensor(tensor).detach().double().reshape(-1), sum_of_all().double().reshape(-1))


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_a_prepared_tensor_of_any_dtype_is_reduced_where_it_lies(dtype):
    for shape in ((), (0,), (3, 0, 2), (1,), (33, 17)):
        parts = data_of_ranks(hvd.size(), shape, dtype)
        for _ in range(4):
            tensor = tensor_of(parts[hvd.rank()])
            assert hvd.allreduce_(tensor, name=f"prepared tensor: {dtype} {shape}", op=hvd.Max) is tensor
            require_tensor(tensor, reference("max", parts))
