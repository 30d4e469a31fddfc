"""One job with one injection, under a launcher that leaves the other ranks alone, and what it leaves behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measure.faults.injection import ENDING, Injection, Kind
from ringtrain.options.table import environment_name
from ringtrain.runner.hosts import Host
from ringtrain.runner.job import Job, environment_of_ranks
from ringtrain.runner.launchers import launcher_of_mpi
from ringtrain.runner.mpi_library import MPICH, OPEN_MPI, family_of, probe

# Every process of a job has this variable with the name of its folder, so /proc shows who is left.
_MARK = "RINGTRAIN_BENCH_JOB"
# Shared memory of other jobs of this machine has its name for milliseconds only.
_LEFTOVER_S = 1.0
_ENDING_S = 10.0
# More ranks than cores: a pool of threads in each would only be in the way.
_TEST_FOLDER = str(Path(__file__).resolve().parents[2])  # where `measure` is
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Report:
    """The result of another rank: the name of the error's type ("" for none), its text, and when; `again`: the type
    of what one more operation got."""

    error: str
    text: str
    at: float
    again: str


@dataclass(frozen=True)
class Place:
    """Where the ranks are, and what the launcher itself runs on: a command in front of its own, and variables."""

    ranks: int
    hosts: Sequence[Host] = ()
    prefix: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The observations. `returncode` is None for a launcher that had to be killed, and `ranks_left` are processes
    of ranks that were there then.

    `orphans` are ranks that outlived the launcher, `daemons` what it had started on other hosts and left behind,
    `leftovers` names in /dev/shm.
    """

    injection: Injection
    place: Place
    struck_at: float | None
    reports: dict[int, Report]
    returncode: int | None
    ranks_left: list[int]
    orphans: list[int]
    daemons: list[int]
    leftovers: list[str]
    output: str

    def silent(self) -> list[int]:
        """Ranks that hung: all but the victims and those that said what they got."""
        return sorted(set(range(self.place.ranks)) - self.injection.victims() - set(self.reports))

    def slowest_s(self) -> float:
        """Seconds from the fault to the last error."""
        assert self.struck_at is not None
        return max(report.at for report in self.reports.values()) - self.struck_at


def run(
    injection: Injection, place: Place, options: Mapping[str, object] | None = None, limit_s: float = 30
) -> Outcome:
    """Start the job and wait for its end, `limit_s` at most. Raises MpiNotFound."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name, _ended(name):
        folder = Path(name)
        injection.write(folder / "injection.json")
        variables = {environment_name(key): str(value) for key, value in (options or {}).items()}
        with open(folder / "output", "wb") as output:
            job = _job(folder, place, variables)
            process = subprocess.Popen(
                [*place.prefix, *launcher_line(job, leaves_alone=injection.kind in ENDING)],
                env={**job.environment, **place.environment},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            returncode = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            returncode = None
        outliving = _outliving(name) if returncode is not None else []
        orphans = [pid for pid in outliving if _is_rank(pid)]
        ranks_left = []
        if returncode is None:
            ranks_left = [pid for pid in processes_of(name) if _is_rank(pid)]
            process.kill()
            process.wait()
        return Outcome(
            injection,
            place,
            _struck_at(folder),
            {rank: report for rank in range(place.ranks) if (report := _report(folder / f"rank{rank}.json"))},
            returncode,
            ranks_left,
            orphans,
            [pid for pid in outliving if pid not in orphans],
            leftovers(),
            (folder / "output").read_text(errors="replace"),
        )


def _job(folder: Path, place: Place, variables: Mapping[str, str]) -> Job:
    rank = [sys.executable, "-m", "measure.faults.rank", str(folder)]
    import_path = os.pathsep.join([_TEST_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": import_path, **variables}
    environment = marked(environment, str(folder))
    return Job(rank, place.ranks, list(place.hosts), environment_of_ranks(environment))


def launcher_line(job: Job, leaves_alone: bool) -> list[str]:
    """The launcher's command line, perhaps with what makes it leave the other ranks alone when one ends."""
    mpi = _probe()
    program, *rest = launcher_of_mpi("mpirun", mpi["library"], mpi["path"], os.environ).arguments(job)
    alone = ["--with-ft", "ulfm"] if family_of(mpi["library"]) is OPEN_MPI else ["-disable-auto-cleanup"]
    return [program, *(alone if leaves_alone else []), *rest]


def ends_all(kind: Kind) -> bool:
    """Whether the launcher may end the other ranks before they can say what they see.

    MPICH's does so when a process ends badly, in 5.0 whatever it is told.
    """
    return family_of(_probe()["library"]) is MPICH and kind in ENDING


@functools.cache
def _probe() -> Mapping[str, str]:
    return probe()


def marked(environment: Mapping[str, str], job: str) -> dict[str, str]:
    """The environment in which all processes of `job` are to run."""
    return {**environment, _MARK: job}


def processes_of(job: str) -> list[int]:
    """Process ids of the job, zombies excepted: these have no environment any more."""
    entry = f"{_MARK}={job}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or it is another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _is_rank(pid: int) -> bool:
    """Whether it runs Python, as ranks do, and launchers and their daemons do not."""
    try:
        return Path(f"/proc/{pid}/exe").resolve().name.startswith("python")
    except OSError:
        return False


def leftovers() -> list[str]:
    """Names in /dev/shm that stay."""
    first = _segments()
    deadline = time.monotonic() + _LEFTOVER_S
    while first and time.monotonic() < deadline:
        time.sleep(0.05)
        first &= _segments()
    return sorted(first)


def _segments() -> set[str]:
    # Not the folder of a user who has no other one for temporary files.
    return {one.name for one in os.scandir("/dev/shm") if one.name.startswith("ringtrain-") and one.is_file()}


def _outliving(job: str) -> list[int]:
    """Processes that are there a moment after the launcher has ended."""
    deadline = time.monotonic() + _LEFTOVER_S
    while (left := processes_of(job)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@contextlib.contextmanager
def _ended(job: str) -> Iterator[None]:
    """Whatever happens, no process stays, but for one that the kernel does not let go within `_ENDING_S`."""
    try:
        yield
    finally:
        deadline = time.monotonic() + _ENDING_S
        while (left := processes_of(job)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def _struck_at(folder: Path) -> float | None:
    path = folder / "struck"
    return float(path.read_text()) if path.exists() else None


def _report(path: Path) -> Report | None:
    return Report(**json.loads(path.read_text())) if path.exists() else None
