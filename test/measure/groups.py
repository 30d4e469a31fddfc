"""Groups of torch.distributed beside each other: pairs of ranks while the others rest, work or are stopped, groups that
overlap, messages, and sizes that change from call to call. One world of four ranks or more, beside gloo in one run.
"""

from __future__ import annotations

import argparse

from ringtrain.bench import ringtrain_competitor
from ringtrain.bench.measurement import CannotMeasure, Session
from ringtrain.bench.report import Table, lines_of, spread_text
from ringtrain.bench.results import Result, Row

_GLOO = "gloo"


class Groups:
    name = "groups"
    library = "torch"
    peers = (_GLOO,)
    help = "groups of torch.distributed beside each other: pairs, groups that overlap, messages, a stopped rank"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--idle-groups", type=int, default=200, metavar="N", help="default: %(default)s")

    def measure(self, session: Session) -> list[Row]:
        if session.job.size == 3:
            raise CannotMeasure("groups needs pairs of ranks: use -np 2, 4 or 8")
        session.init()
        session.peers()
        # torch need not be installed for the other measurements
        from measure.torch.groups import measure

        return measure(session)

    def table(self, result: Result) -> list[str]:
        own = ringtrain_competitor.NAME
        table = Table(["", "us", "min-max", "cpu us", _GLOO], first_is_text=True)
        lines = []
        for row in result.rows:
            if "idle groups" in row.key:
                cost = {key: row.spread(own, key).most for key in ("shm", "threads", "cpu")}
                lines.append(
                    f"{row.key['idle groups']} idle groups: {cost['shm'] / 1e6:.1f} MB of /dev/shm, "
                    f"{cost['threads']:.0f} threads, "
                    f"{1e3 * cost['cpu']:.2f} ms of a core in each second (the most of a rank)"
                )
                continue
            time = row.spread(own)
            ratio = spread_text(row.ratio(_GLOO, own)) if _GLOO in row.competitors() else ""
            least_most = f"{1e6 * time.least:.1f}-{1e6 * time.most:.1f}"
            cpu = f"{1e6 * row.spread(own, 'cpu').median:.1f}"
            table.add([row.key["case"], f"{1e6 * time.median:.1f}", least_most, cpu, ratio])
        return [*lines_of(table), "gloo: its time / ringtrain's, median [min-max].", *lines]
