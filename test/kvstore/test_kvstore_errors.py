"""Mistakes with stores: an error on the caller's line, or on every worker, and afterwards everything works."""

import os
import re
import time

import numpy as np
import pytest

import ringtrain as hvd
from ringtrain import kvstore

BOTH = ["local", "dist_sync"]


def started(kind="dist_sync", dtype="float32"):
    kv = kvstore.create(kind)
    kv.init("a", np.zeros((2, 3), dtype))
    return kv


def ones(*shape, dtype="float32"):
    return np.ones(shape or (2, 3), dtype)


def read_only():
    array = ones()
    array.flags.writeable = False
    return array


# The call, the error, and its text.
MISTAKES = [
    (lambda kv: kv.init("a", ones()), ValueError, "init: key 'a' has a value already"),
    (lambda kv: kv.init(["b", "b"], [ones(), ones()]), ValueError, "init: key 'b' comes with 2 values"),
    (lambda kv: kv.init("b", [ones(), ones()]), ValueError, "init: key 'b' comes with 2 values"),
    (lambda kv: kv.init("b", []), ValueError, "init: key 'b' has no value in this call"),
    (lambda kv: kv.init(3, ones()), TypeError, "init: mixed key types: 3 is int, but this store has str keys"),
    (lambda kv: kv.init(["b", 3], [ones(), ones()]), TypeError, "init: mixed key types"),
    (lambda kv: kv.init(1.5, ones()), TypeError, "init: a key is an int or a str, not float 1.5"),
    (lambda kv: kv.init(True, ones()), TypeError, "init: a key is an int or a str, not bool True"),
    (lambda kv: kv.init("b", "text"), TypeError, "cannot send a str"),
    (lambda kv: kv.init("b", np.array(["x"])), TypeError, "cannot send dtype"),
    (lambda kv: kv.push("b", ones()), KeyError, "push: key 'b' has no value; give it one with init or broadcast"),
    (lambda kv: kv.push(3, ones()), TypeError, "push: mixed key types"),
    (lambda kv: kv.push("a", ones(3, 2)), ValueError, r"push: key 'a' has shape \(2, 3\), but the value has \(3, 2\)"),
    (lambda kv: kv.push("a", [ones(), ones(6)]), ValueError, r"push: key 'a' has shape \(2, 3\)"),
    (lambda kv: kv.push("a", ones(dtype="float64")), ValueError, "push: key 'a' is float32, but the value is float64"),
    (lambda kv: kv.push("a", ones(dtype="float16")), ValueError, "push: key 'a' is float32, but the value is float16"),
    (
        lambda kv: kv.push(["a", "a"], [ones()]),
        ValueError,
        "list of 2 keys takes a list of as many values, not 1 values",
    ),
    (
        lambda kv: kv.push(["a", "a"], ones()),
        ValueError,
        "list of 2 keys takes a list of as many values, not one value",
    ),
    (lambda kv: kv.pull("b", out=ones()), KeyError, "pull: key 'b' has no value"),
    (lambda kv: kv.pull("b"), KeyError, "pull: key 'b' has no value"),
    (lambda kv: kv.pull("a", out=ones(6)), ValueError, r"pull: key 'a' has shape \(2, 3\), but out has \(6,\)"),
    (lambda kv: kv.pull("a", out=read_only()), ValueError, "read-only"),
    (lambda kv: kv.pull("a", out=[]), ValueError, "pull: key 'a' has no value in this call"),
    (lambda kv: kv.pushpull("b", ones()), KeyError, "pushpull: key 'b' has no value"),
    (
        lambda kv: kv.pushpull("a", ones(), out=ones(5)),
        ValueError,
        r"pushpull: key 'a' has shape .* but out has \(5,\)",
    ),
    (lambda kv: kv.pushpull("a", read_only()), ValueError, "read-only"),
    (lambda kv: kv.broadcast("a", ones(5), ones()), ValueError, r"broadcast: key 'a' has shape \(2, 3\)"),
    (lambda kv: kv.wait("b"), KeyError, "wait: key 'b' has no value"),
    (lambda kv: kv.set_optimizer("no such"), ValueError, "no such"),
    (lambda kv: kv.set_optimizer("sgd", no_such=1), ValueError, "no_such"),
    (lambda kv: kv.set_optimizer(object()), TypeError, "cannot update with"),
    (lambda kv: kv.set_updater("f"), TypeError, "set_updater takes a function"),
    (lambda kv: kv.update_optimizer(lr=1), ValueError, "update_optimizer: the store has no optimizer"),
    (lambda kv: kv.save_optimizer_states("f"), ValueError, "save_optimizer_states: the store has no optimizer"),
    (lambda kv: kv.load_optimizer_states("f"), ValueError, "load_optimizer_states: the store has no optimizer"),
    (lambda kv: kv.load("/no/such/file"), OSError, "No such file"),
    (lambda kv: kv.row_sparse_pull("a", out=ones(), row_ids=[1]), TypeError, "out is a RowSparse or a sparse_coo"),
    (lambda kv: kv.row_sparse_pull("a", row_ids=[2]), ValueError, "key 'a' has rows 0 to 1, not 2 to 2"),
    (
        lambda kv: kv.push("a", [kvstore.RowSparse([0], np.ones((1, 3), np.float32)), ones()]),
        ValueError,
        "has both rows and whole values",
    ),
    (lambda kv: kv.send_command_to_servers(20, "x"), ValueError, "there are no servers"),
    (lambda kv: kv.is_capable("flying"), ValueError, 'unknown capability "flying"'),
    (
        lambda kv: kv.set_gradient_compression({"type": "3bit"}),
        ValueError,
        'must be one of 2bit, 1bit, fp16, bf16, not "3bit"',
    ),
    (lambda kv: kv.set_gradient_compression("2bit"), ValueError, "takes a dict"),
    (
        lambda kv: kv.set_gradient_compression({"type": "2bit", "threshold": 0}),
        ValueError,
        "must be positive, but is 0",
    ),
    (
        lambda kv: kv.set_gradient_compression({"type": "1bit", "threshold": float("inf")}),
        ValueError,
        "must be finite, but is inf",
    ),
    (lambda kv: kv.set_gradient_compression({"type": "fp16", "threshold": 1}), ValueError, "does not take threshold"),
    (lambda kv: kv.set_gradient_compression({"type": "2bit", "x": 1}), ValueError, "does not take x"),
]


