"""The updates of a store: both forms, masters of 16-bit weights, states and what is refused."""

import json
import pickle
import types

import ml_dtypes
import numpy as np
import pytest
from harness.rooms import TEST_FOLDER

from ringtrain import _core
from ringtrain.kvstore import state_files, update_rules
from ringtrain.kvstore.updaters import updater_for
from ringtrain.optim import SGD, Adam, AdamW

START = np.array([1.0, -2.0, 0.5, 0.0], np.float32)
GRADIENTS = [np.array(values, np.float32) for values in ([0.5, -1, 2, 1], [-0.25, 3, 0, 1], [1, 1, -4, 0.125])]
OF_OPTIM = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9, dampening=0.25),
    Adam(lr=0.1, amsgrad=True, weight_decay=0.1),
    AdamW(lr=0.1, betas=(0.8, 0.9)),
]
IDS = ["sgd", "nesterov", "dampened", "amsgrad", "adamw"]


def updated(updater, weight, gradients=GRADIENTS, key="w"):
    for gradient in gradients:
        updater(key, gradient, weight)
    return weight


def fresh(optimizer):
    return pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("optimizer", OF_OPTIM, ids=IDS)
def test_an_optimizer_of_ringtrain_updates_as_by_itself(optimizer):
    alone, weight = fresh(optimizer), START.copy()
    for gradient in GRADIENTS:
        alone.step([weight], [gradient])
    given = fresh(optimizer)
    assert np.array_equal(updated(updater_for(given), START.copy()), weight)
    assert given.state_dict()["states"] == []  # the store keeps the state, not the object


def test_the_store_takes_the_numbers_when_the_optimizer_is_given():
    optimizer = SGD(lr=1.0)
    updater = updater_for(optimizer)
    optimizer.lr = 100.0
    assert np.array_equal(updated(updater, START.copy(), GRADIENTS[:1]), START - GRADIENTS[0])


def test_keys_have_states_of_their_own():
    updater = updater_for(SGD(lr=1.0, momentum=0.5))
    first, second = START.copy(), START.copy()
    updated(updater, first, GRADIENTS[:2], "first")
    updated(updater, second, GRADIENTS[:1], "second")
    assert np.array_equal(second, START - GRADIENTS[0])


def test_a_name_has_the_formula_of_mxnet():
    # torch keeps the sum of gradients and multiplies by lr later, so a change of lr shows the difference
    updater, weight = updater_for("sgd", {"learning_rate": 1.0, "momentum": 0.5}), START.copy()
    updater("w", GRADIENTS[0], weight)
    updater.change(lr=0.0)
    updater("w", GRADIENTS[1], weight)
    assert np.array_equal(weight, START - GRADIENTS[0] - 0.5 * GRADIENTS[0])
    of_torch, weight = updater_for(SGD(lr=1.0, momentum=0.5)), START.copy()
    of_torch("w", GRADIENTS[0], weight)
    of_torch.change(lr=0.0)
    of_torch("w", GRADIENTS[1], weight)
    assert np.array_equal(weight, START - GRADIENTS[0])


def test_rates_have_factors_by_key():
    updater = updater_for("sgd", {"learning_rate": 1.0, "wd": 1.0, "lr_mult": {0: 0.5}, "wd_mult": {"1": 0.0}})
    nothing = np.zeros(4, np.float32)
    assert np.array_equal(updated(updater, START.copy(), [nothing], "0"), START / 2)
    assert np.array_equal(updated(updater, START.copy(), [nothing], "1"), START)
    assert np.array_equal(updated(updater, START.copy(), [nothing], "2"), nothing)


def test_the_weight_decay_of_mxnet_spares_what_its_names_say():
    names = {0: "dense0_weight", 1: "dense0_bias"}
    updater = updater_for("sgd", {"learning_rate": 1.0, "wd": 1.0, "param_idx2name": names})
    nothing = np.zeros(4, np.float32)
    assert np.array_equal(updated(updater, START.copy(), [nothing], "0"), nothing)
    assert np.array_equal(updated(updater, START.copy(), [nothing], "1"), START)


