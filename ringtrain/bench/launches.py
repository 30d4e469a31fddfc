"""Several launches of one measurement: what a launch is lucky with, such as where its memory lies, averages out."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ringtrain.bench import results
from ringtrain.bench.flags import launching_flags
from ringtrain.bench.results import Result


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
            status = subprocess.run(_command(module, words, arguments, count, path), check=False).returncode
            if status != 0 or not path.exists():
                raise LaunchFailed(f"launch {number + 1} of {len(counts)} ended with status {status}")
            launches.append(results.load(str(path)))
    merged = results.merge(launches)
    merged.arguments = vars(arguments)
    return merged


def _command(module: str, words: Sequence[str], arguments: argparse.Namespace, ranks: int, path: Path) -> list[str]:
    _, of_ranks = launching_flags().parse_known_args(words)
    hosts = ["-H", arguments.hosts] if arguments.hosts else []
    ringrun = [sys.executable, "-m", "ringtrain.run", "--no-prefix-output", "-np", str(ranks), *hosts]
    # MPI's launcher can bring ranks together for both networks
    if arguments.network:
        ringrun += ["--network", "mpi" if "mpi" in arguments.network else "sockets"]
    # for the ranks, standard error is a pipe
    progress = ["--progress"] if sys.stderr.isatty() else []
    return [*ringrun, sys.executable, "-m", module, *of_ranks, *progress, "--quiet", "--json", str(path)]
