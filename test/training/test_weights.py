"""DistributedOptimizer.set_weight for arrays: ranks with unequal batches do what one does with all samples."""

import math

import numpy as np
import pytest
from harness.exact import require_equal

import ringtrain as hvd
from ringtrain import optim

BATCHES = {1: [8], 2: [6, 2], 3: [4, 3, 1], 4: [8, 4, 3, 1]}


def samples_of(rank, step):
    count = BATCHES[hvd.size()][rank]
    return np.random.default_rng([rank, step]).integers(-4, 5, (count, 6)).astype("f8") * count


@pytest.mark.fast
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "options", [{}, {"groups": 1}, {"gradient_predivide_factor": 4.0}, {"nan_check": True}], ids=str
)
def test_unequal_batches_train_as_one_process_with_all_samples(options):
    params, alone = [np.ones(4), np.ones(2, "f4")], [np.ones(4), np.ones(2, "f4")]
    optimizer, plain = hvd.DistributedOptimizer(optim.SGD(lr=0.5, momentum=0.5), **options), optim.SGD(0.5, 0.5)

    def gradients_of(samples):
        mean = samples.mean(0)
        return [mean[:4].copy(), mean[4:].astype("f4")]

    for step in range(4):
        own = samples_of(hvd.rank(), step)
        optimizer.set_weight(len(own))
        optimizer.step(params, gradients_of(own))
        plain.step(alone, gradients_of(np.concatenate([samples_of(rank, step) for rank in range(hvd.size())])))
    for mine, expected in zip(params, alone, strict=True):
        require_equal(mine, expected)


@pytest.mark.ranks(2)
def test_the_sum_of_several_passes_has_the_weight_of_the_update():
    optimizer = hvd.DistributedOptimizer(optim.SGD(lr=1.0), backward_passes_per_step=2)
    params = [np.zeros(2)]
    for number in range(4):
        optimizer.set_weight([6, 2][hvd.rank()])
        optimizer.step(params, [np.full(2, 2.0 * hvd.rank())])
        require_equal(params[0], np.full(2, -1.0 * ((number + 1) // 2)))


@pytest.mark.ranks(2)
def test_a_rank_of_weight_0_may_have_nan_also_with_nan_check():
    optimizer = hvd.DistributedOptimizer(optim.SGD(lr=1.0), nan_check=True)
    params = [np.zeros(3)]
    for step in range(3):
        optimizer.set_weight(hvd.rank() * 4)
        optimizer.step(params, [np.full(3, 2.0 if hvd.rank() else math.nan)])
        require_equal(params[0], np.full(3, -2.0 * (step + 1)))


@pytest.mark.ranks(2)
def test_the_weight_ends_with_none():
    optimizer = hvd.DistributedOptimizer(optim.SGD(lr=1.0))
    params = [np.zeros(3)]
    for weight, expected in (([3, 1], 1.0), (None, 2.0), ([1, 3], 3.0), (None, 2.0)):
        optimizer.set_weight(None if weight is None else weight[hvd.rank()])
        params[0][:] = 0
        optimizer.step(params, [np.full(3, 4.0 * hvd.rank())])
        require_equal(params[0], np.full(3, -expected))


@pytest.mark.ranks(2)
def test_wrong_weights_are_refused():
    optimizer = hvd.DistributedOptimizer(optim.SGD(lr=1.0))
    for weight in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match="DistributedOptimizer: weight must be a finite number"):
            optimizer.set_weight(weight)
    with pytest.raises(ValueError, match="weight is for op=Average, not for op=Sum"):
        hvd.DistributedOptimizer(optim.SGD(lr=1.0), op=hvd.Sum).set_weight(1)
    optimizer.set_weight(0)
    with pytest.raises(hvd.MismatchError, match=r"the weights of all ranks are 0, so there is no average"):
        optimizer.step([np.zeros(3)], [np.ones(3)])
    optimizer.set_weight(1)
    params = [np.zeros(3)]
    optimizer.step(params, [np.ones(3)])
    require_equal(params[0], np.full(3, -1.0))
