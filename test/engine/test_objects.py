"""Objects and trees of parameters between the ranks."""

import pickle

import numpy as np
import pytest

import ringtrain as hvd


class Unpicklable:
    def __reduce__(self):
        raise pickle.PicklingError("not me")


@pytest.mark.ranks(1, 2, 3, 4)
def test_every_rank_has_the_object_of_the_root():
    for root in range(hvd.size()):
        mine = {"rank": hvd.rank(), "words": ["a"] * hvd.rank()}
        assert hvd.broadcast_object(mine, root_rank=root) == {"rank": root, "words": ["a"] * root}


@pytest.mark.ranks(2, 3)
def test_only_the_root_needs_an_object():
    mine = np.arange(100_000) if hvd.rank() == 1 else None
    assert np.array_equal(hvd.broadcast_object(mine, root_rank=1, name="only the root"), np.arange(100_000))


@pytest.mark.ranks(1, 2)
def test_the_root_keeps_its_own_object():
    mine = [hvd.rank()]
    received = hvd.broadcast_object_fn(root_rank=0, name="own")(mine)
    assert received == [0]
    assert (received is mine) == (hvd.rank() == 0)


@pytest.mark.ranks(2, 3)
def test_an_object_that_cannot_be_pickled_fails_on_every_rank():
    error, message = (pickle.PicklingError, "not me") if hvd.rank() == 0 else (RuntimeError, "rank 0 could not pickle")
    with pytest.raises(error, match=message):
        hvd.broadcast_object(Unpicklable())
    with pytest.raises(RuntimeError, match=r"ranks \[1\] could not pickle"):
        hvd.allgather_object(Unpicklable() if hvd.rank() == 1 else "fine")
    assert hvd.broadcast_object("still alive") == "still alive"


class OfTheScript:
    pass


@pytest.mark.ranks(1, 2)
def test_lambdas_and_local_classes_travel_with_cloudpickle():
    pytest.importorskip("cloudpickle")

    class Local:
        value = hvd.rank()

    received = hvd.broadcast_object((lambda x: x + 1, Local()), root_rank=hvd.size() - 1)
    assert received[0](1) == 2 and received[1].value == hvd.size() - 1
    assert [one.value for one in hvd.allgather_object(Local)] == list(range(hvd.size()))


@pytest.mark.ranks(2)
def test_an_instance_is_one_of_the_receivers_class():
    assert isinstance(hvd.broadcast_object(OfTheScript()), OfTheScript)


@pytest.mark.ranks(1, 2, 3, 4)
def test_objects_are_gathered_in_the_order_of_the_ranks():
    mine = {"rank": hvd.rank()} if hvd.rank() % 2 else "x" * hvd.rank() * 1000
    gathered = hvd.allgather_object(mine)
    assert gathered == [{"rank": rank} if rank % 2 else "x" * rank * 1000 for rank in range(hvd.size())]


@pytest.mark.ranks(1, 2, 3, 4)
def test_parameters_of_a_nested_tree_become_those_of_the_root():
    root = hvd.size() - 1
    parameters = tree_of(hvd.rank())
    matrix = parameters["encoder"][0]["weight"]
    hvd.broadcast_parameters(parameters, root_rank=root)
    expected = tree_of(root)
    assert parameters["encoder"][0]["weight"] is matrix
    assert np.array_equal(matrix, expected["encoder"][0]["weight"])
    assert np.array_equal(parameters["encoder"][1], expected["encoder"][1])
    assert parameters["scale"].shape == ()
    assert parameters["scale"] == root


def tree_of(rank):
    return {
        "scale": np.array(float(rank)),
        "encoder": (
            {"weight": np.arange(6.0).reshape(2, 3) + 10 * rank},
            np.full(4, rank, dtype=np.int32),
            np.empty((0, 2), dtype=np.float32),
        ),
    }


@pytest.mark.ranks(1, 2, 3)
def test_a_list_of_arrays_and_a_list_of_pairs_are_broadcast():
    arrays = [np.full(3, float(hvd.rank())), np.full(2, hvd.rank() + 1)]
    hvd.broadcast_parameters(arrays, root_rank=0, prefix="list")
    assert arrays[0].tolist() == [0, 0, 0]
    assert arrays[1].tolist() == [1, 1]
    pairs = [("a", np.full(3, float(hvd.rank()))), ("b", np.full(2, hvd.rank() + 1))]
    hvd.broadcast_parameters(iter(pairs))
    assert [array.tolist() for _, array in pairs] == [[0, 0, 0], [1, 1]]


@pytest.mark.ranks(1, 2, 3)
def test_the_order_of_a_dict_may_differ_between_the_ranks():
    names = ["a", "b", "c"] if hvd.rank() % 2 else ["c", "b", "a"]
    parameters = {name: np.full(2, ord(name) + hvd.rank()) for name in names}
    hvd.broadcast_parameters(parameters)
    assert all(parameters[name].tolist() == [ord(name)] * 2 for name in names)


@pytest.mark.ranks(1, 2, 3)
def test_an_array_that_is_not_contiguous_is_broadcast_in_place():
    whole = np.full((4, 6), float(hvd.rank()))
    hvd.broadcast_parameters({"transposed": whole.T[1:3], "strided": whole[3, ::2]})
    expected = np.full((4, 6), float(hvd.rank()))
    expected.T[1:3] = 0
    expected[3, ::2] = 0
    assert np.array_equal(whole, expected)


@pytest.mark.parametrize("leaf", [1.5, None, "text", np.float32(1)], ids=repr)
def test_objects_that_are_not_arrays_are_named_by_their_path(leaf):
    with pytest.raises(TypeError, match=r'params\["decoder.1.scale"\] is .*broadcast_object'):
        hvd.broadcast_parameters({"decoder": [np.ones(1), {"scale": leaf}]})


def test_a_read_only_array_is_refused():
    array = np.ones(1)
    array.flags.writeable = False
    with pytest.raises(TypeError, match=r'params\["frozen"\] is a read-only array'):
        hvd.broadcast_parameters({"frozen": array})


def test_two_parameters_of_one_path_are_refused():
    with pytest.raises(ValueError, match='two parameters have the path "1"'):
        hvd.broadcast_parameters({1: np.ones(1), "1": np.ones(1)})
