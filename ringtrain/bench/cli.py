"""From the command line to a result: start the ranks, or be one of them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import ringtrain
import ringtrain._core as _core
from ringtrain.bench import results
from ringtrain.bench.arguments import EXAMPLES, build_parser, launching_flags
from ringtrain.bench.c10d import C10d
from ringtrain.bench.collectives import COLLECTIVES, Latency, Sweep
from ringtrain.bench.kvstore import KVStore
from ringtrain.bench.links import Links
from ringtrain.bench.measurement import CannotMeasure, Session
from ringtrain.bench.ranks import Job, join
from ringtrain.bench.report import heading
from ringtrain.bench.results import Result, Row
from ringtrain.bench.scaling import Scaling
from ringtrain.bench.step import Step
from ringtrain.bench.torch_step import TorchStep
from ringtrain.job import launched_by

# --- a process that keeps one CPU busy, as a neighbour on a shared machine would --------------------------------------


# It ends by itself when its parent has, however that ended.
_PROGRAM = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def busy_core(cpu: int | None) -> Iterator[None]:
    """Keep this CPU busy meanwhile; None keeps none."""
    if cpu is None:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", _PROGRAM, str(cpu)]) as process:
        try:
            yield
        finally:
            process.kill()


# --- several launches of one measurement: what a launch is lucky with averages out ------------------------------------


class LaunchFailed(Exception):
    """A launch ended without a result."""


def launch(module: str, words: Sequence[str], arguments: argparse.Namespace) -> Result:
    """Measure by `python -m module words` on each number of ranks of `arguments.num_proc`, `arguments.launches` times.

    Raises:
        LaunchFailed: one of them did; the ranks have said why on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="ringtrain-bench-") as folder:
        launches = []
        counts = [count for _ in range(arguments.launches) for count in arguments.num_proc]
        for number, count in enumerate(counts):
            path = Path(folder, f"{number}.json")
            status = subprocess.run(_command_of_launch(module, words, arguments, count, path), check=False).returncode
            if status != 0 or not path.exists():
                raise LaunchFailed(f"launch {number + 1} of {len(counts)} ended with status {status}")
            launches.append(results.load(str(path)))
    merged = results.merge(launches)
    merged.arguments = vars(arguments)
    return merged


def _command_of_launch(
    module: str, words: Sequence[str], arguments: argparse.Namespace, ranks: int, path: Path
) -> list[str]:
    _, of_ranks = launching_flags().parse_known_args(words)
    hosts = ["-H", arguments.hosts] if arguments.hosts else []
    ringrun = [sys.executable, "-m", "ringtrain.run", "--no-prefix-output", "-np", str(ranks), *hosts]
    # MPI's launcher can bring ranks together for both networks
    if arguments.network:
        ringrun += ["--network", "mpi" if "mpi" in arguments.network else "sockets"]
    # for the ranks, standard error is a pipe
    progress = ["--progress"] if sys.stderr.isatty() else []
    return [*ringrun, sys.executable, "-m", module, *of_ranks, *progress, "--quiet", "--json", str(path)]


# --- the command ------------------------------------------------------------------------------------------------------


class Measurement(Protocol):
    """A subcommand. `measure` runs on all ranks; `table` makes lines of a result, on one.

    It may have `peers`, the names of its own in place of the usual ones, and `library`, which must be installed, or a
    function of the arguments that says which; `require_here`, which raises CannotMeasure before ranks are started; and
    `scales`, where its rows say on how many ranks they were measured.
    """

    name: str
    help: str

    def add_flags(self, parser: argparse.ArgumentParser) -> None: ...

    def measure(self, session: Session) -> list[Row]: ...

    def table(self, result: Result) -> list[str]: ...


MEASUREMENTS: tuple[Measurement, ...] = (
    *map(Sweep, COLLECTIVES),
    Step(),
    KVStore(),
    Latency(),
    Links(),
    Scaling(),
    TorchStep(),
    C10d(),
)

