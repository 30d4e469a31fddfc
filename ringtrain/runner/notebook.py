"""`%load_ext ringtrain` gives a notebook the cell magic `%%ringtrain`, which runs the cell on several ranks."""

from __future__ import annotations

import argparse
import linecache
import shlex
from collections.abc import Mapping
from typing import Any, NoReturn

from ringtrain.job import launched_by
from ringtrain.runner import function
from ringtrain.runner.hosts import UsageError

_CELL = "<cell of %%ringtrain>"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%ringtrain: {message}\n{self.format_usage().strip()}")


def _parser() -> _Parser:
    parser = _Parser(prog="%%ringtrain", add_help=False, allow_abbrev=False)
    parser.add_argument("-np", "--num-proc", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("-H", "--hosts", metavar="h1:2,h2:2", help="where they run; this host without it")
    parser.add_argument("--start-timeout", type=float, metavar="S", help="how long they may take to start; 120 s")
    parser.add_argument(
        "--in", dest="given", nargs="+", metavar="NAME", default=[], help="variables that each rank gets"
    )
    parser.add_argument(
        "--out", dest="wanted", nargs="+", metavar="NAME", default=[], help="variables that rank 0 gives back"
    )
    return parser


def register(shell: Any) -> None:
    """Give the IPython `shell` the cell magic."""

    def run_cell(line: str, cell: str) -> None:
        given = run(line, cell, shell.user_ns)
        shell.push(given)

    run_cell.__doc__ = f"Run the cell on several ranks, each a new process.\n\n{_parser().format_help()}"
    shell.register_magic_function(run_cell, "cell", "ringtrain")


def run(line: str, cell: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Run `cell` as a script on the ranks that `line` asks for, and return the variables that it asks back of rank 0.

    The output of the ranks appears as they print it. Mirrors `%%px` of ipyparallel; the ranks end with the cell.

    Args:
        line: the words behind `%%ringtrain`: `-np 4 --in model --out losses`.
        variables: those of the notebook.

    Raises:
        UsageError: the line is refused; a variable of `--in` does not exist.
        TypeError: a variable cannot be pickled; without cloudpickle that is all whose type the notebook defines.
        NameError: the cell did not set a variable of `--out` on rank 0.
        Exception: what the cell raised on the rank that failed first; its cause shows the traceback.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%%ringtrain: {error}: {line}") from error
    args = _parser().parse_args(words)
    given, wanted = _names(args.given), _names(args.wanted)
    missing = [name for name in given if name not in variables]
    if missing:
        raise UsageError(f"%%ringtrain: --in names {', '.join(missing)}, which the notebook does not have")
    results = function.run(
        _run_in_rank,
        (cell, {name: variables[name] for name in given}, wanted),
        num_proc=args.num_proc,
        hosts=args.hosts,
        start_timeout=args.start_timeout,
    )
    return results[0]


def _names(words: list[str]) -> list[str]:
    """Splits names at commas and spaces."""
    names = " ".join(words).replace(",", " ").split()
    for name in names:
        if not name.isidentifier():
            raise UsageError(f"%%ringtrain: {name!r} is not the name of a variable")
    return names


def _run_in_rank(cell: str, given: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """Returns the wanted variables, on rank 0 only."""
    linecache.cache[_CELL] = len(cell), None, cell.splitlines(keepends=True), _CELL  # for tracebacks
    variables: dict[str, Any] = {"__name__": "__main__", **given}
    exec(compile(cell, _CELL, "exec"), variables)
    launch = launched_by.detect()
    if launch is not None and launch.rank != 0:
        return {}
    missing = [name for name in wanted if name not in variables]
    if missing:
        raise NameError(f"%%ringtrain: --out names {', '.join(missing)}, which the cell did not set")
    return {name: variables[name] for name in wanted}
