"""The checklist of the first step, for arrays: what ranks begin with, compared once.

test_torch_optimizer.py tests it for PyTorch, where it has more to compare, test_mxnet_training.py for MXNet.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from harness.logged import messages

import ringtrain as hvd
from ringtrain.optim import SGD, Adam

WRONG = {
    "parameters": r"begin with different parameters.*call hvd.broadcast_parameters\(params, root_rank=0\)",
    "data": r"have the same gradients in the first step.*for example with data\[hvd.rank\(\) :: hvd.size\(\)\]",
    "learning rate": r"0.001, is the default of Adam.*0.001 \* hvd.size\(\) is usual",
}


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("wrong", [*WRONG, "zeros", None])
def test_the_first_step_says_once_what_is_wrong_and_how_to_mend_it(wrong: str | None) -> None:
    params = [np.zeros(100, np.float32), np.ones((3, 40)) + hvd.rank() * (wrong == "parameters")]
    optimizer = hvd.DistributedOptimizer(Adam() if wrong == "learning rate" else SGD(lr=0.1))
    with messages() as said:
        for step in range(3):
            size = 0 if wrong == "zeros" and step == 0 else 1 if wrong == "data" else 1 + hvd.rank()
            optimizer.step(params, [np.full(one.shape, size, one.dtype) for one in params])
    assert len(said) == (wrong in WRONG and hvd.rank() == 0), said
    assert all(re.search(WRONG[wrong or ""], one) for one in said)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("others", "which"),
    [
        ([1], r"ranks 0-3 begin with different parameters \(rank 1 differs from the others\), "),
        ([0, 1], r"ranks 0-3 begin with different parameters \(as many have one value as another\), "),
    ],
)
def test_the_ranks_that_most_others_differ_from_are_named(others: list[int], which: str) -> None:
    optimizer = hvd.DistributedOptimizer(SGD(lr=0.1))
    with messages() as said:
        optimizer.step([np.full(100, hvd.rank() in others, np.float32)], [np.full(100, hvd.rank(), np.float32)])
    assert len(said) == (hvd.rank() == 0) and all(re.search(which, one) for one in said)


@pytest.mark.ranks(2)
def test_a_rank_of_no_data_and_ranks_outside_of_the_set_take_no_part() -> None:
    of_one = hvd.add_process_set([0])
    with messages() as said:
        optimizer = hvd.DistributedOptimizer(SGD(lr=0.1), process_set=of_one)
        optimizer.step([np.ones(3)], [np.ones(3)])
        if hvd.rank() == 0:
            optimizer = hvd.DistributedOptimizer(SGD(lr=0.1))
            optimizer.step([np.ones(3)], [np.ones(3)])
        hvd.join()
    assert said == []
    hvd.remove_process_set(of_one)


@pytest.mark.ranks(2, 3)
def test_parameters_that_differ_after_join_get_another_remedy() -> None:
    """Ranks that have joined miss the updates of the last step; `broadcast_parameters` before the loop is no remedy."""
    optimizer, params = hvd.DistributedOptimizer(SGD(lr=0.1)), [np.zeros(100)]
    last = hvd.size() - 1
    with messages() as said:
        for _ in range(2):
            for _ in range(2 if hvd.rank() == last else 1):
                optimizer.step(params, [np.full(100, 1.0 + hvd.rank())])
            assert hvd.join() == last
    assert len(said) == (hvd.rank() == 0), said
    assert all("have different parameters by now, as after join()" in one for one in said)
    assert all("hvd.broadcast_parameters(params, root_rank=last) after last = hvd.join()" in one for one in said)
    hvd.broadcast_parameters(params, root_rank=last)
    hvd.check_replicas(params)


CHANGES = {
    "lr": r"the option lr is 0\.1 on ranks? 0(-1)? and 0\.2 on rank [12]\..*ReduceLROnPlateau",
    "state": r"the state of the optimizer is not the same on all ranks.*hvd.broadcast_object\(optimizer.state_dict",
}


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("change", [*CHANGES, None])
def test_ranks_that_update_in_different_ways_are_told_so_once(change: str | None, when: int) -> None:
    params = [np.zeros(100, np.float32), np.ones((3, 40))]
    gradients = [np.full(one.shape, 1 + hvd.rank(), one.dtype) for one in params]
    is_last = hvd.rank() == hvd.size() - 1
    inner = SGD(lr=0.1, momentum=0.5)
    inner.step([one.copy() for one in params], gradients)
    saved = inner.state_dict()
    optimizer = hvd.DistributedOptimizer(SGD(lr=0.1, momentum=0.5))
    with messages() as said:
        for step in range(4):
            if step == when and change == "state" and is_last:
                optimizer.load_state_dict(saved)
            if step == when and change is None:
                optimizer.load_state_dict(hvd.broadcast_object(saved, root_rank=0))
            if step == when and change == "lr" and is_last:
                optimizer.lr = 0.2
            optimizer.step(params, [one.copy() for one in gradients])
    assert len(said) == (change is not None and hvd.rank() == 0), said
    assert all(re.search(CHANGES[change or ""], one) for one in said)


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrong", ["parameters", "state", None])
def test_all_elements_of_parameters_and_states_are_compared(wrong: str | None) -> None:
    params = [np.append(np.zeros(99, np.float32), hvd.rank() * (wrong == "parameters")), np.ones((), "i8")]
    inner = Kept([[np.zeros(99), np.append(np.zeros(99), hvd.rank() * (wrong == "state"))], lambda: None])
    optimizer = hvd.DistributedOptimizer(inner)
    with messages() as said:
        optimizer.step(params, [np.full(100, 1 + hvd.rank(), np.float32), np.ones((), "i8")])
    texts = {"parameters": "begin with different parameters", "state": "the state of the optimizer is not the same"}
    assert len(said) == (wrong is not None and hvd.rank() == 0), said
    assert all(texts[wrong or ""] in one for one in said)


class Kept:
    """An optimizer that does nothing, and has a state."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def step(self, params: Any, gradients: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._state}


@pytest.mark.ranks(2)
def test_names_may_be_in_another_order_on_one_rank() -> None:
    params = {"a": np.zeros(3), "b": np.zeros((2, 2)), "c": np.zeros(1)}
    optimizer = hvd.DistributedOptimizer(SGD(lr=1.0), named_parameters=sorted(params.items(), reverse=hvd.rank() == 1))
    ordered = [params[name] for name in sorted(params, reverse=hvd.rank() == 1)]
    with messages() as said:
        optimizer.step(ordered, [np.full(one.shape, 1.0 + 2 * hvd.rank()) for one in ordered])
    assert said == []
    assert all((one == -2).all() for one in params.values())
