"""Compression.powersgd for arrays: gradients as two factors, what is kept between steps, and what is refused."""

import math
import pickle

import ml_dtypes
import numpy as np
import pytest
from harness.exact import require_equal
from power_sgd_reference import Reference

import ringtrain as hvd
from ringtrain import _core, optim
from ringtrain.arrays import numpy as numpy_adapter
from ringtrain.engine.compression import Compression
from ringtrain.training.power_sgd import orthonormal


class Recorder:
    """An optimizer that keeps the averages."""

    def step(self, params, grads):
        self.seen = [gradient.copy() for gradient in grads]

    def state_dict(self):
        return {"of": "Recorder"}

    def load_state_dict(self, state):
        assert state == {"of": "Recorder"}


def gradients_of(step, shape=(24, 4, 5), dtype="f4"):
    """Those of all ranks."""
    return np.random.default_rng(step).standard_normal((hvd.size(), *shape)).astype(dtype)


def averages(optimizer, gradients):
    """Those of one step."""
    optimizer.step([np.zeros_like(gradient) for gradient in gradients], [gradient.copy() for gradient in gradients])
    return optimizer.seen


def powersgd(rank=2, **how):
    return hvd.DistributedOptimizer(Recorder(), compression=Compression.powersgd(rank, **how))


def require_on_all(array):
    """The array has the same bits on all ranks."""
    for other in hvd.allgather(np.frombuffer(array.tobytes(), "u1")[None]):
        assert other.tobytes() == array.tobytes()


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, 4)
def test_powersgd_is_the_algorithm_of_the_paper():
    optimizer, reference = powersgd(), Reference(Compression.powersgd(2), "0", (24, 4, 5), hvd.size())
    for step in range(5):
        gradients = gradients_of(step)
        (average,) = averages(optimizer, [gradients[hvd.rank()]])
        assert average.dtype == np.float32
        require_on_all(average)
        np.testing.assert_allclose(average, reference.step(gradients), atol=2e-5)
        error = optimizer.state_dict()["powersgd"]["gradients"]["0"]["error"]
        np.testing.assert_allclose(error, reference.errors[hvd.rank()], atol=2e-5)


@pytest.mark.ranks(2, 3)
def test_powersgd_loses_nothing_in_the_sum_over_steps():
    optimizer = powersgd(1)
    sent, received = np.zeros((20, 20)), np.zeros((20, 20))
    for step in range(12):
        gradients = gradients_of(step, (20, 20))
        sent += gradients.mean(0)
        received += averages(optimizer, [gradients[hvd.rank()]])[0]
    errors = hvd.allreduce(optimizer.state_dict()["powersgd"]["gradients"]["0"]["error"])
    assert np.abs(errors).max() > 0.5
    np.testing.assert_allclose(received + errors, sent, atol=1e-4)


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3)
def test_an_average_of_low_rank_arrives_whole():
    rng = np.random.default_rng(1)
    left, right = rng.integers(-4, 5, (30, 3)), rng.integers(-4, 5, (3, 40))
    optimizer = powersgd(3)
    for _ in range(4):
        (average,) = averages(optimizer, [(left @ right).astype("f4") * (1 + hvd.rank())])
        np.testing.assert_allclose(average, left @ right * (1 + (hvd.size() - 1) / 2), atol=1e-3)


@pytest.mark.fast
@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(1000,), (), (4, 1000), (8, 8), (0, 8), (40, 40)], ids=str)
def test_gradients_for_which_factors_do_not_pay_travel_whole(shape):
    optimizer = powersgd(rank=10 if shape == (40, 40) else 4)
    values = np.random.default_rng(3).integers(-8, 8, shape).astype("f4")
    for step in range(3):
        (average,) = averages(optimizer, [np.asarray(values * 2 * hvd.rank() + step)])
        require_equal(average, values + np.float32(step))
    assert optimizer.state_dict()["powersgd"]["gradients"] == {}


@pytest.mark.ranks(2)
def test_whole_gradients_and_factors_travel_in_one_step():
    optimizer = powersgd(1, min_compression_rate=3)
    matrix = np.outer(np.arange(20), np.ones(30)).astype("f4")
    for step in range(3):
        vector, average = averages(optimizer, [np.full(5, step + 2.0 * hvd.rank()), matrix])
        require_equal(vector, np.full(5, step + 1.0))
        np.testing.assert_allclose(average, matrix, atol=1e-4)


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_the_first_steps_travel_whole_until_start_step():
    optimizer = powersgd(1, start_step=3)
    values = np.random.default_rng(5).integers(-8, 8, (20, 20)).astype("f4")
    for step in range(5):
        (average,) = averages(optimizer, [values * 2 * hvd.rank()])
        assert (average == values).all() == (step < 3)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64], ids=lambda dtype: np.dtype(dtype).name)