@pytest.mark.fast
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", BOTH)
def test_a_mistake_is_told_on_its_line_and_changes_nothing(kind):
    kv = started(kind)
    for call, error, message in MISTAKES:
        with pytest.raises(error, match=message):
            call(kv)
    kv.push("a", ones())
    assert (kv.pull("a") == kv.num_workers).all()
    kv.init("b", ones())
    assert (kv.pull("b") == 1).all()


def test_names_that_are_no_types():
    for name, error, message in [
        ("no such", ValueError, 'there is no type "no such" of store; there are local, .*dist_sync'),
        (5, TypeError, "the name of a store is a str"),
    ]:
        with pytest.raises(error, match=message):
            kvstore.create(name)
    with pytest.raises(ValueError, match='"local" store adds up; average=True is for "horovod"'):
        kvstore.create("local", average=True)
    with pytest.raises(
        ValueError, match='max_staleness, elastic and atomic are for "dist_async" stores, not for a "local" one'
    ):
        kvstore.create("local", max_staleness=1)
    with pytest.raises(ValueError, match='atomic are for "dist_async" stores, not for a "dist_sync" one'):
        kvstore.create("dist_sync", atomic=True)
    with pytest.raises(ValueError, match="max_staleness is a number of pushes from 0 on, or None, not -1"):
        kvstore.create("dist_async", max_staleness=-1)
    with pytest.raises(ValueError, match='a "local" store sends nothing, so there is nothing to compress'):
        kvstore.create("local").set_gradient_compression({"type": "2bit"})


@pytest.mark.ranks(2)
def test_a_store_that_only_adds_up_takes_no_optimizer():
    kv = kvstore.create("horovod")
    for call in (lambda: kv.set_optimizer("sgd"), lambda: kv.set_updater(print)):
        with pytest.raises(ValueError, match='a "horovod" store only adds up'):
            call()