def test_a_schedule_sees_the_updates_of_the_key_with_the_most():
    seen = []
    updater = updater_for("sgd", {"lr_scheduler": lambda num_update: seen.append(num_update) or 0.5})
    for key in ("a", "a", "b", "a"):
        updater(key, GRADIENTS[0], START.copy())
    assert seen == [1, 2, 2, 3]


def test_a_schedule_of_mxnet_begins_at_the_learning_rate():
    schedule = types.SimpleNamespace(base_lr=0.01)
    with pytest.raises(ValueError, match="must be a function"):
        updater_for("sgd", {"lr_scheduler": schedule, "learning_rate": 0.5})
    assert schedule.base_lr == 0.5
    with pytest.raises(ValueError, match="give one of them"):
        updater_for("sgd", {"lr_scheduler": lambda num_update: 0.5, "learning_rate": 0.5})


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", OF_OPTIM, ids=IDS)
def test_weights_of_16_bits_have_a_float32_master(optimizer, dtype):
    weight, wide = START.astype(dtype), START.copy()
    updated(updater := updater_for(fresh(optimizer)), weight)
    updated(updater_for(fresh(optimizer)), wide)
    assert np.array_equal(weight, wide.astype(dtype))
    assert np.array_equal(updater.states()["w/master"], wide)


def test_small_updates_of_16_bits_add_up():
    weight = np.ones(1, np.float16)
    updated(updater_for(SGD(lr=1.0)), weight, [np.full(1, -(2.0**-13), np.float32)] * 16)
    assert weight[0] == 1 + 2.0**-9


def test_a_master_follows_a_value_that_was_replaced():
    updater, weight = updater_for(SGD(lr=1.0)), START.astype(np.float16)
    updater("w", GRADIENTS[0], weight)
    weight[...] = START
    updater.replaced("w", weight)
    updater("w", GRADIENTS[1], weight)
    assert np.array_equal(weight, (START - GRADIENTS[1]).astype(np.float16))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("optimizer", [*OF_OPTIM, "adam", "rmsprop"], ids=[*IDS, "mxnet-adam", "mxnet-rmsprop"])
def test_loaded_states_continue_the_same_way(optimizer, dtype, tmp_path):
    make = (lambda: updater_for(optimizer)) if isinstance(optimizer, str) else (lambda: updater_for(fresh(optimizer)))
    first = make()
    weight = updated(first, START.astype(dtype))
    state_files.save(tmp_path / "states.npz", first.states(), first.configuration())
    saved = state_files.load(tmp_path / "states.npz")
    assert saved.configuration == json.loads(json.dumps(first.configuration()))
    second, continued = make(), weight.copy()
    second.load_states(saved.arrays)
    assert second.states().keys() == first.states().keys()  # also before the first update
    assert np.array_equal(updated(second, continued), updated(first, weight))


class Lazy:
    """Of the kind that a script writes; its state has all that may be in one."""

    def __init__(self, lr=0.5):
        self.lr = lr

    def create_state(self, key, weight):
        return {"calls": 0, "pair": (np.zeros_like(weight), None), "list": [0.0]}

    def update(self, key, weight, grad, state):
        state["calls"] += 1
        state["list"][0] += 1.0
        state["pair"][0][...] += grad
        weight -= self.lr * state["pair"][0] / state["calls"]


def test_any_object_with_the_two_methods_updates():
    updater, weight = updater_for(Lazy()), START.copy()
    assert not updater.is_built_in
    updater("w", GRADIENTS[0], weight)
    assert np.array_equal(weight, START - 0.5 * GRADIENTS[0])
    updater.change(lr=0.0)
    updater("w", GRADIENTS[0], weight)
    assert np.array_equal(weight, START - 0.5 * GRADIENTS[0])
    assert updater.configuration() == {"optimizer": f"{__name__}.Lazy", "lr": 0.0}
    with pytest.raises(ValueError, match="Lazy has no attribute momentum"):
        updater.change(momentum=0.5)


