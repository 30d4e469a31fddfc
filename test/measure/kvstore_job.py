"""The cost of a job with servers: its rounds, its start, its memory, while it is idle, beside a late
worker, and under a key that all workers push. Its processes are started here, without MPI, all on this host or on
simulated ones: worker i and server i on host i modulo their number, the scheduler on the first one.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.hosts import HostsUnavailable, SimulatedHosts, simulated_hosts

from ringtrain.bench.arguments import parse_bytes
from ringtrain.bench.measurement import CannotMeasure, Session
from ringtrain.bench.models import MODELS
from ringtrain.bench.peers import OF_STORES
from ringtrain.bench.report import Table, count_text, lines_of, spread_text
from ringtrain.bench.results import Result, Round, Row, Spread, Values
from ringtrain.job.rendezvous import secret
from ringtrain.options.table import environment_name
from ringtrain.runner.start.agent import TOLD_BY_LAUNCHERS

_OWN = "ringtrain"
_OF_LAUNCHERS = (*TOLD_BY_LAUNCHERS, "RINGTRAIN_", "DMLC_")
_PEER_MODULES = {"ps-lite": "ps_lite"}
_OWN_WAYS = 3
_RATIOS = {"round_s": "time", "processor_s": "processor", "thread_s": "busiest thread"}
_END_S = 30.0
# quantity -> what it is called, and by what it is multiplied
_COLUMNS = {
    "round_s": ("ms of a round", 1e3),
    "processor_s": ("ms of processor, all threads", 1e3),
    "kernel_s": ("in the kernel", 1e3),
    "thread_s": ("busiest thread", 1e3),
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
    "hot": ("pushpulls/s of one key for all", 1.0),
    "hot_processor_s": ("ms of processor for one", 1e3),
    "own": ("pushpulls/s of own keys", 1.0),
    "own_processor_s": ("ms of processor for one", 1e3),
    "of_own": ("one key / own keys", 1.0),
}


class KVStoreJob:
    name = "kvstore-job"
    help = "rounds, start, memory, idleness, a late worker and a hot key of a store with servers"
    peers = OF_STORES

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--parts", type=_parts, default=list(_PARTS), metavar="LIST", help=f"of {','.join(_PARTS)} (default: all)")
        add("--workers", type=int, default=2, metavar="N", help="default: %(default)s")
        add("--servers", type=int, default=2, metavar="N", help="default: %(default)s; 0: in the workers")
        add("--type", choices=("dist_async", "dist_sync"), default="dist_async", help="default: %(default)s")
        add("--model", choices=tuple(MODELS), default="resnet50", help="default: %(default)s")
        add("--seconds", type=float, default=3.0, metavar="S", help="of each timing (default: %(default)s)")
        add("--tcp", action="store_true", help="no shared memory")
        add("--simulated-hosts", type=int, default=0, metavar="N", help="which needs root (default: this host)")
        add("--rate", metavar="RATE", help="of each simulated host's link, as tc writes it, such as 1gbit")
        add("--sizes", type=_sizes, default=[], metavar="LIST", help="bytes of keys that have a round of their own")
        add("--hot-bytes", type=parse_bytes, default=8 << 20, metavar="SIZE", help="of the hot key (default: 8M)")
        add("--hot-workers", type=_counts, default=[1, 2, 4, 8], metavar="LIST", help="default: 1,2,4,8")
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
        session.expect(len(arguments.parts))
        with _hosts(arguments) as hosts:
            place = _Place(arguments, hosts)
            return [row for part in arguments.parts for row in _rows(part, place, competitors)]

    def table(self, result: Result) -> list[str]:
        lines: list[str] = []
        for row in result.rows:
            first = row.rounds[0].values
            names = [name for name in _COLUMNS if any(name in values for values in first.values())]
            peers = [name for name in row.competitors() if "round_s" in names and not name.startswith(_OWN)]
            beside = [(peer, what) for peer in peers for what in _RATIOS]
            ratios = [f"{_RATIOS[what]} of {peer.split(',')[0]} / this" for peer, what in beside]
            table = Table(["", *(_COLUMNS[name][0] for name in names), *ratios], first_is_text=True)
            for competitor in row.competitors():
                cells = [_cell(row, competitor, name) for name in names]
                cells += [
                    "" if peer == competitor else spread_text(row.ratio(peer, competitor, what))
                    for peer, what in beside
                ]
                table.add([competitor, *cells])
            where = ": ".join(row.key[name] for name in ("part", "of") if name in row.key)
            where += f": {row.key['type']}, {count_text(row.key['servers'], 'server')}"
            lines += [where, "", *lines_of(table), ""]
        return lines[:-1]


def _rows(part: str, place: _Place, competitors: Sequence[str]) -> list[Row]:
    arguments = place.arguments
    rows: dict[str, Row] = {}
    for _ in range(arguments.rounds):
        for of, values in _PARTS[part](place, competitors).items():
            key = {"part": part, **({"of": of} if of else {}), "type": arguments.type, "servers": arguments.servers}
            rows.setdefault(of, Row(key, [])).rounds.append(Round(values))
    return list(rows.values())


def _cell(row: Row, competitor: str, quantity: str) -> str:
    """Empty where it has no such quantity."""
    if quantity not in row.rounds[0].values[competitor]:
        return ""
    scale = _COLUMNS[quantity][1]
    return spread_text(Spread(*(scale * value for value in row.spread(competitor, quantity))))


# --- jobs -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hosts(arguments: argparse.Namespace) -> Iterator[SimulatedHosts | None]:
    if not arguments.simulated_hosts:
        yield None
        return
    try:
        with simulated_hosts(arguments.simulated_hosts, arguments.rate) as hosts:
            yield hosts
    except HostsUnavailable as reason:
        raise CannotMeasure(str(reason)) from reason


@dataclass(frozen=True)
class _Place:
    """Where the processes of a job are, and what the command line says of them."""

    arguments: argparse.Namespace
    hosts: SimulatedHosts | None

    def address(self, task: int) -> str:
        return self.hosts.address(task % len(self.hosts.names)) if self.hosts else "127.0.0.1"

    def command(self, task: int, words: Sequence[str]) -> Sequence[str]:
        return self.hosts.command_on(task % len(self.hosts.names), words) if self.hosts else words


class _Process:
    def __init__(self, words: Sequence[str], variables: dict[str, str]):
        own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
        self._process = subprocess.Popen(
            words, env={**own, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def hears(self) -> None:
        """Lets it go on where it waits for that."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

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


