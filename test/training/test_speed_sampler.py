"""SpeedSampler: parts of each batch follow measured speeds, all ranks agree, and each sample comes once."""

import itertools

import numpy as np
import pytest
from harness.exact import require_equal
from harness.frameworks import on_demand

import ringtrain as hvd
from ringtrain import optim
from ringtrain.training import speed_sampler
from ringtrain.training.speed_sampler import split_by_speed

torch = on_demand("torch")
hvd_torch = on_demand("ringtrain.torch")


class Clock:
    """In its context the sampler sees a clock that stands still but for the time that `work` takes."""

    def __init__(self, seconds_per_sample):
        self.now_s = 0.0
        self.seconds_per_sample = seconds_per_sample

    def __enter__(self):
        self.true_clock = speed_sampler.perf_counter
        speed_sampler.perf_counter = lambda: self.now_s
        return self

    def __exit__(self, *exception):
        speed_sampler.perf_counter = self.true_clock

    def work(self, samples):
        self.now_s += samples * self.seconds_per_sample[hvd.rank()]


def of_all_ranks(own):
    """The lists of all ranks, by rank."""
    return hvd.allgather_object(own)


def joined(lists):
    return list(itertools.chain(*lists))


@pytest.mark.parametrize(
    ("total", "speeds", "most", "parts"),
    [
        (40, [1, 1, 1, 1], None, [10, 10, 10, 10]),
        (40, [3, 3, 3, 1], None, [12, 12, 12, 4]),
        (10, [1, 1, 1], None, [4, 3, 3]),
        (4, [1000, 1, 1], None, [2, 1, 1]),
        (3, [5, 1, 1], None, [1, 1, 1]),
        (40, [3, 3, 3, 1], 11, [11, 11, 11, 7]),
        (12, [1e-9, 1e9], None, [1, 11]),
    ],
)
def test_parts_are_proportional_and_add_up(total, speeds, most, parts):
    assert split_by_speed(total, speeds, most) == parts
    assert sum(split_by_speed(total, speeds, most)) == total