def test_the_state_of_any_object_is_saved_and_loaded(tmp_path):
    first, weight = updater_for(Lazy()), START.copy()
    updated(first, weight)
    state_files.save(tmp_path / "states.npz", first.states())
    second, continued = updater_for(Lazy()), weight.copy()
    second.load_states(state_files.load(tmp_path / "states.npz").arrays)
    assert np.array_equal(updated(second, continued), updated(first, weight))
    assert second.states()["w/calls"] == 6


def test_a_state_that_cannot_be_kept_is_refused():
    class Strange(Lazy):
        def create_state(self, key, weight):
            return {"words": "no array", "calls": 0, "pair": (np.zeros_like(weight), None), "list": [0.0]}

    updater = updater_for(Strange())
    updated(updater, START.copy())
    with pytest.raises(TypeError, match="keeps a str as words"):
        updater.states()


def test_states_of_another_optimizer_are_refused_and_nothing_changes():
    updater, weight = updater_for("sgd", {"learning_rate": 1.0, "momentum": 0.5}), START.copy()
    updater("w", GRADIENTS[0], weight)
    other = updater_for(Adam())
    updated(other, START.copy())
    with pytest.raises(ValueError, match="sgd remembers momentum: it is that of another optimizer"):
        updater.load_states(other.states())
    with pytest.raises(ValueError, match='"w" is not the name of a state'):
        updater.load_states({"w": START})
    assert np.array_equal(updater.states()["w/momentum"], -GRADIENTS[0])


def test_a_loaded_state_of_another_shape_is_refused():
    updater = updater_for("sgd", {"momentum": 0.5})
    updater.load_states({"w/num_update": np.int64(3), "w/momentum": np.zeros(7, np.float32)})
    with pytest.raises(
        ValueError, match=r'"momentum" of key "w" has shape \(4,\), but that of its loaded state \(7,\)'
    ):
        updater("w", GRADIENTS[0], START.copy())


def test_numbers_that_change_the_states_cannot_be_changed():
    updater = updater_for("sgd", {"learning_rate": 1.0})
    with pytest.raises(ValueError, match="use set_optimizer"):
        updater.change(momentum=0.5)
    with pytest.raises(ValueError, match="sgd has no argument beta1"):
        updater.change(beta1=0.5)
    with pytest.raises(ValueError, match="must not be negative"):
        updater_for(SGD(lr=1.0)).change(lr=-1.0)
    with pytest.raises(ValueError, match="has an lr_scheduler"):
        updater_for("sgd", {"lr_scheduler": float}).change(lr=1.0)


@pytest.mark.parametrize(
    "optimizer, numbers, error, message",
    [
        ("lamb", {}, ValueError, 'no optimizer "lamb" in the store; it knows sgd, nag'),
        ("sgd", {"lr": 0.1}, ValueError, "sgd has no argument lr; .* come with the optimizers of ringtrain.optim"),
        ("sgd", {"beta1": 0.1}, ValueError, "sgd has no argument beta1"),
        ("adam", {"beta1": "0.9"}, ValueError, "beta1 of adam must be a number"),
        ("adam", {"epsilon": float("nan")}, ValueError, "epsilon of adam must be a number"),
        ("sgd", {"momentum": -0.5}, ValueError, "must not be negative"),
        ("sgd", {"clip_gradient": 0}, ValueError, "None is without"),
        pytest.param(SGD(lr=0.1), {"momentum": 0.9}, ValueError, "not an object", id="an SGD object"),
        (SGD, {}, TypeError, "cannot update with SGD"),
        (3, {}, TypeError, r"an object with create_state\(key, weight\)"),
    ],
    ids=str,
)
def test_unknown_optimizers_and_numbers_are_refused(optimizer, numbers, error, message):
    with pytest.raises(error, match=message):
        updater_for(optimizer, numbers)