def test_factors_of_other_dtypes(dtype):
    optimizer, reference = powersgd(), Reference(Compression.powersgd(2), "0", (24, 20), hvd.size())
    for step in range(3):
        gradients = gradients_of(step, (24, 20), "f4").astype(dtype)
        (average,) = averages(optimizer, [gradients[hvd.rank()]])
        assert average.dtype == dtype
        require_on_all(average)
        tolerance = 1e-12 if dtype is np.float64 else 0.05
        np.testing.assert_allclose(average.astype("f8"), reference.step(gradients), atol=tolerance)
    error = optimizer.state_dict()["powersgd"]["gradients"]["0"]["error"]
    assert error.dtype == (np.float64 if dtype is np.float64 else np.float32)


@pytest.mark.ranks(2, 3)
def test_powersgd_with_weights_that_change():
    weights = [[3, 1, 2], [0, 2, 1], [1, 1, 1]]
    optimizer, reference = powersgd(), Reference(Compression.powersgd(2), "0", (24, 20), hvd.size())
    for step in range(6):
        of_ranks = weights[step % 3][: hvd.size()]
        gradients = gradients_of(step, (24, 20))
        optimizer.set_weight(of_ranks[hvd.rank()])
        own, before = gradients[hvd.rank()], reference.errors.copy()
        (average,) = averages(optimizer, [np.full_like(own, math.nan) if of_ranks[hvd.rank()] == 0 else own])
        np.testing.assert_allclose(average, reference.step(gradients, of_ranks), atol=2e-5)
        for rank, weight in enumerate(of_ranks):
            if weight == 0:  # its gradient was not read
                reference.errors[rank] = before[rank]


