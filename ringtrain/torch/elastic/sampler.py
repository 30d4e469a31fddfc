"""A sampler that shares out what is left of an epoch when there are other ranks than before."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from ringtrain.job import session


class ElasticSampler(Sampler[int]):
    """The share of this rank of the samples that no rank has seen in this epoch. As `horovod.torch.elastic`'s.

    Give it to the DataLoader and to the TorchState, call `record_batch` after each batch and before the commit, and
    `set_epoch` at the end of each epoch.

    Args:
        dataset: whose length does not change.
        shuffle: whether the order is random, another one in each epoch.
        seed: of that order; the same on all ranks.

    Attributes:
        epoch: that of `set_epoch`.
        processed_num: how many samples all ranks together have seen in this epoch.
        num_replicas, rank: for which it was shared out.
        remaining_indices: the samples that no rank has seen, in order.
        num_samples: how many of these this rank gets.
        total_size: how many all ranks get, some of them twice, so that all get as many.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    @property
    def processed_indices(self) -> set[int]:
        """The samples that a rank has seen in this epoch."""
        return set(self._order()[: self.processed_num])

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing has been seen."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have seen a batch of that size. `batch_idx` is ignored, as by Horovod's."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how much of it was seen."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` has returned, and share out what is left."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out what is left among the ranks that there are now."""
        self.num_replicas, self.rank = session.size(), session.rank()
        self.remaining_indices = self._order()[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(padded, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples

    def _order(self) -> list[int]:
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        return indices
