"""The optimizers against closed forms: with the same gradient at every step, each has one."""

import math
import pickle

import ml_dtypes
import numpy as np
import pytest

from ringtrain.optim import SGD, Adam, AdamW

START = np.array([1.0, -2.0, 0.5])
GRADIENT = np.array([0.5, -1.0, 2.0])
STEPS = 5


def after_steps(optimizer, gradients):
    weight = START.copy()
    for gradient in gradients:
        optimizer.step([weight], [gradient])
    return weight


def test_sgd_walks_against_the_gradient():
    weight = after_steps(SGD(lr=0.25), [GRADIENT] * STEPS)
    assert np.array_equal(weight, START - 0.25 * STEPS * GRADIENT)


def test_sgd_with_momentum_sums_a_geometric_series():
    momentum = 0.5
    weight = after_steps(SGD(lr=0.25, momentum=momentum), [GRADIENT] * STEPS)
    directions = [(1 - momentum**step) / (1 - momentum) for step in range(1, STEPS + 1)]
    np.testing.assert_allclose(weight, START - 0.25 * sum(directions) * GRADIENT, rtol=1e-14)


def test_sgd_dampens_from_the_second_step_on():
    weight = after_steps(SGD(lr=1, momentum=0.5, dampening=0.25), [GRADIENT] * 2)
    assert np.array_equal(weight, START - GRADIENT - (0.5 + 0.75) * GRADIENT)


def test_sgd_with_nesterov_looks_one_step_ahead():
    weight = after_steps(SGD(lr=1, momentum=0.5, nesterov=True), [GRADIENT] * 2)
    directions = [1, 1.5]
    ahead = [1 + 0.5 * direction for direction in directions]
    assert np.array_equal(weight, START - sum(ahead) * GRADIENT)


def test_sgd_with_weight_decay_shrinks_the_weight():
    weight = after_steps(SGD(lr=0.5, weight_decay=0.25), [np.zeros(3)] * STEPS)
    assert np.array_equal(weight, START * (1 - 0.5 * 0.25) ** STEPS)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_takes_steps_of_lr_when_the_gradient_stays_the_same(amsgrad):
    # Both means are then exactly the gradient and its square once their bias is gone.
    weight = after_steps(Adam(lr=0.01, eps=0.5, amsgrad=amsgrad), [GRADIENT] * STEPS)
    if not amsgrad:
        expected = START - STEPS * 0.01 * GRADIENT / (np.abs(GRADIENT) + 0.5)
        np.testing.assert_allclose(weight, expected, rtol=1e-12)
    else:
        assert np.all(np.sign(START - weight) == np.sign(GRADIENT))


def adam_by_definition(gradients, lr, betas, eps, decoupled=0.0, coupled=0.0, amsgrad=False):
    """Adam with the means written out as sums over all steps so far."""
    weight, seen, largest = START.copy(), [], np.zeros(3)
    for step, gradient in enumerate(gradients, start=1):
        weight = weight * (1 - lr * decoupled)
        seen.append(gradient + coupled * weight)
        ages = range(step - 1, -1, -1)
        mean = (1 - betas[0]) * sum(betas[0] ** age * g for age, g in zip(ages, seen, strict=True))
        square = (1 - betas[1]) * sum(betas[1] ** age * g * g for age, g in zip(ages, seen, strict=True))
        largest = np.maximum(largest, square) if amsgrad else square
        corrected = np.sqrt(largest / (1 - betas[1] ** step))
        weight = weight - lr * mean / (1 - betas[0] ** step) / (corrected + eps)
    return weight


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind, decay", [(Adam, "coupled"), (AdamW, "decoupled")])
def test_adam_follows_its_definition(kind, decay, amsgrad):
    gradients = [GRADIENT * (-0.6) ** step for step in range(STEPS)]  # shrinking, so that amsgrad matters
    how = {"lr": 0.1, "betas": (0.7, 0.9), "eps": 1e-3}
    weight = after_steps(kind(weight_decay=0.3, amsgrad=amsgrad, **how), gradients)
    expected = adam_by_definition(gradients, amsgrad=amsgrad, **{decay: 0.3}, **how)
    np.testing.assert_allclose(weight, expected, rtol=1e-12)


def test_adamw_decays_by_itself_unless_told_otherwise():
    weight = after_steps(AdamW(lr=0.5), [np.zeros(3)])
    np.testing.assert_allclose(weight, START * (1 - 0.5 * 1e-2), rtol=1e-15)


OPTIMIZERS = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    Adam(lr=0.1, amsgrad=True),
    AdamW(lr=0.1),
]
ids = ["sgd", "nesterov", "amsgrad", "adamw"]