@pytest.mark.fast
@pytest.mark.ranks(1, 2)
def test_a_value_that_pushpull_has_put_elsewhere_cannot_be_pulled():
    kv = started()
    out = ones()
    kv.pushpull("a", out)
    assert (out == kv.num_workers).all()
    for call in (lambda: kv.pull("a"), lambda: kv.pull("a", out=out), lambda: kv.save("f")):
        with pytest.raises(ValueError, match="key 'a': pushpull without an updater has put its value into `out`"):
            call()
    kv.push("a", ones())
    assert (kv.pull("a") == kv.num_workers).all()
    kv.pushpull("a", [ones(), ones()], out=[out, out])
    for set_up in (lambda: kv.set_updater(print), lambda: kv.set_optimizer("sgd")):
        set_up()
        with pytest.raises(ValueError, match="key 'a': pushpull without an updater has put its value into `out`"):
            kv.push("a", ones())
    kv.broadcast("a", ones(), out)
    assert (kv.pull("a") == 1).all()


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_workers_that_give_a_key_different_values_hear_of_it(what):
    kv = started()
    is_last = kv.rank == kv.num_workers - 1
    wrong = ones(5) if what == "shape" else ones(4, dtype="float64")
    kv.init("b", wrong if is_last else ones(4))
    with pytest.raises(hvd.MismatchError, match=r'broadcast "kv/\d+/b".*' + re.escape("float32[4]")):
        kv.pull("b")
    kv.init("b", ones())
    assert (kv.pull("b") == 1).all()


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
def test_workers_that_set_up_different_things_hear_of_it():
    kv = started()
    with pytest.raises(hvd.MismatchError, match=r"set_optimizer: rank 0 has .*momentum=?.*rank \d"):
        kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9 if kv.rank == 0 else 0.5)
    kv.set_optimizer("sgd", learning_rate=0.1)
    with pytest.raises(hvd.MismatchError, match="update_optimizer: rank 0 has learning_rate=0, rank 1 has"):
        kv.update_optimizer(learning_rate=kv.rank)
    other = kvstore.create("dist_sync")
    with pytest.raises(hvd.MismatchError, match=r"set_gradient_compression: rank 0 has threshold=1\.0, rank 1 has"):
        other.set_gradient_compression({"type": "2bit", "threshold": kv.rank + 1})


@pytest.mark.ranks(2)
def test_workers_that_push_different_dtypes_hear_of_it_and_go_on():
    kv = started(dtype="float16")
    kv.push("a", ones(dtype="float16" if kv.rank else "float32"))
    with pytest.raises(hvd.MismatchError, match=r"float16.*float32|float32.*float16"):
        kv.pull("a")
    kv.push("a", ones(dtype="float16"))
    assert (kv.pull("a") == 2).all()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", BOTH)
def test_an_error_in_an_updater_comes_to_who_waits_for_the_update(kind):
    kv = started(kind)

    def update(key, total, stored):
        if total[0, 0] < 0:
            raise ArithmeticError("too small")
        stored += total

    kv.set_updater(update)
    with pytest.raises(ArithmeticError, match="too small"):
        kv.push("a", -ones())
        kv.pull("a")
    kv.push("a", ones())
    assert (kv.pull("a") == kv.num_workers).all()


@pytest.mark.ranks(2, env={"RINGTRAIN_STALL_WARNING_TIME_S": "0.2", "RINGTRAIN_STALL_SHUTDOWN_TIME_S": "1"})
def test_a_key_that_only_some_workers_have_does_not_keep_them_for_ever():
    kv = started()
    if kv.rank == 0:
        kv.init("b", ones())
        with pytest.raises((hvd.StalledError, hvd.DeadlockError), match=r"kv/\d+/b"):
            kv.pull("b")
    else:
        time.sleep(1.5)  # the other one waits for 1 s, and then for as long again
    kv.push("a", ones())
    assert (kv.pull("a") == 2).all()


@pytest.mark.ranks(2)
def test_a_forked_child_is_told_what_it_is():
    kv = started()
    kv.wait()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            kv.push("a", ones())
        except hvd.NotInitializedError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as said:
        assert said.read().startswith("this process was forked from a rank of ringtrain")
    kv.push("a", ones())
    assert (kv.pull("a") == hvd.size()).all()


@pytest.mark.ranks(2, initialised=False)
def test_a_store_belongs_to_the_ranks_that_have_made_it():
    kv = started()  # init() is called by create
    assert hvd.size() == kv.num_workers == 2
    kv.barrier()  # init() has not waited for the other rank
    hvd.shutdown()
    hvd.init()
    for call in (lambda: kv.push("a", ones()), lambda: kv.pull("a"), kv.wait, kv.barrier):
        with pytest.raises(hvd.NotInitializedError, match='this "dist_sync" store was made before the last init'):
            call()
    again = started()
    again.push("a", ones())
    assert (again.pull("a") == 2).all()
