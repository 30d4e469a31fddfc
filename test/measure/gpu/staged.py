"""An allreduce that passes through host memory, as where NCCL cannot go, beside what it cannot do without.

The bus copies all bytes of all ranks to the host and back, both ways at once; in the host's memory all ranks read and
write their bytes once, as in the floor of `step`. The slower one of the two is the floor here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import ringtrain as hvd
from measure.gpu.aim import Aim
from measure.gpu.copies import BothWays
from measure.gpu.library import Library
from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.arithmetic import floor
from ringtrain.bench.measurement import Session
from ringtrain.bench.report import Table, lines_of, milliseconds_text
from ringtrain.bench.results import Row, Spread, Values
from ringtrain.bench.rounds import Array, Contestant

_COPIES, _FLOOR = "copies both ways", "floor in host memory"
_AIM = Aim("share of the slower floor", must=0.6, goal=0.85)


class Staged:
    name = "staged"

    def why_not(self, session: Session, library: Library) -> str:
        job = session.job
        if job.size == 1:
            return "in a job of one rank nothing has to pass through host memory"
        return "" if job.hosts == 1 else "its floor is that of ranks which share memory, and these are on several hosts"

    def measure(self, session: Session, library: Library) -> Row:
        _restart(session, gpu_algorithm="staged")
        try:
            return self._measure(session, library)
        finally:
            _restart(session)

    def _measure(self, session: Session, library: Library) -> Row:
        dtype = np.dtype(np.float32)
        count = max(1, session.arguments.staged_bytes // dtype.itemsize)
        array = library.zeros((count,), dtype)
        total = sum(range(1, session.job.size + 1))
        (admitted,) = session.admit(
            [ringtrain_competitor.collective("allreduce")],
            [array],
            lambda: library.fill(array, 1 + session.job.rank),
            lambda result: bool(result.min() == total) and bool(result.max() == total),
        )
        library.fill(array, 0)  # sums of sums would overflow
        on_host = np.ones(count, dtype)  # the floor knows its address only
        copies = BothWays(array, library.zeros((count,), dtype))
        contestants = [
            Contestant(admitted.name, _finished(admitted.run, library)),
            Contestant(_COPIES, copies.run),
            Contestant(_FLOOR, floor([on_host])),
        ]
        library.finish()
        row = Row({"part": self.name, "bytes": array.nbytes}, session.rounds(contestants))
        copies.close()
        return row

    def table(self, row: Row) -> list[str]:
        table = Table(["", "ms [min-max]", "GB/s"], first_is_text=True)
        for name in row.competitors():
            time = row.spread(name)
            table.add([name, milliseconds_text(time), f"{row.key['bytes'] / time.median / 1e9:.2f}"])
        shares = Spread.of([_share(one.values) for one in row.rounds])
        subject = f"allreduce of {row.key['bytes'] / (1 << 20):g} MiB through host memory"
        return [subject, "", *lines_of(table), "", _AIM.verdict(shares)]


def _finished(run: Callable[[], Array], library: Library) -> Callable[[], None]:
    def run_to_the_end() -> None:
        run()
        library.finish()

    return run_to_the_end


def _share(values: Values) -> float:
    return max(values[_COPIES]["seconds"], values[_FLOOR]["seconds"]) / values[ringtrain_competitor.NAME]["seconds"]


def _restart(session: Session, **options: str) -> None:
    """Another `init`, after which nothing is known of what was submitted before."""
    hvd.shutdown()
    session.init(**options)
