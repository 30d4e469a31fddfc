"""Operations in functions that torch.compile has compiled: the results are those without it."""

import pytest
from harness.frameworks import on_demand

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")
dist = on_demand("torch.distributed")


def operations():
    """Of a tensor float32[4, 3] to a tensor; names are the same in each call, as in a training."""
    norm = hvd.SyncBatchNorm(3)
    values = torch.Tensor.detach

    def in_place(operation):
        def applied(x):
            mine = values(x).clone()
            result = operation(mine)
            return mine + (result[0] if isinstance(result, list) else result)

        return applied

    def waited(operation):
        def applied(x):
            result = hvd.synchronize(operation(values(x).clone()))
            return result[0] if isinstance(result, list) else result

        return applied

    return {
        "allreduce": lambda x: hvd.allreduce(x * 2) * 2,
        "allreduce named": lambda x: hvd.allreduce(x, name="x", op=hvd.Sum) * 2,
        "allreduce of values": lambda x: hvd.allreduce(values(x)) * 2,
        "allreduce fp16": lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16) * 2,
        "allreduce in bits": lambda x: hvd.allreduce(x.repeat(30_000, 1)).sum(0),
        "allreduce_": in_place(lambda x: hvd.allreduce_(x, op=hvd.Sum)),
        "allreduce_async": waited(lambda x: hvd.allreduce_async(x, name="a")),
        "allreduce_async_": waited(lambda x: hvd.allreduce_async_(x, name="b")),
        "grouped_allreduce": lambda x: sum(hvd.grouped_allreduce([x, x * 2])),
        "grouped_allreduce_": in_place(lambda x: hvd.grouped_allreduce_([x])),
        "grouped_allreduce_async": waited(lambda x: hvd.grouped_allreduce_async([x], name="c")),
        "allgather": lambda x: hvd.allgather(x) * 2,
        "allgather_async": waited(lambda x: hvd.allgather_async(x, name="d")),
        "grouped_allgather": lambda x: sum(hvd.grouped_allgather([x, x])),
        "broadcast": lambda x: hvd.broadcast(x, 0) * 2,
        "broadcast_": in_place(lambda x: hvd.broadcast_(x, 0)),
        "broadcast_async_": waited(lambda x: hvd.broadcast_async_(x, 0, name="e")),
        "grouped_broadcast": lambda x: sum(hvd.grouped_broadcast([values(x), values(x)], 1)),
        "alltoall": lambda x: hvd.alltoall(x) * 2,
        "alltoall with splits": lambda x: hvd.alltoall(x, torch.tensor([1, 3]))[0] * 2,
        "alltoall_async": waited(lambda x: hvd.alltoall_async(x, name="f")),
        "reducescatter": lambda x: hvd.reducescatter(x) * 2,
        "reducescatter_async": waited(lambda x: hvd.reducescatter_async(x, name="g")),
        "grouped_reducescatter": lambda x: sum(hvd.grouped_reducescatter([x, x])),
        "sparse_allreduce_async": lambda x: hvd.synchronize(
            hvd.sparse_allreduce_async(values(x).to_sparse(1), "h")
        ).to_dense(),
        "send and recv": lambda x: hvd.send(values(x), 1) or x if hvd.rank() == 0 else hvd.recv(x.new_empty(4, 3), 0),
        "wait": lambda x: hvd.allreduce_async(values(x), name="i").wait() * 2,
        "barrier": lambda x: (hvd.barrier(), x * 2)[1],
        "objects": lambda x: x * hvd.broadcast_object(2, 0) + sum(hvd.allgather_object(3)),
        "parameters": in_place(lambda x: hvd.broadcast_parameters({"x": x}, 0) or x),
        "SyncBatchNorm": norm,
        "rank and size": lambda x: x * hvd.size() + hvd.rank() + hvd.global_process_set.size(),
    }


@pytest.mark.ranks(2, timeout=240)
def test_a_compiled_function_has_the_results_of_its_operations():
    for name, function in operations().items():
        x = (torch.arange(12.0).reshape(4, 3) + hvd.rank()).requires_grad_()
        expected = function(x)
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager")
        for _ in range(3):
            found = compiled(x)
            assert torch.equal(found, expected), name
        if expected.requires_grad:
            (of_eager,) = torch.autograd.grad(expected.square().sum(), x)
            (of_compiled,) = torch.autograd.grad(found.square().sum(), x)
            assert torch.equal(of_compiled, of_eager), name


@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("what", ["step", "whole"])
def test_a_compiled_step_updates_as_without_the_compiler(what):
    results = []
    for is_compiled in (False, True):
        torch.manual_seed(1)
        torch._dynamo.reset()
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(adam, named_parameters=model.named_parameters())

        def train(inputs, update=None, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                (update or optimizer.step)()

        update = torch.compile(optimizer.step, backend="eager") if is_compiled and what == "step" else None
        one_step = torch.compile(train, backend="eager") if is_compiled and what == "whole" else train
        for number in range(4):
            inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * number + hvd.rank()))
            one_step(inputs.double(), update)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))
    hvd.check_replicas({str(number): one for number, one in enumerate(results[1])})


@pytest.mark.ranks(2, timeout=120)
def test_one_graph_of_all_is_refused_with_the_reason():
    def scaled(x):
        return x * hvd.size()

    for function in (hvd.allreduce, lambda x: hvd.allreduce_async(x, name="full").wait(), hvd.SyncBatchNorm(3), scaled):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="which no graph can do: compile without fullgraph=True"):
            torch.compile(lambda x, f=function: f(x) * 2, backend="eager", fullgraph=True)(torch.ones(4, 3))
    assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
