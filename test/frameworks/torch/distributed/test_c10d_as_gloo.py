"""What scripts rely on in gloo beside the values of operations: when results arrive, timeouts, what is only read."""


import pytest
from harness.frameworks import need_torch_of_backend, on_demand
from test_c10d import default_group

need_torch_of_backend()

torch = on_demand("torch")
dist = on_demand("torch.distributed")
hvd = on_demand("ringtrain.torch")

INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "bool"]


# ------------------------------------------------------------------------------------------------------- averages


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_an_average_of_integers_is_refused_on_all_ranks(dtype):
    with default_group():
        group, average = dist.group.WORLD, dist.ReduceOp.AVG
        values = torch.ones(4, dtype=getattr(torch, dtype))
        half = torch.empty(2, dtype=values.dtype)
        for call in (
            lambda: dist.all_reduce(values, average),
            lambda: dist.all_reduce(values, average, async_op=True),
            lambda: dist.reduce(values, 0, average),
            lambda: dist.reduce_scatter(half, list(values.split(2)), average),
            lambda: dist.reduce_scatter_tensor(half, values, average),
            lambda: group.allreduce_coalesced([values], average),
        ):
            with pytest.raises(TypeError, match=rf"torch\.{dtype} has no AVG; use SUM and divide, or convert to a flo"):
                call()
        dist.all_reduce(values, dist.ReduceOp.MAX)
        assert values.tolist() == [1] * 4
