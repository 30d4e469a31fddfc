"""`ringtrain.run(function, np=4)`: a Python function on several ranks, from a notebook or a script.

The function and the results travel through files in a folder that all ranks see.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ringtrain import launchers
from ringtrain.pickling import pickler
from ringtrain.run.arguments import (
    check_args,
    check_env,
    check_function,
    check_hosts,
    check_num_proc,
    check_start_timeout_s,
)
from ringtrain.run.hosts import UsageError
from ringtrain.run.job import Job, environment_of_ranks
from ringtrain.run.launch import choose_launcher
from ringtrain.run.mpi_library import probe
from ringtrain.run.printing import print_to_python, terminal_or_notebook
from ringtrain.run.screen import Screen
from ringtrain.run.supervise import Outcome, Settings, Supervisor
from ringtrain.run.termination import unwinds_before_termination

Result = TypeVar("Result")

CALL_FILE = "call"

# `-m` would look into the current folder before the caller's import path
_WORKER = """\
import sys
sys.path[:] = sys.argv.pop(1).split(":")
from ringtrain.run.worker import main
main(sys.argv[1])"""


class RankTraceback(Exception):
    """The cause of an exception that a rank has raised: the traceback that it had there, as text."""

    def __init__(self, rank: int, text: str):
        super().__init__(f"on rank {rank}:\n\n{text}")


def run(
    function: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 4,
    *,
    hosts: str | None = None,
    env: Mapping[str, str] | None = None,
    folder: str | None = None,
    start_timeout_s: float = 120,
    verbose: bool = False,
) -> list[Result]:
    """Call `function(*args, **kwargs)` on `np` ranks and return their results, in the order of the ranks.

    Each rank is a new process with this process's environment and import path; the function itself calls
    `ringtrain.init()`. What the ranks print appears here, each line with its rank before it.

    Args:
        function: pickled by cloudpickle if that is installed, which also takes lambdas and what a notebook or a script
            defines; else by pickle, which takes functions of modules only. So are the arguments and the results.
        hosts: `h1:2,h2:2`, as for ringrun; None is this host.
        env: variables for the ranks, besides those of this process.
        folder: where the function and the results are put, a folder that all hosts share; None is a temporary one of
            this host.
        start_timeout_s: how long the ranks may take to start, in seconds; 0 waits for ever.
        verbose: say where the ranks run.

    Raises:
        TypeError: an argument is of the wrong type, or something cannot be pickled: the function, its arguments or
            its result.
        ValueError: an argument is out of its range.
        UsageError: this process is a rank itself, or the hosts are none or too few.
        MpiNotFound: there is no MPI, or no launcher of it.
        RuntimeError: a rank ended without a result, also by sys.exit; or the ranks did not start.
        Exception: what the function raised on the rank that failed first; its cause shows the traceback.
    """
    launch = launchers.detect()
    if launch is not None and launch.size != 1:
        raise UsageError(f"ringtrain.run was called by rank {launch.rank} of a job; call it outside of one")
    check_function(function)
    num_proc, added = check_num_proc(np), check_env(env)
    slots = check_hosts(hosts, num_proc)
    settings = Settings(num_proc > 1, check_start_timeout_s(start_timeout_s), None, verbose)
    call = _pickled(function, check_args(args), dict(kwargs or {}))
    mpi = probe()
    launcher = choose_launcher("auto", mpi["library"], mpi["path"], os.environ)
    with (
        unwinds_before_termination(),
        tempfile.TemporaryDirectory(prefix="ringtrain-run-", dir=folder) as own_folder,
    ):
        Path(own_folder, CALL_FILE).write_bytes(call)
        command = [sys.executable, "-c", _WORKER, _import_path(), own_folder]
        environment = environment_of_ranks({**os.environ, **added})
        job = Job(command, num_proc, slots, environment, exported=tuple(sorted(added)))
        screen = Screen(print_to_python, terminal_or_notebook)
        outcome = Supervisor(launcher, job, settings, screen).run()
        return _results(outcome, num_proc, Path(own_folder))


def result_file(folder: Path, rank: int) -> Path:
    """Where a rank puts the pickled result."""
    return folder / f"result.{rank}"


def error_file(folder: Path, rank: int) -> Path:
    """Where a rank puts the pickled exception and the text of its traceback."""
    return folder / f"error.{rank}"


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    chosen = pickler()
    name = getattr(function, "__qualname__", repr(function))
    if chosen is pickle and getattr(function, "__module__", None) == "__main__":
        raise TypeError(
            f"{name} is defined in a notebook or in the script itself, which the ranks cannot import; "
            "run `pip install cloudpickle`, or move it to a module"
        )
    try:
        data: bytes = chosen.dumps((function, args, kwargs))
    except Exception as error:
        remedy = "" if chosen is not pickle else "; run `pip install cloudpickle`, or use a function of a module"
        raise TypeError(f"{name} or its arguments cannot be pickled: {error}{remedy}") from error
    return data


def _import_path() -> str:
    # an empty entry is the current folder
    return ":".join(os.path.abspath(entry) for entry in sys.path)


def _results(outcome: Outcome, num_proc: int, folder: Path) -> list[Any]:
    """What the ranks have left in `folder`, or the exception for why they have not."""
    failures = outcome.failures
    silent = next((rank for rank in outcome.ended_well if not result_file(folder, rank).exists()), None)
    if silent is not None and (not failures or failures[0].is_consequence):
        raise RuntimeError(f"rank {silent} ended without a result (exit code 0)")
    if failures and error_file(folder, failures[0].rank).exists():
        raise _error_of(failures[0].rank, folder)
    if outcome.code != 0:
        raise RuntimeError(outcome.explanation)
    return [pickle.loads(result_file(folder, rank).read_bytes()) for rank in range(num_proc)]


def _error_of(rank: int, folder: Path) -> BaseException:
    error, text = pickle.loads(error_file(folder, rank).read_bytes())
    error.__cause__ = RankTraceback(rank, text)
    return error  # type: ignore[no-any-return]
