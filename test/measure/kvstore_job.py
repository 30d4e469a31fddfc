"""The cost of a job with servers: its rounds, its start, its memory, while it is idle, beside a late
worker, and under a key that all workers push. Its processes are started here, without MPI.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ringtrain.bench.measurement import CannotMeasure, Session
from ringtrain.bench.models import MODELS
from ringtrain.bench.peers import OF_STORES
from ringtrain.bench.report import Table, count_text, lines_of, spread_text
from ringtrain.bench.results import Result, Round, Row, Spread
from ringtrain.job.rendezvous import secret
from ringtrain.runner.start.agent import TOLD_BY_LAUNCHERS

_OWN = "ringtrain"
_OF_LAUNCHERS = (*TOLD_BY_LAUNCHERS, "RINGTRAIN_", "DMLC_")
_PEER_MODULES = {"ps-lite": "ps_lite"}
_END_S = 30.0
# quantity -> what it is called, and by what it is multiplied
_COLUMNS = {
    "round_s": ("ms of a round", 1e3),
    "start_s": ("first round after s", 1.0),
    "server_bytes": ("server MB", 1e-6),
    "worker_bytes": ("worker MB beyond its arrays", 1e-6),
    "all_bytes": ("all MB", 1e-6),
    "idle_server": ("idle server % CPU", 100.0),
    "idle_worker": ("idle worker % CPU", 100.0),
    "alone": ("rounds/s alone", 1.0),
    "in time": ("in time", 1.0),
    "late": ("beside a late one", 1.0),
    "kept": ("kept of alone", 1.0),
    "updates": ("updates/s of the hot key", 1.0),
}


class KVStoreJob:
    name = "kvstore-job"
    help = "rounds, start, memory, idleness, a late worker and a hot key of a store with servers"
    peers = OF_STORES

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--parts", type=_parts, default=list(_PARTS), metavar="LIST", help=f"of {','.join(_PARTS)} (default: all)")
        add("--workers", type=int, default=2, metavar="N", help="default: %(default)s; 4 for the hot key")
        add("--servers", type=int, default=2, metavar="N", help="default: %(default)s; 0: in the workers")
        add("--type", choices=("dist_async", "dist_sync"), default="dist_async", help="default: %(default)s")
        add("--model", choices=tuple(MODELS), default="resnet50", help="default: %(default)s")
        add("--seconds", type=float, default=3.0, metavar="S", help="of each timing (default: %(default)s)")
        add("--tcp", action="store_true", help="no shared memory")
        parser.set_defaults(rounds=3)

    def measure(self, session: Session) -> list[Row]:
        if session.job.size > 1:
            raise CannotMeasure("kvstore-job starts its processes itself; leave out -np")
        arguments = session.arguments
        competitors = [_OWN]
        for peer in arguments.peers:
            if importlib.util.find_spec("mxnet") is None:
                session.notes.append(f"{peer} does not take part: No module named 'mxnet'")
            elif arguments.servers > 0:
                competitors.append(peer)
        rows = []
        session.expect(len(arguments.parts))
        for part in arguments.parts:
            rounds = [Round(_PARTS[part](arguments, competitors)) for _ in range(arguments.rounds)]
            rows.append(Row({"part": part, "type": arguments.type, "servers": arguments.servers}, rounds))
        return rows

    def table(self, result: Result) -> list[str]:
        lines: list[str] = []
        for row in result.rows:
            first = row.rounds[0].values
            names = [name for name in _COLUMNS if any(name in values for values in first.values())]
            peers = [name for name in row.competitors() if "round_s" in names and not name.startswith(_OWN)]
            ratios = [f"time of {peer.split(',')[0]} / this" for peer in peers]
            table = Table(["", *(_COLUMNS[name][0] for name in names), *ratios], first_is_text=True)
            for competitor in row.competitors():
                cells = [_cell(row, competitor, name) for name in names]
                cells += [
                    "" if one == competitor else spread_text(row.ratio(one, competitor, "round_s")) for one in peers
                ]
                table.add([competitor, *cells])
            where = f"{row.key['part']}: {row.key['type']}, {count_text(row.key['servers'], 'server')}"
            lines += [where, "", *lines_of(table), ""]
        return lines[:-1]


def _cell(row: Row, competitor: str, quantity: str) -> str:
    """Empty where it has no such quantity."""
    if quantity not in row.rounds[0].values[competitor]:
        return ""
    scale = _COLUMNS[quantity][1]
    return spread_text(Spread(*(scale * value for value in row.spread(competitor, quantity))))


# --- jobs -------------------------------------------------------------------------------------------------------------


class _Process:
    def __init__(self, words: Sequence[str], variables: dict[str, str]):
        own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
        self._process = subprocess.Popen(
            words, env={**own, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def says(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CannotMeasure(f"process {self.pid} of the job ended with {self._process.wait()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def let_end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> None:
        """Also where it has not ended by itself."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def _job(
    competitor: str, arguments: argparse.Namespace, workers: int, servers: int, words: Sequence[str], **options: str
) -> Iterator[tuple[list[_Process], list[_Process], float]]:
    """Its workers, its servers, and when the first process was started."""
    own = competitor == _OWN
    with tempfile.TemporaryDirectory(prefix="ringtrain-bench-") as folder:
        secret.write(Path(folder, "secret"))
        variables = {
            secret.FILE_VARIABLE: str(Path(folder, "secret")),
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(_free_port()),
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(servers),
            "DMLC_NODE_HOST": "127.0.0.1",
            **({"RINGTRAIN_SHARED_MEMORY": "off"} if arguments.tcp else {}),
            **options,
        }
        begin = time.monotonic()
        started = []
        for role, count in (("scheduler", 1), ("server", servers)):
            serve = [sys.executable, *(["-m", "ringtrain.kvstore", role] if own else ["-c", "import mxnet"])]
            for task in range(count):
                started.append(_Process(serve, {**variables, "DMLC_ROLE": role, "DMLC_TASK_ID": str(task)}))
        peer = [] if own else [f"--peer={_PEER_MODULES[competitor]}"]
        work = [sys.executable, "-m", "measure.kvstore_worker", *words, *peer]
        work += [f"--type={arguments.type}", f"--model={arguments.model}", f"--seconds={arguments.seconds}"]
        of_workers = [
            _Process(work, {**variables, "DMLC_ROLE": "worker", "DMLC_TASK_ID": str(task)}) for task in range(workers)
        ]
        try:
            yield of_workers, started[1:], begin
        finally:
            for process in (*of_workers, *started):
                process.let_end()
            for process in (*of_workers, *started):
                process.end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- parts ------------------------------------------------------------------------------------------------------------


