"""broadcast_parameters: one operation where all ranks have the same kinds of arrays, else one for each array."""

import numpy as np
import pytest

import ringtrain as hvd
import ringtrain._core as _core


def names_below(prefix):
    """The names of the operations that carried parameters with this prefix, in their order."""
    names = [one["name"] for one in _core.last_operations()]
    return [name for name in names if name == prefix or name.startswith(f"{prefix}.")]


def made_by(rank):
    """Arrays of several dtypes and sizes; some are empty, some are not contiguous."""
    dtypes = ["float32", "int64", "uint8", "complex64", "bool"]
    arrays = {f"layer{i}": np.full(i * 7, i + rank, dtypes[i % 5]) for i in range(40)}
    arrays["turned"] = np.arange(12.0).reshape(3, 4).T + rank
    arrays["scale"] = np.array(0.5 + rank)
    return arrays


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
def test_parameters_travel_in_one_operation_after_a_comparison():
    for root in range(hvd.size()):
        mine, expected = made_by(hvd.rank()), made_by(root)
        hvd.broadcast_parameters(mine, root, f"whole{root}")
        assert all(np.array_equal(mine[name], expected[name]) for name in expected)
        assert names_below(f"whole{root}") == [f"whole{root}.<kinds>", f"whole{root}"]


@pytest.mark.ranks(1)
def test_a_rank_that_is_alone_compares_nothing():
    hvd.broadcast_parameters(made_by(0), prefix="alone")
    assert names_below("alone") == ["alone"]


@pytest.mark.fast
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            np.full(3, 1, np.float32),
            r'broadcast "odd\.b": .*sent float32\[2\], .* sent float32\[3\]\. Do all ranks build',
        ),
        (np.full(2, 1, np.int64), r'broadcast "odd\.b": .*sent float32\[2\], .* sent int64\[2\]\. Do all ranks build'),
    ],
    ids=["shape", "dtype"],
)
def test_an_array_of_another_kind_is_named(odd, message):
    parameters = {name: np.full(2, hvd.rank(), np.float32) for name in "abc"}
    if hvd.rank() == hvd.size() - 1:
        parameters["b"] = odd
    for _ in range(2):  # the names are free again
        with pytest.raises(hvd.MismatchError, match=message):
            hvd.broadcast_parameters(parameters, prefix="odd")
    assert parameters["a"].tolist() == parameters["c"].tolist() == [0, 0]


@pytest.mark.ranks(2, 3)
def test_another_root_is_named():
    with pytest.raises(hvd.MismatchError, match=r'broadcast "roots\.a": .*used root_rank=0, .* used root_rank=1\.'):
        hvd.broadcast_parameters({"a": np.ones(2)}, root_rank=int(hvd.rank() > 0), prefix="roots")


@pytest.mark.ranks(2, 3)
def test_a_parameter_of_another_name_is_named():
    parameters = {"shared": np.full(2, hvd.rank()), f"of{hvd.rank()}": np.ones(2)}
    with pytest.raises(
        hvd.DeadlockError, match=r'rank 0 for broadcast "others\.of0".*rank 1 for broadcast "others\.of1"'
    ):
        hvd.broadcast_parameters(parameters, prefix="others")
    assert parameters["shared"].tolist() == [0, 0]


@pytest.mark.ranks(2, 3)
def test_a_rank_that_has_joined_is_named():
    if hvd.rank() == 0:
        with pytest.raises(hvd.MismatchError, match=r'broadcast "joined\.a": rank.* called join\(\)'):
            hvd.broadcast_parameters({"a": np.ones(2)}, prefix="joined")
    hvd.join()


@pytest.mark.ranks(3, 4)
def test_process_sets_broadcast_their_own_parameters():
    halves = [hvd.add_process_set([0, 1]), hvd.add_process_set(range(2, hvd.size()))]
    own, other = halves if hvd.rank() < 2 else halves[::-1]
    parameters = made_by(hvd.rank())
    hvd.broadcast_parameters(parameters, own.ranks[-1], "half", process_set=own)
    assert all(np.array_equal(parameters[name], array) for name, array in made_by(own.ranks[-1]).items())
    before = made_by(hvd.rank())
    with pytest.raises(ValueError, match=r'broadcast "half\..*": .*does not belong to it'):
        hvd.broadcast_parameters(before, other.ranks[0], "half", process_set=other)
    with pytest.raises(ValueError, match=r"root_rank 9 is not one of the ranks"):
        hvd.broadcast_parameters(before, 9, "half", process_set=own)
    hvd.barrier()
    for half in halves:
        hvd.remove_process_set(half)
    with pytest.raises(ValueError, match=r"is not registered; see add_process_set"):
        hvd.broadcast_parameters(before, own.ranks[0], "half", process_set=own)


@pytest.mark.ranks(2, env={"RINGTRAIN_SHARED_MEMORY": "off"})
def test_parameters_travel_in_one_operation_over_a_network():
    mine = made_by(hvd.rank()) | {"large": np.full(300_000, hvd.rank(), np.float32)}
    hvd.broadcast_parameters(mine, 1, "network")
    assert all(np.array_equal(mine[name], array) for name, array in made_by(1).items())
    assert (mine["large"] == 1).all() and names_below("network") == ["network.<kinds>", "network"]


@pytest.mark.ranks(2)
def test_parameters_are_broadcast_in_the_next_generation():
    for generation in range(3):
        mine = made_by(hvd.rank() + generation)
        hvd.broadcast_parameters(mine, root_rank=1)
        assert all(np.array_equal(mine[name], array) for name, array in made_by(1 + generation).items())
        hvd.shutdown()
        hvd.init()
