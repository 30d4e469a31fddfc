"""How far apart the cores of ranks 0 and 1 of a node are: virtual machines move them about."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time

import numpy as np

import ringtrain._core as _core
from ringtrain.bench.job import Job

NEAR_NS = 200.0
_FOLDER = "/dev/shm"
_LIMIT_S = 0.2


class Probe:
    """Measures the round trip of a word between two ranks. All ranks call its methods together."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._takes_part = job.local_size > 1 and job.local_rank < 2
        self._board = _share(job)

    def distance_ns(self) -> float | None:
        """The largest of all nodes; None where no node has two ranks, or the scheduler let no two of them run."""
        if self._takes_part and self._job.local_rank == 0:
            self._board[:] = 0
        self._job.barrier()
        own = 0.0
        if self._takes_part:
            own = _core.round_trip_ns(self._board.ctypes.data, self._job.local_rank == 0, _LIMIT_S)
        largest = max(self._job.gather(own))
        return largest if 0 < largest < float("inf") else None

    def wait_for(self, state: str | None, patience_s: float) -> float | None:
        """The distance, as soon as it is "near" or "far" as wanted (None: at once), or when the patience is over."""
        deadline = time.monotonic() + patience_s
        while True:
            distance_ns = self.distance_ns()
            is_over = any(self._job.gather(time.monotonic() > deadline))
            if state in (None, state_of(distance_ns)) or is_over:
                return distance_ns
            time.sleep(0.05)


def state_of(distance_ns: float | None) -> str:
    if distance_ns is None:
        return "unknown"
    return "near" if distance_ns < NEAR_NS else "far"


def _share(job: Job) -> np.ndarray:
    """The board of this node: a mapped file that nobody finds any more."""
    with contextlib.ExitStack() as files:
        path = ""
        if job.local_rank == 0:
            file = files.enter_context(tempfile.NamedTemporaryFile(dir=_FOLDER, prefix="ringtrain.bench-"))
            file.truncate(_core.ROUND_TRIP_BYTES)
            path = file.name
        path = job.gather_on_node(path)[0]
        descriptor = os.open(path, os.O_RDWR)
        try:
            mapped = mmap.mmap(descriptor, _core.ROUND_TRIP_BYTES)
        finally:
            os.close(descriptor)
        job.barrier()
    return np.frombuffer(mapped, np.uint8)