def _cost(arguments: argparse.Namespace, competitors: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of the start until the slowest worker's first round, of memory, each page divided among those who have it, and of
    the processors while nothing is done."""
    values = {}
    for competitor in competitors:
        with _job(competitor, arguments, arguments.workers, arguments.servers, ["cost"]) as (workers, servers, begin):
            said = [worker.says() for worker in workers]
            of_servers = [_memory(server.pid) for server in servers]
            of_workers = [_memory(worker.pid) for worker in workers]
            own = said[0]["own_bytes"]
            before = [_processor_s(process.pid) for process in (*servers, *workers)]
            time.sleep(arguments.seconds)
            used = [
                (_processor_s(process.pid) - former) / arguments.seconds
                for process, former in zip((*servers, *workers), before, strict=True)
            ]
            values[competitor] = {
                "start_s": max(one["first_round_at"] for one in said) - begin,
                "worker_bytes": float(max(of_workers) - own),
                "all_bytes": float(sum(of_servers) + sum(of_workers)),
                "idle_worker": max(used[len(servers) :]),
            }
            if servers:
                values[competitor] |= {"server_bytes": float(max(of_servers)), "idle_server": max(used[: len(servers)])}
    return values


def _rounds(arguments: argparse.Namespace, competitors: Sequence[str]) -> dict[str, dict[str, float]]:
    """Those of the slowest worker, each way."""
    values = {}
    for competitor in competitors:
        with _job(competitor, arguments, arguments.workers, arguments.servers, ["round"]) as (workers, _, _):
            said = [worker.says() for worker in workers]
        for way in said[0]:
            values[f"{competitor}, {way}"] = {"round_s": max(one[way] for one in said)}
    return values


def _straggler(arguments: argparse.Namespace, competitors: Sequence[str]) -> dict[str, dict[str, float]]:
    values = {}
    for competitor in competitors:
        with _job(competitor, arguments, arguments.workers, arguments.servers, ["straggler"]) as (workers, _, _):
            rates = {name: rate for worker in workers for name, rate in worker.says().items()}
        kept = {"kept": rates["late"] / rates["alone"]} if "alone" in rates else {}
        values[competitor] = {**rates, **kept}
    return values


def _hot(arguments: argparse.Namespace, competitors: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of ringtrain alone: with one server of one thread, and with two of two."""
    values = {}
    for servers, threads in ((1, 1), (2, 2)):
        with _job(_OWN, arguments, 4, servers, ["hot"], RINGTRAIN_KV_THREADS=str(threads)) as (workers, _, _):
            updates = sum(worker.says()["updates"] for worker in workers)
        name = f"{count_text(servers, 'server')} of {count_text(threads, 'thread')}, 4 workers"
        values[name] = {"updates": updates}
    return values


def _memory(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise CannotMeasure(f"the kernel does not say what memory process {pid} has")


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_PARTS: dict[str, Callable[[argparse.Namespace, Sequence[str]], dict[str, dict[str, float]]]] = {
    "round": _rounds,
    "cost": _cost,
    "straggler": _straggler,
    "hot": _hot,
}


def _parts(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(_PARTS):
        raise argparse.ArgumentTypeError(f'must be of {",".join(_PARTS)}, not "{text}"')
    return names
