"""The optimizers of the core against ringtrain.optim, bit for bit, and against what MXNet has made of the same."""

import json
from pathlib import Path

import numpy as np
import pytest
from harness.exact import require_equal

from ringtrain import _core
from ringtrain.arrays.numpy import view
from ringtrain.optim import SGD, Adam, AdamW

COUNT = 1021
LR, WD = 0.1, 0.01
MXNET = json.loads((Path(__file__).parent / "mxnet_vectors.json").read_text())
OF_MXNET = [vector for vector in MXNET["vectors"] if vector["dtype"] == "float32"]
TORCH_CASES = [
    ("sgd", SGD, {}),
    ("sgd", SGD, {"momentum": 0.9}),
    ("sgd", SGD, {"momentum": 0.9, "dampening": 0.3}),
    ("sgd", SGD, {"momentum": 0.9, "nesterov": True}),
    ("adam", Adam, {}),
    ("adam", Adam, {"betas": (0.8, 0.99), "eps": 1e-4, "amsgrad": True}),
    ("adamw", AdamW, {}),
    ("adamw", AdamW, {"betas": (0.8, 0.99), "amsgrad": True}),
]


def numbers_of(arguments):
    numbers = {name: float(value) for name, value in arguments.items() if name != "betas"}
    if "betas" in arguments:
        numbers["beta1"], numbers["beta2"] = arguments["betas"]
    return numbers


def update(rule, weight, grad, states, num_update, lr=LR, wd=WD):
    rule.update(view(weight), view(grad), [view(state) for state in states], num_update, lr, wd)


def states_of(rule, weight):
    return [np.zeros_like(weight) for _ in rule.state_names]


@pytest.mark.fast
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("case", TORCH_CASES, ids=lambda case: f"{case[0]}-{'-'.join(case[2])}")
def test_an_update_rule_has_the_bits_of_the_optimizer_in_python(case, weight_decay, dtype):
    name, optimizer_class, arguments = case
    rng = np.random.default_rng(18)
    expected = rng.standard_normal(COUNT).astype(dtype)
    weight = expected.copy()
    optimizer = optimizer_class(lr=LR, weight_decay=weight_decay, **arguments)
    state = optimizer.create_state(0, expected)
    rule = _core.UpdateRule(name, "torch", numbers_of(arguments))
    assert rule.state_names == [name for name in state if name != "step"]
    states = states_of(rule, weight)
    for num_update in range(1, 6):
        grad = rng.standard_normal(COUNT).astype(dtype)
        optimizer.update(0, expected, grad, state)
        update(rule, weight, grad, states, num_update, wd=weight_decay)
        require_equal(weight, expected)
        for name, remembered in zip(rule.state_names, states, strict=True):
            require_equal(remembered, state[name])


@pytest.mark.fast
@pytest.mark.parametrize("vector", OF_MXNET, ids=lambda vector: "-".join([vector["name"], *vector["numbers"]]))
def test_an_update_rule_has_the_bits_of_mxnet(vector):
    numbers = {name: float(value) for name, value in vector["numbers"].items()}
    lr, wd = numbers.pop("learning_rate"), numbers.pop("wd", 0.0)
    rule = _core.UpdateRule(vector["name"], "mxnet", numbers)
    weight = np.array(MXNET["start"], "f4")
    states = states_of(rule, weight)
    for num_update, (gradient, after) in enumerate(zip(MXNET["gradients"], vector["after"], strict=True), 1):
        update(rule, weight, np.array(gradient, "f4"), states, num_update, lr, wd)
        require_equal(weight, np.array(after, "f4"))


@pytest.mark.parametrize("name", sorted({vector["name"] for vector in OF_MXNET}))
@pytest.mark.parametrize("parts", [2, 7])
def test_a_part_of_an_array_needs_nothing_of_the_rest(name, parts):
    rng = np.random.default_rng(5)
    weight, grad = rng.standard_normal((2, COUNT)).astype("f4")
    rule = _core.UpdateRule(name, "mxnet", {})
    states, states_of_parts = states_of(rule, weight), states_of(rule, weight)
    in_parts = weight.copy()
    for num_update in (1, 2):
        update(rule, weight, grad, states, num_update)
        for piece in np.array_split(np.arange(COUNT), parts):
            part = slice(piece[0], piece[-1] + 1)
            update(rule, in_parts[part], grad[part], [state[part] for state in states_of_parts], num_update)
    require_equal(in_parts, weight)


def test_errors_of_an_update_rule_name_the_problem():
    with pytest.raises(ValueError, match=r'no form "keras".*"torch" or "mxnet"'):
        _core.UpdateRule("sgd", "keras", {})
    with pytest.raises(ValueError, match='no optimizer "nag" of the form "torch"; there are sgd, adam, adamw'):
        _core.UpdateRule("nag", "torch", {})
    with pytest.raises(ValueError, match=r'"sgd" of the form "torch" has no number "rescale_grad".*dampening'):
        _core.UpdateRule("sgd", "torch", {"rescale_grad": 1.0})


def test_arrays_that_do_not_fit_an_update_rule_are_refused():
    rule = _core.UpdateRule("sgd", "mxnet", {"momentum": 0.9})
    weight, grad = np.zeros(4, "f4"), np.ones(4, "f4")
    with pytest.raises(ValueError, match="remembers 1 arrays, but it was given 0"):
        update(rule, weight, grad, [], 1)
    with pytest.raises(ValueError, match=r"must have 4 elements of float32, but it is float32\[3\]"):
        update(rule, weight, grad[:3], [np.zeros(4, "f4")], 1)
    with pytest.raises(ValueError, match=r"must have 4 elements of float32, but it is float64\[4\]"):
        update(rule, weight, grad, [np.zeros(4)], 1)
    with pytest.raises(ValueError, match="float32 or float64, not in int32"):
        update(rule, np.zeros(4, "i4"), np.ones(4, "i4"), [np.zeros(4, "i4")], 1)
    with pytest.raises(ValueError, match="counts from 1"):
        update(rule, weight, grad, [np.zeros(4, "f4")], 0)
    with pytest.raises(ValueError, match="not on a GPU"):
        rule.update((*view(weight), 0, 0), view(grad), [view(grad)], 1, LR, WD)
    assert not weight.any()