def fresh(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=ids)
def test_both_faces_update_alike(optimizer):
    stepped = after_steps(fresh(optimizer), [GRADIENT] * STEPS)
    by_key = fresh(optimizer)
    weight, other = START.copy(), START.copy()
    state, other_state = by_key.create_state(7, weight), by_key.create_state("other", other)
    for _ in range(STEPS):
        by_key.update(7, weight, GRADIENT, state)
        by_key.update(["other"], [other], [GRADIENT], [other_state])
    assert np.array_equal(weight, stepped)
    assert np.array_equal(other, stepped)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=ids)
def test_a_loaded_state_continues_the_same_way(optimizer):
    first = fresh(optimizer)
    weight = after_steps(first, [GRADIENT] * STEPS)
    second = type(optimizer)(lr=123)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    continued = weight.copy()
    first.step([weight], [GRADIENT])
    second.step([continued], [GRADIENT])
    assert np.array_equal(weight, continued)


def test_a_state_dict_is_a_copy():
    optimizer = SGD(lr=0.1, momentum=0.9)
    after_steps(optimizer, [GRADIENT])
    saved = optimizer.state_dict()
    after_steps(optimizer, [GRADIENT])
    assert saved["states"][0]["step"] == 1
    assert np.array_equal(saved["states"][0]["direction"], GRADIENT)


def test_the_state_of_another_optimizer_is_refused():
    with pytest.raises(ValueError, match="are not those of SGD"):
        SGD(lr=0.1).load_state_dict(Adam().state_dict())
    state = SGD(lr=0.1, momentum=0.9).state_dict()
    state["states"] = [{"step": 1}]
    with pytest.raises(ValueError, match=r"must have .*direction"):
        SGD(lr=0.1).load_state_dict(state)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=ids)
def test_low_precision_is_computed_and_remembered_in_float32(optimizer, dtype):
    optimizer = fresh(optimizer)
    weight, gradient = START.astype(dtype), GRADIENT.astype(dtype)
    state = optimizer.create_state(0, weight)
    in_float32 = START.astype(np.float32)
    float32_state = optimizer.create_state(0, in_float32)
    wide = np.float64 if dtype == "float64" else np.float32
    assert all(state[name].dtype == wide for name in state if name != "step")
    optimizer.update(0, weight, gradient, state)
    optimizer.update(0, in_float32, GRADIENT.astype(np.float32), float32_state)
    assert weight.dtype == np.dtype(dtype)
    if wide is np.float32:
        assert np.array_equal(weight, in_float32.astype(dtype))


def test_parameters_without_dimensions_and_without_elements_are_updated():
    number, nothing = np.array(1.0), np.empty((0, 3))
    Adam(lr=0.5, eps=0).step([number, nothing], [np.array(4.0), np.empty((0, 3))])
    assert math.isclose(number, 0.5)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SGD(lr=-1), "lr must not be negative"),
        (lambda: SGD(lr=math.nan), "lr must not be negative"),
        (lambda: SGD(lr=1, momentum=-0.1), "momentum"),
        (lambda: SGD(lr=1, weight_decay=-0.1), "weight_decay"),
        (lambda: SGD(lr=1, nesterov=True), "nesterov needs momentum"),
        (lambda: SGD(lr=1, momentum=0.9, dampening=0.1, nesterov=True), "dampening 0"),
        (lambda: Adam(betas=(0.9, 1.0)), "betas"),
        (lambda: Adam(betas=(-0.1, 0.9)), "betas"),
        (lambda: Adam(eps=-1e-8), "eps"),
        (lambda: AdamW(weight_decay=-1), "weight_decay"),
    ],
)
def test_a_hyperparameter_out_of_range_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_numbers_that_do_not_fit_together_are_refused():
    optimizer = SGD(lr=1)
    with pytest.raises(ValueError, match="1 parameters but 2 gradients"):
        optimizer.step([START.copy()], [GRADIENT, GRADIENT])
    with pytest.raises(ValueError, match=r"parameter 0 has shape \(3,\), but its gradient \(1,\)"):
        optimizer.step([START.copy()], [np.ones(1)])
    with pytest.raises(ValueError, match="2 parameters, but the state is that of 1"):
        optimizer.step([START.copy(), START.copy()], [GRADIENT, GRADIENT])


def test_only_floating_point_arrays_that_can_be_written_are_parameters():
    with pytest.raises(TypeError, match="parameter 0 is int64"):
        SGD(lr=1).step([np.arange(3)], [np.arange(3)])
    with pytest.raises(TypeError, match="parameter 0 is read-only"):
        SGD(lr=1).step([np.float64(1)], [np.float64(1)])