def test_only_arrays_that_fit_are_updated():
    updater = updater_for(SGD(lr=1.0))
    with pytest.raises(ValueError, match=r'key "w" has shape \(4,\), but its gradient \(3,\)'):
        updater("w", np.zeros(3, np.float32), START.copy())
    with pytest.raises(TypeError, match='key "w" is int64'):
        updater("w", np.arange(3), np.arange(3))
    still = START.copy()
    still.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        updater("w", GRADIENTS[0], still)


def mxnet_optimizer(kind, **attributes):
    """As MXNet 1.9.1 has it: its attributes, under the name of its module and class."""
    common = {"rescale_grad": 1.0, "lr_scheduler": None, "lr": 0.1, "wd": 0.0, "lr_mult": {}, "wd_mult": {}}
    common |= {"begin_num_update": 0, "num_update": 0, "clip_gradient": None, "multi_precision": False}
    common |= {"aggregate_num": 4, "idx2name": {}, "sym_info": (), "param_dict": {}, "allow_np_array": False}
    class_of_mxnet = type(kind, (), {"__module__": "mxnet.optimizer.optimizer"})
    optimizer = class_of_mxnet()
    vars(optimizer).update(common | {"_index_update_count": {}} | attributes)
    return optimizer


def test_an_optimizer_of_mxnet_is_known_by_its_attributes():
    parameters = {0: types.SimpleNamespace(lr_mult=0.5, wd_mult=1.0)}
    given = mxnet_optimizer("SGD", momentum=0.5, lazy_update=True, lr=1.0, param_dict=parameters)
    by_name = updater_for("sgd", {"learning_rate": 1.0, "momentum": 0.5, "lr_mult": {0: 0.5}})
    weights = [updated(updater, START.copy(), key="0") for updater in (updater_for(given), by_name)]
    assert np.array_equal(*weights)
    history = mxnet_optimizer("AdaGrad", float_stable_eps=0.5)
    by_name = updater_for("adagrad", {"learning_rate": 0.1, "eps": 0.5})
    assert np.array_equal(updated(updater_for(history), START.copy()), updated(by_name, START.copy()))


def test_an_optimizer_of_mxnet_with_something_unknown_is_refused():
    with pytest.raises(ValueError, match="sgd has no argument warmup"):
        updater_for(mxnet_optimizer("SGD", momentum=0.5, lazy_update=True, warmup=3))
    with pytest.raises(TypeError, match="cannot run MXNet's LAMB"):
        updater_for(mxnet_optimizer("LAMB"))


def test_names_of_keys_may_be_anything(tmp_path):
    updater = updater_for(SGD(lr=1.0, momentum=0.5))
    for key in ("a/b/c", "../w", "file", "ключ", "0"):
        updater(key, GRADIENTS[0], START.copy())
    state_files.save(tmp_path / "states.npz", updater.states())
    loaded = state_files.load(tmp_path / "states.npz").arrays
    assert loaded.keys() == updater.states().keys()
    assert all(np.array_equal(loaded[name], array) for name, array in updater.states().items())


def test_values_of_every_dtype_are_saved(tmp_path):
    arrays = {f"{name}/value": np.arange(5).astype(name) for name in ("float16", "int8", "float64", "bool", "bfloat16")}
    state_files.save(tmp_path / "values.npz", arrays)
    loaded = state_files.load(tmp_path / "values.npz").arrays
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array)


def test_a_file_is_always_whole(tmp_path):
    path = tmp_path / "values.npz"
    state_files.save(path, {"a/value": START})
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        state_files.save(path, {"a/value": np.array([None])})
    assert np.array_equal(state_files.load(path).arrays["a/value"], START)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(b"nothing of ours")
    with pytest.raises(ValueError, match=r"other was not written by a store"):
        state_files.load(path)
    np.savez(tmp_path / "other.npz", value=START)
    with pytest.raises(ValueError, match="was not written by a store"):
        state_files.load(tmp_path / "other.npz")
    np.savez(tmp_path / "pickled.npz", head=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="was not written by a store"):
        state_files.load(tmp_path / "pickled.npz")
    with pytest.raises(FileNotFoundError):
        state_files.load(tmp_path / "nothing")