class _Job(NamedTuple):
    workers: list[_Process]
    servers: list[_Process]
    scheduler: _Process
    begin: float  # when the first process was started

    def stretch(self) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """Has the workers begin the next stretch. Returns what they say of it, and how long processors worked on it."""
        for worker in self.workers:
            assert worker.says() == {"ready": True}
        pids = [process.pid for process in (*self.workers, *self.servers, self.scheduler)]
        before, kernel_before = _of_threads_s(pids), sum(map(_kernel_s, pids))
        for worker in self.workers:
            worker.hears()
        said = [worker.says() for worker in self.workers]
        used = {thread: until - before.get(thread, 0.0) for thread, until in _of_threads_s(pids).items()}
        kernel_s = sum(map(_kernel_s, pids)) - kernel_before
        return said, {"processor_s": sum(used.values()), "kernel_s": kernel_s, "thread_s": max(used.values())}


@contextlib.contextmanager
def _job(competitor: str, place: _Place, workers: int, words: Sequence[str]) -> Iterator[_Job]:
    arguments = place.arguments
    own = competitor == _OWN
    with tempfile.TemporaryDirectory(prefix="ringtrain-bench-") as folder:
        secret.write(Path(folder, "secret"))
        variables = {
            secret.FILE_VARIABLE: str(Path(folder, "secret")),
            "DMLC_PS_ROOT_URI": place.address(0),
            "DMLC_PS_ROOT_PORT": str(_free_port()),
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(arguments.servers),
            **({"RINGTRAIN_SHARED_MEMORY": "off"} if arguments.tcp else {}),
            **{environment_name(name): value for name, value in arguments.option},
        }

        def start(role: str, task: int, command: Sequence[str]) -> _Process:
            of_task = {"DMLC_ROLE": role, "DMLC_TASK_ID": str(task), "DMLC_NODE_HOST": place.address(task)}
            return _Process(place.command(task, command), {**variables, **of_task})

        begin = time.monotonic()
        started: dict[str, list[_Process]] = {}
        for role, count in (("scheduler", 1), ("server", arguments.servers)):
            serve = [sys.executable, *(["-m", "ringtrain.kvstore", role] if own else ["-c", "import mxnet"])]
            started[role] = [start(role, task, serve) for task in range(count)]
        peer = [] if own else [f"--peer={_PEER_MODULES[competitor]}"]
        work = [sys.executable, "-m", "measure.kvstore_worker", *words, *peer]
        work += [f"--type={arguments.type}", f"--model={arguments.model}", f"--seconds={arguments.seconds}"]
        started["worker"] = [start("worker", task, work) for task in range(workers)]
        job = _Job(started["worker"], started["server"], started["scheduler"][0], begin)
        try:
            yield job
        finally:
            for process in (*job.workers, job.scheduler, *job.servers):
                process.let_end()
            for process in (*job.workers, job.scheduler, *job.servers):
                process.end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- parts ------------------------------------------------------------------------------------------------------------


