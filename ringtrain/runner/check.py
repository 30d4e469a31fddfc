"""`ringrun --check`: whether the hosts can be reached, have the same software, and how fast they talk to each other."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import ringtrain._core as _core
from ringtrain.job import gpus, libmpi
from ringtrain.job.world import tournament
from ringtrain.runner.hosts import Host, is_this_host, remote_shell
from ringtrain.runner.job import Job
from ringtrain.runner.launchers import Launcher, Srun, find_srun, is_without_mpi
from ringtrain.runner.mpi_library import MpiNotFound, probe
from ringtrain.runner.supervise.output import Screen
from ringtrain.runner.supervise.supervisor import Settings, Supervisor, signals_handled
from ringtrain.version import __version__

if TYPE_CHECKING:
    from mpi4py import MPI


# --- what one host has ------------------------------------------------------------------------------------------------


class HostReport(NamedTuple):
    """Versions as text; `host` is the name that the host has for itself."""

    host: str
    python: str
    ringtrain: str
    mpi: str


def describe_host(initialize: bool = False) -> HostReport:
    """Describe this host; with `initialize`, MPI is initialised on the way. A host may have none."""
    try:
        mpi = libmpi.describe(initialize)
        words = f"{mpi['library']} {mpi['version']}"
    except (ImportError, RuntimeError):
        words = "none"
    return HostReport(socket.gethostname(), platform.python_version(), __version__, words)


# --- between each two hosts -------------------------------------------------------------------------------------------


RESULT = "ringrun-check "

_TRIPS_S = 0.1
_MESSAGE_BYTES = 1 << 20
_SEND_S = 0.25
# so many messages are under way at once, or each would wait for the one before
_WINDOW = 4
_MORE, _LAST = 1, 2


class Pair(NamedTuple):
    """Bandwidths from `first` to `second` and back; the clock of `second` minus that of `first`."""

    first: int
    second: int
    there_mb_per_s: float
    back_mb_per_s: float
    round_trip_us: float
    clock_offset_ms: float


def measure_pairs() -> None:
    report = describe_host(initialize=True)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    measured = []
    for pairs in tournament(world.size):
        world.Barrier()
        for first, second in pairs:
            if world.rank == first:
                measured.append(_measure(world, first, second))
            elif world.rank == second:
                _answer_pair(world, first)
    gathered = world.gather((report, measured))
    if gathered is not None:
        reports = [report for report, _ in gathered]
        print(RESULT + json.dumps([reports, [pair for _, pairs in gathered for pair in pairs]]), flush=True)


def _measure(world: MPI.Comm, first: int, second: int) -> Pair:
    trips = []
    until = time.monotonic() + _TRIPS_S
    is_last = False
    while not is_last:
        is_last = time.monotonic() > until
        begin = time.time()
        world.send(is_last, second)
        there = world.recv(source=second)
        end = time.time()
        trips.append((end - begin, there - (begin + end) / 2))
    # the shortest trip leaves the least room for an error
    round_trip_s, offset_s = min(trips)
    there = _send_for_a_while(world, second)
    _receive(world, second)
    return Pair(first, second, there, world.recv(source=second), round_trip_s * 1e6, offset_s * 1e3)


def _answer_pair(world: MPI.Comm, first: int) -> None:
    is_last = False
    while not is_last:
        is_last = world.recv(source=first)
        world.send(time.time(), first)
    _receive(world, first)
    world.send(_send_for_a_while(world, first), first)


def _send_for_a_while(world: MPI.Comm, to: int) -> float:
    """In MB/s."""
    message = bytearray(_MESSAGE_BYTES)
    begin = time.monotonic()
    under_way: deque[MPI.Request] = deque()
    count, tag = 0, _MORE
    while tag == _MORE:
        tag = _LAST if time.monotonic() - begin > _SEND_S else _MORE
        under_way.append(world.Isend(message, to, tag))
        count += 1
        if len(under_way) == _WINDOW:
            under_way.popleft().Wait()
    for request in under_way:
        request.Wait()
    world.recv(source=to)
    return count * _MESSAGE_BYTES / (time.monotonic() - begin) / 1e6


def _receive(world: MPI.Comm, source: int) -> None:
    from mpi4py import MPI

    message, status = bytearray(_MESSAGE_BYTES), MPI.Status()
    while status.Get_tag() != _LAST:
        world.Recv(message, source, MPI.ANY_TAG, status)
    world.send(None, source)


# --- all hosts --------------------------------------------------------------------------------------------------------


_SSH_S = 12.0
_MPI_S = 15.0
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")


# The scripts of the ranks: one that finds out how fast MPI is, and one for hosts that need none. Both print the same.
_OVER_MPI = ["-m", "ringtrain.runner.check", "pairs"]
_OVER_SOCKETS = f"""\
import json, numpy, ringtrain as hvd
from ringtrain.runner.check import describe_host
hvd.init()
hvd.allreduce(numpy.ones(1 << 16))
reports = hvd.allgather_object(describe_host())
if hvd.rank() == 0:
    print({RESULT!r} + json.dumps([reports, []]), flush=True)"""


class Reached(NamedTuple):
    """The answer of one host: a report, or an error instead of it."""

    name: str
    report: HostReport | None
    error: str


def check(job: Job, launcher: Launcher) -> int:
    """Print what was found of the hosts of `job`. Returns 0 if a job can run on them, else 1."""
    hosts = job.hosts or [Host(socket.gethostname(), 1)]
    if not isinstance(launcher, Srun):
        reached = reach(hosts, job)
        print(table([("host", "Python", "ringtrain", "MPI"), *map(_row_of_host, reached)]))
        complaints = differences(reached)
        if complaints:
            print("\n".join(complaints))
            return 1
    return _check_job(hosts, job, launcher)


def reach(hosts: Sequence[Host], job: Job) -> list[Reached]:
    """Ask all hosts at once, as the launcher reaches them; this host is asked without ssh."""
    begun = [_ask(host, job) for host in hosts]
    deadline = time.monotonic() + _SSH_S
    return [_answer(host, process, deadline) for host, process in zip(hosts, begun, strict=True)]


def differences(reached: Sequence[Reached]) -> list[str]:
    """A sentence for each thing that keeps a job from running on these hosts."""
    sentences = [f"{one.name} cannot be used: {one.error}" for one in reached if one.report is None]
    reports = [(one.name, one.report) for one in reached if one.report is not None]
    for field, word in (("python", "Python"), ("ringtrain", "ringtrain"), ("mpi", "MPI")):
        where: dict[str, list[str]] = {}
        for name, one in reports:
            where.setdefault(getattr(one, field), []).append(name)
        if len(where) > 1:
            listed = "; ".join(f"{version} on {', '.join(names)}" for version, names in where.items())
            sentences.append(f"{word} differs: {listed}")
    return sentences


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _row_of_host(one: Reached) -> tuple[str, str, str, str]:
    if one.report is None:
        return one.name, "-", "-", "-"
    return one.name, one.report.python, one.report.ringtrain, one.report.mpi


def _ask(host: Host, job: Job) -> subprocess.Popen[str] | OSError:
    words = [sys.executable, "-m", "ringtrain.runner.check", "host"]
    srun = find_srun(job.environment) if job.hosts_are_allotted else None
    if is_this_host(host.name):
        pass
    elif srun is not None:
        # there all launchers start their daemons by Slurm, and ssh is often forbidden
        words = [srun, "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", f"--nodelist={host.name}", *words]
    else:
        variables = [f"{name}={job.environment[name]}" for name in _PASSED_ON if name in job.environment]
        words = [*remote_shell(job.environment, job.ssh_options), host.name, shlex.join(["env", *variables, *words])]
    try:
        return subprocess.Popen(
            words,
            env=job.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # a start-up file of the shell may print anything
            start_new_session=True,
        )
    except OSError as error:
        return error


def _answer(host: Host, process: subprocess.Popen[str] | OSError, deadline: float) -> Reached:
    if isinstance(process, OSError):
        return Reached(host.name, None, f"{process.filename}: {process.strerror}")
    try:
        printed, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Reached(host.name, None, f"it did not answer in {_SSH_S:g} s")
    if process.returncode != 0:
        last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return Reached(host.name, None, last)
    _, found, report = printed.rpartition(RESULT)
    if not found:
        return Reached(host.name, None, "it ended with exit code 0 and said nothing of what it has")
    return Reached(host.name, HostReport(*json.loads(report)), "")


def _check_job(hosts: Sequence[Host], job: Job, launcher: Launcher) -> int:
    """Start one rank on each host, as a job would be, and print what they measured."""
    starts, words = ("sockets join", ["-c", _OVER_SOCKETS]) if is_without_mpi(launcher) else ("MPI starts", _OVER_MPI)
    command = [sys.executable, *words]
    one_rank_each = [Host(host.name, 1) for host in hosts] if job.hosts else []
    probe = job._replace(command=command, num_proc=len(hosts), hosts=one_rank_each, hosts_are_allotted=False)
    printed = {False: b"", True: b""}

    def keep(data: bytes, is_error: bool) -> None:
        printed[is_error] += data

    supervisor = Supervisor(launcher, probe, Settings(False, _MPI_S, None, False), Screen(keep))
    timer = threading.Timer(_MPI_S, supervisor.end, (signal.SIGTERM,))
    with signals_handled(supervisor):
        timer.start()
        outcome = supervisor.run()
        timer.cancel()
    _, found, result = printed[False].decode(errors="replace").rpartition(RESULT)
    if outcome.code != 0 or not found:
        said = printed[True].decode(errors="replace").rstrip()
        why = outcome.explanation if outcome.failures or not said else said
        print(f"{starts} no job on {_listed(hosts)} (exit code {outcome.code}):\n{why}")
        return 1
    reports, pairs = json.loads(result.splitlines()[0])
    if isinstance(launcher, Srun):
        reached = [Reached(one.host, one, "") for one in (HostReport(*one) for one in reports)]
        print(table([("host", "Python", "ringtrain", "MPI"), *map(_row_of_host, reached)]))
    if pairs:
        print()
        print(table_of_pairs([host.name for host in hosts], [Pair(*pair) for pair in pairs]))
    print(f"\n{starts} jobs on {_listed(hosts)}")
    return 0


def table_of_pairs(names: Sequence[str], pairs: Sequence[Pair]) -> str:
    """A line for each two hosts; the clock is that of the second host against the first one's."""
    head = ("first", "second", "MB/s there", "MB/s back", "round trip in us", "clock in ms")
    rows = [
        (
            names[pair.first],
            names[pair.second],
            f"{pair.there_mb_per_s:.0f}",
            f"{pair.back_mb_per_s:.0f}",
            f"{pair.round_trip_us:.0f}",
            f"{pair.clock_offset_ms:+.2f}",
        )
        for pair in sorted(pairs)
    ]
    return table([head, *rows])