# Measurements of developers, which an installation does not have.
_IN_CHECKOUT = ("jax", "overlap", "pending")

# Packages to install where the one with the library's own name must be built from source.
_PACKAGES = {"cupy": "cupy-cuda12x, or cupy-cuda13x where the driver is for CUDA 13"}


def main(
    argv: Sequence[str] | None = None,
    measurements: Sequence[Measurement] = MEASUREMENTS,
    module: str = "ringtrain.bench",
    examples: str = EXAMPLES,
) -> int:
    """Run the command line `argv` (default: sys.argv) and return its exit status.

    Args:
        measurements: the subcommands.
        module: what the ranks run by `python -m`.
        examples: for --help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(measurements, module, examples)
    if words and words[0] in _IN_CHECKOUT and all(one.name != words[0] for one in measurements):
        parser.error(f"{words[0]} is measured in a checkout of ringtrain: cd test && python -m measure {words[0]}")
    arguments = parser.parse_args(words)
    measurement = next(one for one in measurements if one.name == arguments.measurement)
    for wish, library in _libraries_wanted(measurement, arguments).items():
        if importlib.util.find_spec(library) is None:
            parser.error(f"{wish} needs {library}; pip install {_PACKAGES.get(library, library)}")
    if arguments.num_proc is None:
        if arguments.launches > 1 or arguments.hosts:
            parser.error("--launches and -H start ranks, so they need -np")
        result = run_here(measurement, arguments)
    elif len(arguments.num_proc) > 1 and not hasattr(measurement, "scales"):
        parser.error(f"{measurement.name} needs one number of ranks for -np")
    elif launched_by.detect() is not None:
        parser.error("-np starts ranks, and this is one; leave it out under mpirun")
    else:
        try:
            if hasattr(measurement, "require_here") and not arguments.hosts:
                measurement.require_here()
            result = launch(module, words, arguments)
        except (CannotMeasure, LaunchFailed) as error:
            print(f"ringtrain.bench: {error}", file=sys.stderr)
            return 1
    if result is None:
        return 0
    deliver(measurement, arguments, result)
    return int(any(fact.get("problems") for fact in result.facts))


def _libraries_wanted(measurement: Measurement, arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the library that each wish needs, by the name of the flag or the measurement."""
    library = getattr(measurement, "library", "")
    wanted = {"--plot": "matplotlib" if arguments.plot else ""}
    wanted[measurement.name] = library(arguments) if callable(library) else library
    return {wish: one for wish, one in wanted.items() if one}


def run_here(measurement: Measurement, arguments: argparse.Namespace) -> Result | None:
    """Measure as one of the ranks; the result on rank 0, None on the others.

    Ends the process with a sentence of rank 0 if what is wanted cannot be measured here.
    """
    job = join(arguments.network)
    session = Session(job, arguments)
    try:
        with busy_core(arguments.busy_core if job.local_rank == 0 else None):
            rows = measurement.measure(session)
    except CannotMeasure as error:
        sys.exit(f"ringtrain.bench: {error}" if job.rank == 0 else 1)
    environment = _environment(job)
    session.close()
    if job.rank != 0:
        return None
    return Result(measurement.name, vars(arguments), environment, rows, session.facts, session.notes)


def deliver(measurement: Measurement, arguments: argparse.Namespace, result: Result) -> None:
    """Print, save and draw."""
    if not arguments.quiet:
        print("\n".join([*heading(result), *measurement.table(result)]), flush=True)
    if arguments.json:
        results.save(result, arguments.json)
    if arguments.plot:
        from ringtrain.bench.report import draw

        draw(result, arguments.plot)


def _environment(job: Job) -> dict[str, Any]:
    return {
        "ranks": job.size,
        "hosts": job.hosts,
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": platform.processor() or platform.machine(),
        "mpi": _mpi_version() if "mpi4py.MPI" in sys.modules else None,
        "ringtrain": ringtrain.__version__,
        "simd": _core.simd_in_use(),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _mpi_version() -> str:
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"
