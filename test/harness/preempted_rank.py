"""A rank of preempted_job.py: writes its process id before its first step, and at preemption what it would save.

Takes a folder, the rank that computes for long in each step, and the number of steps.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import ringtrain as hvd


def main() -> None:
    if "DMLC_ROLE" in os.environ:
        importlib.import_module("ringtrain.kvstore")  # in which a scheduler and a server stay
    busy_rank, steps = int(sys.argv[2]), int(sys.argv[3])
    hvd.init()
    rank = hvd.rank()
    weights = np.zeros(1000)
    hvd.preempted()
    write(f"began.{rank}", pid=os.getpid())
    for step in range(steps):
        weights += hvd.allreduce(np.full(1000, rank + step), op=hvd.Sum, name="gradient")
        if rank == busy_rank:
            sum(range(3_000_000))  # in C, with the GIL: a handler in Python would have to wait
        else:
            time.sleep(0.002)
        found = hvd.preempted()
        if found:
            if rank == 0:
                time.sleep(0.3)
            write(f"saved.{rank}", step=step, weight=weights[0], left=found.seconds_left)
            hvd.exit_preempted()
    hvd.barrier()
    write(f"done.{rank}")
    time.sleep(60)


def write(name: str, **values: object) -> None:
    """Writes a file that is whole when it appears."""
    folder = Path(sys.argv[1])
    (folder / "part").mkdir(exist_ok=True)
    (folder / "part" / name).write_text(json.dumps(values))
    os.replace(folder / "part" / name, folder / name)


if __name__ == "__main__":
    main()