@pytest.mark.fast
@pytest.mark.ranks(4)
def test_a_rank_at_a_third_of_the_speed_gets_a_third_of_the_samples():
    with Clock([0.25, 0.25, 0.75, 0.25]) as clock:
        sampler = hvd.SpeedSampler(2000, batch_size=40, every=5)
        assert sampler.shares == [10] * 4
        sizes = []
        for indices in sampler:
            clock.work(len(indices))
            sizes.append(len(indices))
            sampler.arrive()
        assert of_all_ranks(sizes) == [[10] * 5 + [12] * 45] * 2 + [[10] * 5 + [4] * 45] + [[10] * 5 + [12] * 45]
        assert sampler.shares == [12, 12, 4, 12]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(("samples", "batch"), [(100, 12), (101, 12), (97, 96), (3, 3), (100, 100)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_comes_once_in_each_epoch_while_speeds_change(samples, batch, shuffle):
    with Clock([0.25, 0.25, 0.75]) as clock:
        sampler = hvd.SpeedSampler(range(samples), batch, every=2, shuffle=shuffle)
        orders = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            clock.seconds_per_sample = clock.seconds_per_sample[1:] + clock.seconds_per_sample[:1]
            steps = []
            for indices in sampler:
                assert indices
                clock.work(len(indices))
                sampler.arrive()
                steps.append(indices)
            assert len(steps) == len(sampler)
            by_rank = of_all_ranks(steps)
            assert {len(one) for one in by_rank} == {len(sampler)}
            together = [joined(one[step] for one in by_rank) for step in range(len(sampler))]
            everything = joined(together)
            assert sorted(everything) == list(range(samples))
            assert all(len(one) == batch for one in together[:-1])
            orders.append(everything)
        assert (orders[0] == orders[1]) == (not shuffle or samples == 1)


@pytest.mark.ranks(2)
def test_small_differences_change_nothing():
    with Clock([0.25, 0.26]) as clock:
        sampler = hvd.SpeedSampler(1000, batch_size=100, every=2, hysteresis=0.05)
        for indices in sampler:
            clock.work(len(indices))
            sampler.arrive()
        assert sampler.shares == [50, 50]
        sampler = hvd.SpeedSampler(1000, batch_size=100, every=2, hysteresis=0.0)
        for indices in sampler:
            clock.work(len(indices))
            sampler.arrive()
        assert sampler.shares == [51, 49]


@pytest.mark.ranks(3)
def test_weighted_gradients_are_those_of_one_process_with_all_samples():
    with Clock([0.25, 0.75, 0.25]) as clock:
        # Multiples of the least common multiple of all parts, so that every mean is exact.
        features = np.random.default_rng(1).integers(-4, 5, (64, 3)) * 27720.0
        sampler = hvd.SpeedSampler(len(features), batch_size=16, every=1)
        optimizer, plain = hvd.DistributedOptimizer(optim.SGD(lr=1.0)), optim.SGD(lr=1.0)
        params, alone, sizes = [np.zeros(3)], [np.zeros(3)], []
        for indices in sampler:
            sizes.append(len(indices))
            clock.work(len(indices))
            sampler.arrive()
            optimizer.set_weight(len(indices))
            optimizer.step(params, [features[indices].mean(0)])
            everything = joined(of_all_ranks(indices))
            plain.step(alone, [features[everything].mean(0)])
            require_equal(params[0], alone[0])
        assert len(set(sizes)) > 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_with_a_data_loader(workers):
    with Clock([0.25, 0.75]) as clock:
        dataset = torch.utils.data.TensorDataset(torch.arange(600))
        sampler = hvd_torch.SpeedSampler(dataset, batch_size=20, every=3)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
        assert len(loader) == 30
        for epoch in range(2):
            sampler.set_epoch(epoch)
            seen = []
            for (values,) in loader:
                clock.work(len(values))
                sampler.arrive()
                seen += values.tolist()
            assert sorted(joined(of_all_ranks(seen))) == list(range(600))
            assert sampler.shares == [15, 5]


@pytest.mark.ranks(2)
def test_an_epoch_goes_on_from_a_checkpoint():
    with Clock([0.25, 0.25]):
        sampler = hvd.SpeedSampler(50, batch_size=10)
        seen = []
        for indices in sampler:
            seen += indices
            sampler.arrive()
            if len(seen) == 15:
                break
        state = sampler.state_dict()
        assert state == {"epoch": 0, "processed": 30}
        other = hvd.SpeedSampler(50, batch_size=10)
        other.load_state_dict(state)
        for indices in other:
            seen += indices
            other.arrive()
        assert sorted(joined(of_all_ranks(seen))) == list(range(50))


@pytest.mark.ranks(2)
def test_wrong_arguments_are_refused():
    for arguments, text in [
        ((1, 1), "1 samples in batches of 1 for 2 ranks; each rank needs at least one sample"),
        ((0, 8), "dataset must be at least 1, not 0"),
        ((100, 0), "batch_size must be at least 1, not 0"),
    ]:
        with pytest.raises(ValueError, match=text):
            hvd.SpeedSampler(*arguments)
    with pytest.raises(ValueError, match=r"2 ranks of most=4 samples cannot hold a batch of 8"):
        hvd.SpeedSampler(100, 8, most=4)
    with pytest.raises(ValueError, match=r"hysteresis must be in 0..1, not 1"):
        hvd.SpeedSampler(100, 8, hysteresis=1)
    with pytest.raises(TypeError, match=r"every must be an integer, not 2\.5"):
        hvd.SpeedSampler(100, 8, every=2.5)
    sampler = hvd.SpeedSampler(100, 8)
    with pytest.raises(hvd.StepOrderError, match=r"arrive\(\) without a batch"):
        sampler.arrive()
