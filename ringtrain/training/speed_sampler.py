"""A sampler that gives faster ranks larger parts of each batch, so that all ranks finish a step at the same time."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator, Sequence, Sized
from time import perf_counter
from typing import Any

import numpy as np

from ringtrain import ops
from ringtrain.errors import StepOrderError
from ringtrain.job import session


class _Generation:
    """From one init() to the next: samplers are numbered as they first exchange speeds."""

    def __init__(self) -> None:
        self.samplers = 0


_generation = _Generation()


def _begin_anew(_settings: dict[str, str]) -> None:
    global _generation
    _generation = _Generation()


session.at_init(_begin_anew)


class SpeedSampler:
    """The indices of this rank in each step, as many as its measured speed allows; each sample once in every epoch.

    Every step takes `batch_size` samples for all ranks together. All ranks have the same number of steps, and at least
    one sample in each; samples that would be too few for a last step are in the step before. Give the number of this
    rank to `optimizer.set_weight`: then the gradients are those of the mean over all samples, whatever the parts.

    The time of a rank is that between asking for its indices and `arrive`. Every `every` steps the ranks exchange their
    samples per second, and share the next batches accordingly, if that makes a step faster by more than `hysteresis`.

    Give it to `torch.utils.data.DataLoader(dataset, batch_sampler=sampler)`, or loop over it.

    Args:
        dataset: something with a length, or that length.
        batch_size: samples in each step, of all ranks together.
        shuffle: whether the order is random, another one in each epoch.
        seed: of that order; the same on all ranks.
        every: steps between two exchanges.
        hysteresis: the parts change if the expected time of a step falls by more than this fraction.
        most: samples of one step that a rank can hold; None: any number.

    Raises:
        NotInitializedError: before init().
        TypeError: an argument is not a number.
        ValueError: there are fewer samples, or a smaller batch, than ranks; `most` of all ranks are less than a batch;
            or another argument is out of its range.

    Examples:
        >>> from ringtrain import optim
        >>> features, params = np.ones((100, 3)), [np.zeros(3)]
        >>> optimizer = hvd.DistributedOptimizer(optim.SGD(lr=0.1))
        >>> sampler = hvd.SpeedSampler(len(features), batch_size=20)
        >>> for indices in sampler:
        ...     gradient = features[indices].mean(0)
        ...     optimizer.set_weight(len(indices))
        ...     sampler.arrive()  # before this rank waits for the others
        ...     optimizer.step(params, [gradient])
        >>> params[0].round(6).tolist()  # after 5 steps
        [-0.5, -0.5, -0.5]
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        every: int = 10,
        hysteresis: float = 0.05,
        most: int | None = None,
    ) -> None:
        self._samples = _at_least(1, dataset if isinstance(dataset, (int, np.integer)) else len(dataset), "dataset")
        self._batch_size = _at_least(1, batch_size, "batch_size")
        self._most = None if most is None else _at_least(1, most, "most")
        self._every = _at_least(1, every, "every")
        if not 0 <= hysteresis < 1:
            raise ValueError(f"SpeedSampler: hysteresis must be in 0..1, not {hysteresis}")
        self._hysteresis = hysteresis
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._processed = 0  # samples of this epoch, in steps for which all ranks have arrived
        self._position = 0  # steps handed out, in all epochs
        self._handed_out: collections.deque[tuple[int, int]] = collections.deque()  # own samples and those of all
        self._asked_s: float | None = None  # when the last indices were asked for
        self._measured = [0, 0.0]  # own samples and seconds since the last exchange
        self._arrivals = 0
        self._changes: list[tuple[int, list[float]]] = []  # from which position on other speeds hold
        self._generation: _Generation | None = None
        self._number = 0
        self._speeds: list[float] = []
        self._begin()

    @property
    def shares(self) -> list[int]:
        """How many samples of a whole batch each rank gets now, by rank."""
        return split_by_speed(self._batch_size, self._speeds, self._most)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in an order of its own."""
        self._epoch = epoch
        self._processed = 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its samples all ranks together have processed."""
        return {"epoch": self._epoch, "processed": self._processed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` has returned: the next loop has the samples that are left of that epoch."""
        self._epoch = state_dict["epoch"]
        self._processed = state_dict["processed"]

    def __len__(self) -> int:
        return len(self._steps(self._samples))

    def __iter__(self) -> Iterator[list[int]]:
        self._begin()
        if self._processed >= self._samples:
            self._processed = 0
        self._handed_out.clear()
        order = list(range(self._samples))
        if self._shuffle:
            random.Random(self._seed + self._epoch).shuffle(order)
        first = self._processed
        for total in self._steps(self._samples - first):
            self._asked_s = perf_counter()
            parts = self._parts_of_next(total)
            begin = first + sum(parts[: session.rank()])
            own = parts[session.rank()]
            self._handed_out.append((own, total))
            yield order[begin : begin + own]
            first += total

    def arrive(self) -> None:
        """Say that this rank has computed its gradients: the wait for the others that follows is not its time.

        All ranks call it once in each step, before `optimizer.step()`. Every `every` steps it waits for all ranks.

        Raises:
            StepOrderError: no indices were handed out for this step.
            RingtrainError: a rank is lost, fails or does not arrive.
        """
        now_s = perf_counter()
        if not self._handed_out:
            raise StepOrderError("SpeedSampler.arrive() without a batch: call it once for each batch of the sampler")
        own, total = self._handed_out.popleft()
        self._processed += total
        if self._asked_s is not None:  # a DataLoader with workers has asked for all of an epoch before its last steps
            self._measured[0] += own
            self._measured[1] += now_s - self._asked_s
            self._asked_s = None
        self._arrivals += 1
        if self._arrivals % self._every == 0 and session.size() > 1:
            self._exchange()

    def _begin(self) -> None:
        """Share evenly where the ranks are others than before."""
        size = session.size()
        if self._generation is _generation:
            return
        if min(self._samples, self._batch_size) < size:
            raise ValueError(
                f"SpeedSampler: {self._samples} samples in batches of {self._batch_size} for {size} ranks; each rank "
                "needs at least one sample in each step"
            )
        # The last step of an epoch may have some samples more.
        if self._most is not None and self._most * size < self._batch_size + size - 1:
            raise ValueError(
                f"SpeedSampler: {size} ranks of most={self._most} samples cannot hold a batch of {self._batch_size}, "
                f"which may have {size - 1} more in the last step of an epoch"
            )
        self._generation, self._number = _generation, _generation.samplers
        _generation.samplers += 1
        self._speeds, self._changes = [1.0] * size, []
        self._arrivals, self._position, self._measured = 0, 0, [0, 0.0]

    def _steps(self, samples: int) -> list[int]:
        """The samples of all ranks in each step."""
        steps, rest = divmod(samples, self._batch_size)
        totals = [self._batch_size] * steps
        if rest >= session.size() or not totals:
            return [*totals, rest] if rest else totals
        totals[-1] += rest
        return totals

    def _parts_of_next(self, total: int) -> list[int]:
        while self._changes and self._changes[0][0] <= self._position:
            _, self._speeds = self._changes.pop(0)
        self._position += 1
        return split_by_speed(total, self._speeds, self._most)

    def _exchange(self) -> None:
        own = np.array([[*self._measured, self._position]], np.float64)
        self._measured = [0, 0.0]
        of_all = ops.allgather(own, name=f"SpeedSampler {self._number}.speeds")
        samples, seconds, positions = of_all.T.tolist()
        if min(seconds) <= 0:  # a rank has measured nothing
            return
        speeds = [count / time_s for count, time_s in zip(samples, seconds, strict=True)]
        current = self._changes[-1][1] if self._changes else self._speeds
        before, after = (self._expected_s(one, speeds) for one in (current, speeds))
        if after < before * (1 - self._hysteresis):
            # Later than any step that some rank has handed out already.
            self._changes.append((int(max(positions)), speeds))

    def _expected_s(self, shared_by: Sequence[float], speeds: Sequence[float]) -> float:
        parts = split_by_speed(self._batch_size, shared_by, self._most)
        return max(part / speed for part, speed in zip(parts, speeds, strict=True))


def split_by_speed(total: int, speeds: Sequence[float], most: int | None = None) -> list[int]:
    """Split into a part for each rank, in proportion to speeds, of at least 1 and at most `most`. The sum is exact.

    Each sample goes to the rank that then finishes first, so the slowest rank is as fast as it can be.
    """
    limit = total if most is None else most
    speed_of_all = sum(speeds)
    # Below its proportional part every rank is as fast as the others.
    parts = [min(limit, max(1, int(total * speed / speed_of_all))) for speed in speeds]
    while (missing := total - sum(parts)) != 0:
        step = 1 if missing > 0 else -1
        able = [rank for rank, part in enumerate(parts) if (part < limit if missing > 0 else part > 1)]
        if missing > 0:
            chosen = min(able, key=lambda rank: ((parts[rank] + 1) / speeds[rank], rank))
        else:
            chosen = max(able, key=lambda rank: (parts[rank] / speeds[rank], rank))
        parts[chosen] += step
    return parts


def _at_least(lowest: int, number: Any, name: str) -> int:
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)):
        raise TypeError(f"SpeedSampler: {name} must be an integer, not {number!r}")
    if number < lowest:
        raise ValueError(f"SpeedSampler: {name} must be at least {lowest}, not {number}")
    return int(number)
