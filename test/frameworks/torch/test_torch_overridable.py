"""`_DistributedOptimizer`, whose methods code for Horovod overrides, and other private names that such code uses."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from exact_torch import require_tensor
from harness.frameworks import on_demand

from ringtrain.errors import HostsUpdatedInterrupt

torch = on_demand("torch")
hvd = on_demand("ringtrain.torch")
mpi_ops = on_demand("ringtrain.torch.mpi_ops")
of_methods = on_demand("ringtrain.torch.optimizer")


def _counting() -> Any:
    """As code for Horovod has it: another way to submit a gradient."""

    class Counting(of_methods._DistributedOptimizer):
        submitted: ClassVar[list[str]] = []

        def _allreduce_grad_async(self, p: torch.Tensor) -> Any:
            self.submitted.append(self._parameter_names[p])
            return super()._allreduce_grad_async(p) if isinstance(self, Counting) else submit(self, p)

    submit = of_methods._DistributedOptimizer._allreduce_grad_async
    return Counting


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).double()


def _train(model: torch.nn.Module, optimizer: Any, passes: int = 1) -> list[torch.Tensor]:
    """Three steps with inputs of small whole numbers, other ones on each rank."""
    for step in range(3):
        for part in range(passes):
            x = torch.full((2, 3), float(hvd.rank() + step + part), dtype=torch.float64)
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def _made_of_methods(model: torch.nn.Module, source: type, **arguments: Any) -> Any:
    """As `horovod.torch.DistributedOptimizer` makes it."""
    own = torch.optim.SGD(model.parameters(), lr=0.125)
    original = of_methods._DistributedOptimizer
    methods = {**dict(original.__dict__), **(vars(source) if source is not original else {})}
    made = type("SGD", (torch.optim.SGD,), methods)
    return made(own.param_groups, list(model.named_parameters()), hvd.Compression.none, **arguments)


@pytest.mark.ranks(1, 2, fast=[2])
@pytest.mark.parametrize("is_overridden", [False, True], ids=["as it is", "overridden"])
@pytest.mark.parametrize("passes", [1, 2])
def test_an_optimizer_of_the_methods_trains_as_the_distributed_one(is_overridden, passes):
    counting = _counting()
    source = counting if is_overridden else of_methods._DistributedOptimizer
    model, other = _model(), _model()
    optimizer = _made_of_methods(model, source, backward_passes_per_step=passes)
    plain = torch.optim.SGD(other.parameters(), lr=0.125)
    reference = hvd.DistributedOptimizer(plain, other.named_parameters(), backward_passes_per_step=passes)
    for own, expected in zip(_train(model, optimizer, passes), _train(other, reference, passes), strict=True):
        assert torch.equal(own, expected)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(counting.submitted) == (sorted(3 * names) if is_overridden and hvd.size() > 1 else [])
    assert isinstance(optimizer, torch.optim.SGD)


@pytest.mark.ranks(2)
def test_a_subclass_of_both_trains_as_the_distributed_one():
    counting = _counting()

    class Own(counting, torch.optim.SGD):
        pass

    model, other = _model(), _model()
    groups = torch.optim.SGD(model.parameters(), lr=0.125).param_groups
    reference = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.125), other.named_parameters())
    own = Own(groups, list(model.named_parameters()))
    for one, expected in zip(_train(model, own), _train(other, reference), strict=True):
        assert torch.equal(one, expected)
    assert len(counting.submitted) == 12


@pytest.mark.ranks(2)
def test_the_methods_refuse_a_wrong_order_of_calls():
    model = _model()
    optimizer = _made_of_methods(model, of_methods._DistributedOptimizer)
    model(torch.ones(1, 3).double()).sum().backward()
    with pytest.raises(hvd.StepOrderError, match="prohibited"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        model(torch.ones(1, 3).double()).sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_classes_of_horovod_apply_the_operations():
    rank, everyone = hvd.rank(), hvd.global_process_set
    own = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    reduced = mpi_ops.HorovodAllreduce.apply(own, None, "a", hvd.Sum, 1.0, 1.0, everyone)
    require_tensor(reduced, np.array([3.0, 3.0]))
    reduced.sum().backward()
    require_tensor(own.grad, np.array([2.0, 2.0]))
    own = own.detach()
    for one in mpi_ops.HorovodGroupedAllreduce.apply(None, "b", hvd.Sum, 1.0, 2.0, everyone, own, own):
        require_tensor(one, np.array([6.0, 6.0]))
    gathered = np.array([1.0, 1.0, 2.0, 2.0])
    require_tensor(mpi_ops.HorovodAllgather.apply(own, "c", everyone), gathered)
    require_tensor(mpi_ops.HorovodGroupedAllgather.apply("d", everyone, own)[0], gathered)
    require_tensor(mpi_ops.HorovodBroadcast.apply(own, 1, "e", everyone), np.array([2.0, 2.0]))
    require_tensor(mpi_ops.HorovodAlltoall.apply(own, None, "f", everyone), np.array([1.0, 2.0]))
    require_tensor(mpi_ops.HorovodReducescatter.apply(own, "g", hvd.Sum, everyone, 1.0, 1.0), np.array([3.0]))
    scattered = mpi_ops.HorovodGroupedReducescatter.apply("h", hvd.Sum, everyone, 1.0, 1.0, own)
    require_tensor(scattered[0], np.array([3.0]))


@pytest.mark.ranks(1)
def test_messages_about_hosts_are_in_the_queue_that_horovods_subclasses_use():
    state = hvd.elastic.TorchState(epoch=0)
    state.check_host_updates()
    state._host_messages.put((1.0, 1))
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    state.on_reset()
    state.check_host_updates()
    state.on_hosts_updated(2.0, 1)
    assert state._host_messages.get_nowait() == (2.0, 1)
