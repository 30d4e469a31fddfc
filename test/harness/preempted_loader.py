"""As preempted_rank.py, with PyTorch and batches from two workers of a DataLoader."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset

import ringtrain.torch as hvd
from harness.preempted_rank import write


class Ones(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.005)
            yield torch.ones(2)


def main() -> None:
    hvd.init()
    hvd.preempted()
    for step, batch in enumerate(DataLoader(Ones(), num_workers=2)):
        hvd.allreduce(batch, name="gradient")
        if step == 5:
            write(f"began.{hvd.rank()}", pid=os.getpid())
        if hvd.preempted():
            write(f"saved.{hvd.rank()}", step=step)
            hvd.exit_preempted()


if __name__ == "__main__":
    main()