def _cost(place: _Place, competitors: Sequence[str]) -> dict[str, Values]:
    """Of the start until the slowest worker's first round, of memory, each page divided among those who have it, and of
    the processors while nothing is done."""
    arguments = place.arguments
    values = {}
    for competitor in competitors:
        with _job(competitor, place, arguments.workers, ["cost"]) as job:
            said = [worker.says() for worker in job.workers]
            of_servers = [_memory(server.pid) for server in job.servers]
            of_workers = [_memory(worker.pid) for worker in job.workers]
            own = said[0]["own_bytes"]
            before = [_processor_s(process.pid) for process in (*job.servers, *job.workers)]
            time.sleep(arguments.seconds)
            used = [
                (_processor_s(process.pid) - former) / arguments.seconds
                for process, former in zip((*job.servers, *job.workers), before, strict=True)
            ]
            values[competitor] = {
                "start_s": max(one["first_round_at"] for one in said) - job.begin,
                "worker_bytes": float(max(of_workers) - own),
                "all_bytes": float(sum(of_servers) + sum(of_workers)),
                "idle_worker": max(used[len(job.servers) :]),
            }
            if job.servers:
                values[competitor] |= {"server_bytes": float(max(of_servers))}
                values[competitor] |= {"idle_server": max(used[: len(job.servers)])}
    return {"": values}


def _rounds(place: _Place, competitors: Sequence[str]) -> dict[str, Values]:
    """Those of the slowest worker, each way: of all keys of the model, and of one key of each size."""
    arguments = place.arguments
    rows: dict[str, Values] = {}
    words = ["round", f"--sizes={','.join(map(str, arguments.sizes))}"]
    for competitor in competitors:
        with _job(competitor, place, arguments.workers, words) as job:
            for _ in range((1 + len(arguments.sizes)) * (_OWN_WAYS if competitor == _OWN else 1)):
                said, used = job.stretch()
                of_round = {name: seconds / said[0]["rounds"] for name, seconds in used.items()}
                of_it = {"round_s": max(one["seconds"] for one in said), **of_round}
                rows.setdefault(said[0]["of"], {})[f"{competitor}, {said[0]['way']}"] = of_it
    return rows


def _straggler(place: _Place, competitors: Sequence[str]) -> dict[str, Values]:
    values = {}
    for competitor in competitors:
        with _job(competitor, place, place.arguments.workers, ["straggler"]) as job:
            rates = {name: rate for worker in job.workers for name, rate in worker.says().items()}
        kept = {"kept": rates["late"] / rates["alone"]} if "alone" in rates else {}
        values[competitor] = {**rates, **kept}
    return {"": values}


def _hot(place: _Place, competitors: Sequence[str]) -> dict[str, Values]:
    """How often all workers together push and pull one key, and, without rounds, as long a key for each of them."""
    values: Values = {}
    for competitor in competitors:
        for workers in place.arguments.hot_workers:
            with _job(competitor, place, workers, ["hot", f"--hot-bytes={place.arguments.hot_bytes}"]) as job:
                of_it = values.setdefault(f"{competitor}, {count_text(workers, 'worker')}", {})
                for what in ("hot", "own") if place.arguments.type == "dist_async" else ("hot",):
                    said, used = job.stretch()
                    of_it[what] = sum(one["rate"] for one in said)
                    of_it[f"{what}_processor_s"] = used["processor_s"] / sum(one["rounds"] for one in said)
                if "own" in of_it:
                    of_it["of_own"] = of_it["hot"] / of_it["own"]
    return {"": values}


def _memory(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise CannotMeasure(f"the kernel does not say what memory process {pid} has")


def _of_threads_s(pids: Sequence[int]) -> dict[str, float]:
    """For how long each thread of some processes has had a processor."""
    seconds = {}
    for pid in pids:
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                seconds[file.parts[-2]] = int(file.read_text().split()[0]) * 1e-9
    return seconds


def _kernel_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[12]) / os.sysconf("SC_CLK_TCK")


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# A row of the table for each name that there is beside the part, "" where there is one row alone.
_PARTS: dict[str, Callable[[_Place, Sequence[str]], dict[str, Values]]] = {
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


def _sizes(text: str) -> list[int]:
    sizes = [parse_bytes(one) for one in text.split(",")]
    if any(size % 4 for size in sizes):
        raise argparse.ArgumentTypeError(f'must be sizes of float32, such as 4,64K, not "{text}"')
    return sizes


def _counts(text: str) -> list[int]:
    counts = [int(one) if one.isdecimal() else 0 for one in text.split(",")]
    if 0 in counts:
        raise argparse.ArgumentTypeError(f'must be numbers of workers, such as 1,2, not "{text}"')
    return counts