def _listed(hosts: Sequence[Host]) -> str:
    return ", ".join(host.name for host in hosts)


# --- `ringrun --check-build` ------------------------------------------------------------------------------------------


def build_report() -> str:
    """In the shape that `horovodrun --check-build` has."""
    mpi = _has_mpi()
    frameworks = {"TensorFlow": False, "PyTorch": _is_installed("torch"), "MXNet": _is_installed("mxnet")}
    topics = {
        "Available Frameworks": frameworks,
        "Available Controllers": {"MPI": mpi, "Gloo": False},
        "Available Tensor Operations": {"NCCL": _has_nccl(), "DDL": False, "CCL": False, "MPI": mpi, "Gloo": False},
    }
    lines = [f"ringtrain v{__version__}:"]
    for topic, names in topics.items():
        lines += ["", f"{topic}:", *(f"    [{'X' if is_there else ' '}] {name}" for name, is_there in names.items())]
    without = "" if mpi else " Without MPI, ringtrain's own sockets connect the ranks: network=sockets."
    return "\n".join([*lines, "", f"Nothing is built for these; `python -m ringtrain.doctor` says more.{without}"])


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def _has_mpi() -> bool:
    try:
        probe()
    except MpiNotFound:
        return False
    return True


def _has_nccl() -> bool:
    """As `nccl_built()`, which counts no NCCL without a GPU."""
    if _core.gpu_count() == 0:
        return False
    try:
        return _core.nccl_version(gpus.nccl_candidates())[0] > 0
    except _core.RingtrainError:
        return False


if __name__ == "__main__":
    if sys.argv[1] == "host":
        print(RESULT + json.dumps(describe_host()))
    else:
        measure_pairs()