MXNET = json.loads((TEST_FOLDER / "training" / "mxnet_vectors.json").read_text())


OF_MXNET = pytest.mark.parametrize("case", MXNET["vectors"], ids=lambda case: f"{case['name']}-{case['numbers']}")


@OF_MXNET
def test_updates_are_those_of_mxnet(case):
    """The vectors are what MXNet 1.9.1 computed, made by mxnet_vectors.py."""
    updater = updater_for(case["name"], case["numbers"])
    weight = np.array(MXNET["start"], case["dtype"])
    for gradient, after in zip(MXNET["gradients"], case["after"], strict=True):
        updater("w", np.array(gradient, np.float32), weight)
        assert np.array_equal(weight, np.array(after, case["dtype"]))


def updated_by_formula(recipe, start, gradients):
    """As on a GPU, where the kernels of the core do not reach."""
    formula, weight = update_rules.formula_of(recipe), start.copy()
    remembered = [np.zeros_like(weight) for _ in formula.state_names]
    for number, gradient in enumerate(gradients, start=1):
        formula.update(weight, gradient, remembered, update_rules.Rates(number, recipe.lr, recipe.wd))
    return weight


@OF_MXNET
def test_the_formulas_for_gpus_are_those_of_mxnet(case):
    """They are made of whole steps, and round in other places."""
    recipe = update_rules.from_name(case["name"], case["numbers"])
    assert update_rules.formula_of(recipe).state_names == tuple(_core.UpdateRule(*rule_of(recipe)).state_names)
    gradients = [np.array(gradient, np.float32) for gradient in MXNET["gradients"]]
    weight = updated_by_formula(recipe, np.array(MXNET["start"], np.float32), gradients)
    np.testing.assert_allclose(weight, case["after"][-1], rtol=1e-3 if case["dtype"] == "float16" else 5e-7, atol=5e-7)


def updated_tensor(recipe):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    formula, weight = update_rules.formula_of(recipe), torch.from_numpy(START.copy())
    remembered = [torch.zeros_like(weight) for _ in formula.state_names]
    for number, gradient in enumerate(GRADIENTS, start=1):
        rates = update_rules.Rates(number, recipe.lr, recipe.wd)
        formula.update(weight, torch.from_numpy(gradient), remembered, rates)
    return weight.numpy()


@OF_MXNET
def test_the_formulas_for_gpus_take_tensors(case):
    recipe = update_rules.from_name(case["name"], case["numbers"])
    np.testing.assert_allclose(updated_tensor(recipe), updated_by_formula(recipe, START, GRADIENTS), rtol=1e-6)


@pytest.mark.parametrize("optimizer", OF_OPTIM, ids=IDS)
def test_the_formulas_for_gpus_that_are_ringtrains_take_tensors(optimizer):
    recipe = update_rules.from_optim(optimizer)
    np.testing.assert_allclose(updated_tensor(recipe), updated_by_formula(recipe, START, GRADIENTS), rtol=1e-6)


@pytest.mark.parametrize("optimizer", OF_OPTIM, ids=IDS)
def test_the_formulas_for_gpus_are_those_of_ringtrain(optimizer):
    recipe = update_rules.from_optim(optimizer)
    assert update_rules.formula_of(recipe).state_names == tuple(_core.UpdateRule(*rule_of(recipe)).state_names)
    weight = updated_by_formula(recipe, START, GRADIENTS)
    assert np.array_equal(weight, updated(updater_for(fresh(optimizer)), START.copy()))


def rule_of(recipe):
    return recipe.name, recipe.form, recipe.numbers