@pytest.mark.ranks(2)
def test_a_sum_of_factors_is_that_of_all_ranks():
    matrix = np.outer(np.arange(20), np.ones(30)).astype("f4")
    optimizer = hvd.DistributedOptimizer(
        Recorder(),
        compression=Compression.powersgd(1),
        op=hvd.Sum,
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )
    for _ in range(3):
        for _ in range(2):
            optimizer.step([matrix], [matrix * (1 + hvd.rank())])
        np.testing.assert_allclose(optimizer.seen[0], 3 * matrix, atol=1e-3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_of_one_rank_reaches_all_and_leaves_nothing_behind(bad):
    optimizer, reference = powersgd(), Reference(Compression.powersgd(2), "0", (24, 20), hvd.size())
    for step in range(4):
        gradients = gradients_of(step, (24, 20))
        if step == 2:
            broken = gradients[hvd.rank()].copy()
            broken[3, 4] = bad if hvd.rank() else 1
            assert not np.isfinite(averages(optimizer, [broken])[0]).any()
        (average,) = averages(optimizer, [gradients[hvd.rank()]])
        np.testing.assert_allclose(average, reference.step(gradients), atol=2e-5)


@pytest.mark.ranks(2)
def test_powersgd_without_its_options():
    plain = powersgd(use_error_feedback=False, warm_start=False, random_seed=7)
    first, second = ([averages(plain, [gradients_of(0, (24, 20))[hvd.rank()]])[0]] for _ in range(2))
    assert plain.state_dict()["powersgd"]["gradients"]["0"]["error"] is None
    assert (first[0] != second[0]).any()  # other random numbers
    again = powersgd(use_error_feedback=False, warm_start=False, random_seed=7)
    require_equal(averages(again, [gradients_of(0, (24, 20))[hvd.rank()]])[0], first[0])


@pytest.mark.fast
@pytest.mark.ranks(2)
def test_a_checkpoint_with_powersgd_resumes_with_the_same_bits():
    one, other, of_rank_0 = powersgd(), powersgd(), powersgd()
    for step in range(3):
        averages(one, [gradients_of(step, (24, 20))[hvd.rank()]])
    saved = pickle.dumps(one.state_dict())
    other.load_state_dict(pickle.loads(saved))
    of_rank_0.load_state_dict(hvd.broadcast_object(pickle.loads(saved), 0))
    has_error = of_rank_0.state_dict()["powersgd"]["gradients"]["0"]["error"] is not None
    assert has_error == (hvd.rank() == 0)
    for step in range(3, 6):
        own = [gradients_of(step, (24, 20))[hvd.rank()]]
        require_equal(averages(other, own)[0], averages(one, own)[0])
    other.load_state_dict({"of": "Recorder"})  # of an optimizer without PowerSGD
    require_equal(averages(other, own)[0], averages(powersgd(), own)[0])
    with pytest.raises(ValueError, match='"powersgd" is not the state of a PowerSGD compression'):
        other.load_state_dict({"of": "Recorder", "powersgd": {"gradients": 1}})


@pytest.mark.ranks(2)
def test_the_ranks_of_an_elastic_state_keep_their_own_errors():
    optimizer = powersgd()
    state = hvd.elastic.ArrayState(optimizer=optimizer)
    for step in range(2):
        averages(optimizer, [gradients_of(step, (24, 20))[hvd.rank()]])
    state.commit()
    before = optimizer.state_dict()["powersgd"]["gradients"]["0"]
    averages(optimizer, [gradients_of(9, (24, 20))[hvd.rank()]])
    state.restore()
    state.sync()
    after = optimizer.state_dict()["powersgd"]["gradients"]["0"]
    require_equal(after["error"], before["error"])
    require_equal(after["factor"], before["factor"])
    late = powersgd()
    if hvd.rank() == 0:  # rank 1 has come late
        late.load_state_dict(optimizer.state_dict())
    hvd.elastic.ArrayState(optimizer=late).sync()
    joined = late.state_dict()["powersgd"]["gradients"]["0"]
    require_equal(joined["factor"], before["factor"])
    assert (joined["error"] is None) == (hvd.rank() == 1) and joined["steps"] == 2


@pytest.mark.fast
@pytest.mark.ranks(1)
def test_bad_arguments_of_powersgd_are_refused():
    for rank in (0, -1):
        with pytest.raises(ValueError, match=f"powersgd: rank must be at least 1, not {rank}"):
            Compression.powersgd(rank)
    for rank in (1.0, "4", None, True):
        with pytest.raises(TypeError, match="powersgd: rank must be an integer"):
            Compression.powersgd(rank)
    with pytest.raises(ValueError, match="start_step must be at least 0, not -1"):
        Compression.powersgd(1, start_step=-1)
    for rate in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="min_compression_rate must be a finite number above 0"):
            Compression.powersgd(1, min_compression_rate=rate)
    with pytest.raises(TypeError, match="min_compression_rate must be a number"):
        Compression.powersgd(1, min_compression_rate="2")
    with pytest.raises(TypeError, match=r"powersgd\(4\) is for a DistributedOptimizer"):
        hvd.allreduce(np.ones((100, 100)), compression=Compression.powersgd(4))
    with pytest.raises(TypeError, match=r"DiLoCo: .*compression|compression"):
        hvd.DiLoCo(optim.SGD(lr=1.0), [np.ones(3)], 2, compression=Compression.powersgd(4))
    for op in (hvd.Max, hvd.Adasum):
        with pytest.raises(ValueError, match="needs op=Average or op=Sum"):
            hvd.DistributedOptimizer(Recorder(), compression=Compression.powersgd(4), op=op)
    with pytest.raises(ValueError, match=r"groups are not for Compression\.powersgd"):
        hvd.DistributedOptimizer(Recorder(), compression=Compression.powersgd(4), groups=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("other", [{"random_seed": 1}, {"warm_start": False}], ids=str)
def test_ranks_that_begin_with_other_factors_get_an_error(other):
    how = Compression.powersgd(2, **(other if hvd.rank() else {}))
    optimizer = hvd.DistributedOptimizer(Recorder(), compression=how)
    with pytest.raises(hvd.DeadlockError, match=r"<Q, random_seed=1>|<Q, warm_start=False>"):
        optimizer.step([np.zeros((30, 40))], [np.ones((30, 40))])


# --- its arithmetic ---------------------------------------------------------------------------------------------------


def test_a_basis_is_orthonormal_also_of_vectors_that_depend_on_each_other():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((5, 40)).astype("f4")
    vectors[2] = vectors[0] - 3 * vectors[1]
    vectors[4] = 0
    basis = orthonormal(vectors)
    np.testing.assert_allclose(basis @ basis.T, np.eye(5), atol=1e-14)
    # The same space.
    np.testing.assert_allclose(vectors @ basis.T @ basis, vectors, atol=1e-5)
    vectors[1, 3] = math.nan
    assert np.isnan(orthonormal(vectors)[1:]).all()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 7, 5), (4, 3, 2500), (2, 1030, 1025)], ids=str)
def test_the_core_multiplies_factors_in_order(sizes, dtype):
    rank, rows, columns = sizes
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((rank, rows)).astype(dtype), rng.standard_normal((rank, columns)).astype(dtype)
    product = np.empty((rows, columns), dtype)
    _core.multiply_factors(*map(numpy_adapter.view, (left, right, product)))
    expected = np.multiply.outer(left[0], right[0])
    for k in range(1, rank):
        expected += np.multiply.outer(left[k], right[k])
    require_equal(product, expected)


def test_factors_that_do_not_fit_are_refused_by_the_core():
    def multiply(left, right, product, dtype="f4"):
        arrays = [np.zeros(shape, dtype) for shape in (left, right, product)]
        _core.multiply_factors(*map(numpy_adapter.view, arrays))

    for shapes, message in (
        (((2, 3), (3, 4), (3, 4)), "the same number of rows"),
        (((0, 3), (0, 4), (3, 4)), "the same number of rows"),
        (((6,), (2, 4), (3, 4)), "must be matrices"),
        (((2, 3), (2, 4), (4, 4)), "must have 12 elements"),
    ):
        with pytest.raises(ValueError, match=message):
            multiply(*shapes)
    with pytest.raises(ValueError, match="works on float32 and float64"):
        multiply((2, 3), (2, 4), (3, 4), "f2")
