"""The flags of ringrun: its own few, and one for each entry of the option table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from ringtrain.run.hosts import UsageError

_DESCRIPTION = """\
Start COMMAND on many ranks with the MPI that this environment's mpi4py uses, e.g.
  ringrun -np 4 python train.py
  ringrun -H h1:2,h2:2 python train.py"""


class Option(Protocol):
    """One entry of `ringtrain.options.TABLE`."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def default(self) -> float | str: ...
    @property
    def minimum(self) -> float: ...
    @property
    def maximum(self) -> float: ...
    @property
    def choices(self) -> Sequence[str]: ...
    @property
    def meaning(self) -> str: ...


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def build_parser(table: Sequence[Option]) -> argparse.ArgumentParser:
    """The parser of ringrun; everything from the first word that is no option is the command."""
    parser = _Parser(
        prog="ringrun",
        usage="ringrun -np N [options] COMMAND ...",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "-n", "--num-proc", type=_positive, metavar="N", help="number of ranks (default: the hosts' slots)")
    add("-H", "--hosts", metavar="h1:2,h2:2", help="hosts and how many ranks each takes")
    add("--hostfile", metavar="FILE", help="the same as lines `host slots=2` or `host:2`")
    add("--launcher", choices=("auto", "mpirun", "srun"), default="auto", help="who starts the ranks (default: auto)")
    add("--dry-run", action="store_true", help="print the command instead of running it")
    add("--verbose", action="store_true", help="say which MPI was found and what is run")
    group = parser.add_argument_group("options of ringtrain, as in docs/options.md")
    for option in table:
        _add_option(group, option)
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what each rank runs")
    return parser


def option_variables(
    arguments: argparse.Namespace, table: Sequence[Option], environment_name: Callable[[str], str]
) -> dict[str, str]:
    """Environment variables of the options that were given on the command line."""
    given = {option.name: getattr(arguments, option.name) for option in table}
    return {environment_name(name): text for name, text in given.items() if text is not None}


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    help_text = f"{option.meaning} (default: {_plain(option.default)})".replace("%", "%%")
    flag = "--" + option.name.replace("_", "-")
    if option.type == "choice":
        group.add_argument(flag, choices=option.choices, help=help_text)
    elif option.type == "number":
        group.add_argument(flag, type=_number_within(option), metavar="NUMBER", help=help_text)
    else:
        group.add_argument(flag, metavar="TEXT", help=option.meaning.replace("%", "%%"))


def _number_within(option: Option) -> Callable[[str], str]:
    """Checks the range and keeps the text as it was typed: it becomes an environment variable."""

    def check(text: str) -> str:
        try:
            is_within = option.minimum <= float(text) <= option.maximum
        except ValueError:
            is_within = False
        if not is_within:
            wanted = f"a number from {_plain(option.minimum)} to {_plain(option.maximum)}"
            raise argparse.ArgumentTypeError(f'must be {wanted}, not "{text}"')
        return text

    return check


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f'must be a whole number from 1, not "{text}"')
    return int(text)


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.15g}"
