"""The flags of ringrun: its own few, one for each entry of the option table, and those of horovodrun."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import ringtrain._core as _core
from ringtrain.options.horovod_variables import as_switch
from ringtrain.options.table import GONE, TABLE, Option, environment_name
from ringtrain.runner import horovod_flags
from ringtrain.runner.horovod_flags import Given
from ringtrain.runner.hosts import UsageError
from ringtrain.runner.job import START_TIMEOUT_S
from ringtrain.runner.supervise.binding import KINDS
from ringtrain.version import __version__

if TYPE_CHECKING:
    import yaml


_DESCRIPTION = """\
Start COMMAND on many ranks, with the MPI that this environment's mpi4py uses or without any, e.g.
  ringrun -np 4 python train.py
  ringrun -H h1:2,h2:2 python train.py"""


# flags without a value, besides the options that are on or off
_SWITCHES = {
    "prefix-output": "begin each line with its rank, as in `[1] text` (default: with more than one rank)",
    "prefix-output-with-timestamp": "begin each line with the time, as in `2026-01-31 23:59:59 [1] text`",
    "horovod": "let `import horovod` find ringtrain, in scripts and in libraries",
    "check": "try the hosts instead of running a command",
    "dry-run": "print the command instead of running it",
    "verbose": "say which MPI was found, what is run and where the ranks are",
    "stdin": "let rank 0 read what ringrun is given on standard input (default: yes)",
    "tcp": "let MPI and NCCL use nothing but TCP on the network",
}
_NO_PLACE = "ringrun needs no place where the ranks meet: leave it out"
_OF_THE_LAUNCHER = 'words for the launcher itself go into --mpi-args="..."'
# Flags of torchrun, mpirun and srun, and what a user of ringrun writes instead.
_OF_OTHER_LAUNCHERS = {
    **dict.fromkeys(("--nproc-per-node", "--ntasks", "-c", "-ppn"), "say -np N, the number of ranks on all hosts"),
    **dict.fromkeys(("--nnodes", "--nodes", "-N", "--host", "-host", "-w"), "say the hosts by -H h1:2,h2:2"),
    **dict.fromkeys(("--machinefile", "-machinefile", "-f"), "say --hostfile FILE"),
    **dict.fromkeys(("-x", "-env", "-genv", "--export"), "say --env NAME=VALUE, or --env NAME"),
    **dict.fromkeys(("--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--standalone"), _NO_PLACE),
    **dict.fromkeys(("--master-addr", "--master-port", "--node-rank"), _NO_PLACE),
    **dict.fromkeys(("--max-restarts",), "say --min-np N for a job that goes on when ranks die"),
    **dict.fromkeys(("-m", "--module"), "say python -m MODULE behind the flags"),
    **dict.fromkeys(("--bind-to", "--cpu-bind", "--map-by"), 'say --bind core or numa, or --binding-args="..."'),
    **dict.fromkeys(("--mca", "-mca", "--mpi", "--oversubscribe", "--allow-run-as-root"), _OF_THE_LAUNCHER),
}
_ON_OFF = {True: "on", False: "off"}


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message + self._likely_flag(message))

    def _likely_flag(self, message: str) -> str:
        """Returns "; did you mean --verbose?" if the message is about a flag that is almost one, or another launcher's.

        Those of others are only told by ringrun, whose flags these are.
        """
        flag = message.partition("unrecognized arguments: ")[2].partition(" ")[0].partition("=")[0]
        of_others = _OF_OTHER_LAUNCHERS.get(flag.replace("_", "-"))
        if of_others and self.prog == "ringrun":
            return f"; {of_others}"
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.8)
        return f"; did you mean {near[0]}?" if flag.startswith("--") and near else ""


def build_parser() -> argparse.ArgumentParser:
    """The parser of ringrun; everything from the first word that is not an option is the command."""
    parser = Parser(
        prog="ringrun",
        usage="ringrun -np N [options] COMMAND ...",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_job(parser)
    _add_elastic(parser)
    _add_output(parser)
    add_options(parser)
    _add_horovods(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what each rank runs")
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line and the file that its --config-file names; what it says itself wins. Raises UsageError."""
    parser = build_parser()
    arguments = parser.parse_args(words)
    if arguments.config_file is None:
        return arguments
    entries = read_config(arguments.config_file, _switches())
    for source, entry in entries:
        try:
            parser.parse_args(entry)
        except UsageError as error:
            raise UsageError(f"{source}: {error}") from error
    merged = parser.parse_args([*(word for _, entry in entries for word in entry), *words])
    # several of these add up, but the command line is not to add to the file
    merged.network_interfaces = arguments.network_interfaces or merged.network_interfaces
    return merged


def _switches() -> set[str]:
    """Names of the flags that are on or off."""
    of_options = {_hyphened(option.name) for option in TABLE if option.is_switch}
    of_horovod = {flag.names[0].lstrip("-") for flag in horovod_flags.TABLE if flag.takes == 0 and flag.off}
    return {*_SWITCHES, *of_options, *of_horovod}


def option_variables(arguments: argparse.Namespace) -> dict[str, str]:
    """Environment variables of the options that were given on the command line; rank 0 warns of those that are gone."""
    given = {name: getattr(arguments, name) for name in (*(option.name for option in TABLE), *GONE)}
    texts = {name: _ON_OFF.get(value, value) for name, value in given.items()}
    return {environment_name(name): text for name, text in texts.items() if text is not None}


class _Interfaces(argparse.Action):
    """Takes `eth0,eth1`, as often as it is given."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        former = getattr(namespace, self.dest)
        names = [*(former.split(",") if former else ()), *str(values).split(",")]
        setattr(namespace, self.dest, ",".join(dict.fromkeys(filter(None, names))))


class _HorovodsOwn(argparse.Action):
    """Keeps what there is to say or to set for a flag that ringrun knows from the table of Horovod's only."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        given = Given(str(option_string), " ".join(values))
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), given])


def add_options(parser: argparse.ArgumentParser) -> None:
    """A flag for each entry of the option table, and without a word in the help for each option that is gone."""
    group = parser.add_argument_group("options of ringtrain, as in docs/options.md")
    for option in TABLE:
        _add_option(group, option)
    for name in GONE:
        group.add_argument(f"--{_hyphened(name)}", help=argparse.SUPPRESS)


def add_times(parser: argparse.ArgumentParser) -> None:
    """How long processes may take to start and to end."""
    parser.add_argument(
        "--start-timeout",
        type=seconds,
        default=START_TIMEOUT_S,
        metavar="SECONDS",
        help="0 waits for ever (default: 120)",
    )
    parser.add_argument(
        "--grace-s", type=seconds, default=30.0, metavar="SECONDS", help="from SIGTERM to SIGKILL (default: 30)"
    )


def add_version(parser: argparse.ArgumentParser) -> None:
    """Also as -v, as with horovodrun."""
    parser.add_argument("-v", "--version", action="version", version=__version__, help="print the version of ringtrain")


def _add_job(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-np", "-n", "--num-proc", type=positive, metavar="N", help="number of ranks (default: the hosts' slots)")
    add("-H", "--hosts", metavar="h1:2,h2:2", help="hosts and how many ranks each takes (default: the allocation's)")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same as lines `host slots=2` or `host:2`")
    add(
        "--launcher",
        choices=("auto", "mpirun", "srun", "ssh", "slurm", "sge", "yarn"),
        default="auto",
        help="who starts the ranks; slurm, sge: a batch job that is submitted now; yarn: containers (default: auto)",
    )
    add("--mpi-args", type=shell_words, default=(), metavar="WORDS", help='more for the launcher: --mpi-args="-x A=1"')
    add("--binding-args", type=shell_words, default=(), metavar="WORDS", help="how it binds ranks (default: not)")
    add("--bind", choices=KINDS, default="none", help="give each rank its share of the host's cores or NUMA nodes")
    add(
        *("--network-interfaces", "--network-interface"),
        action=_Interfaces,
        metavar="NICS",
        help="what the hosts talk through, such as eth0 or ib0,ib1; several add up",
    )
    add(*("-p", "--ssh-port"), type=positive, metavar="PORT", help="where ssh listens on the other hosts")
    add(*("-i", "--ssh-identity-file"), metavar="FILE", help="the private key for ssh")
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for all ranks; may be repeated")
    add_times(parser)
    add("--config-file", metavar="FILE", help="more of these flags in YAML, without hyphens; also horovodrun's file")
    add_version(parser)
    add("-cb", "--check-build", action="store_true", help="print which frameworks and libraries are there")


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("elastic jobs, whose ranks come and go")
    add = group.add_argument
    add("--min-np", "--min-num-proc", type=positive, metavar="N", help="go on with so many ranks at least")
    add("--max-np", "--max-num-proc", type=positive, metavar="N", help="no more ranks than these (default: the slots)")
    add("--slots-per-host", "--slots", type=positive, metavar="N", help="of a host that is named without a number")
    add("--host-discovery-script", metavar="COMMAND", help="prints the hosts, as lines host:2; asked each second")
    add("--elastic-timeout", type=seconds, metavar="SECONDS", help="to wait for --min-np ranks (default: 600)")
    add("--reset-limit", type=whole, metavar="N", help="how often ranks may meet anew (default: no limit)")
    add(
        "--blacklist-cooldown-range",
        nargs=2,
        type=seconds,
        metavar=("MIN", "MAX"),
        help="seconds for which a host that fails again and again gets no ranks (default: for ever)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output-filename", metavar="DIR", help="also write what each rank prints to DIR/rank.N/stdout and stderr")
    for name, help_text in _SWITCHES.items():
        horovods = horovod_flags.BY_NAME.get(f"--{name}")
        names = (f"--{name}",) if horovods is None else horovods.names
        add(*names, action=argparse.BooleanOptionalAction, help=help_text)


def _add_horovods(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(of_horovod=[])
    group = parser.add_argument_group("flags of horovodrun, for what ringrun does otherwise or not at all")
    for flag in horovod_flags.TABLE:
        if flag.is_parsed_by_name:
            names, metavar = (*flag.names, *flag.off), ("VALUE",) * flag.takes
            help_text = f"{flag.state.value}: {flag.meaning}".removeprefix("the same: ")
            group.add_argument(
                *names,
                action=_HorovodsOwn,
                dest="of_horovod",
                nargs=flag.takes,
                metavar=metavar,
                default=argparse.SUPPRESS,
                help=help_text,
            )


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    help_text = f"{option.meaning} (default: {_plain(option.default)})".replace("%", "%%")
    own = f"--{_hyphened(option.name)}"
    flags = dict.fromkeys(
        [own, *(name for flag in horovod_flags.TABLE if flag.option == option.name for name in flag.names)]
    )
    if option.is_switch:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=help_text)
    elif option.type == "choice":
        group.add_argument(*flags, choices=option.choices, type=str.lower, help=help_text)
    elif option.type == "number":
        group.add_argument(*flags, type=_number_within(option), metavar="NUMBER", help=help_text)
    elif option.type == "steps":
        check = _checked(option, "steps such as 100-110")
        group.add_argument(*flags, type=check, metavar="FIRST-LAST", help=option.meaning.replace("%", "%%"))
    elif option.type == "rates":
        check = _checked(option, "off, auto, or the Mbit/s of each host, such as 1000,1000,100")
        group.add_argument(*flags, type=check, metavar="RATES", help=help_text)
    else:
        group.add_argument(*flags, metavar="TEXT", help=option.meaning.replace("%", "%%"))


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


def _checked(option: Option, what: str) -> Callable[[str], str]:
    """The core knows what fits; an empty text is the default, for which the flag is left out."""

    def check(text: str) -> str:
        try:
            _core.check_option(option.name, text)
            is_right = bool(text)
        except ValueError:
            is_right = False
        if not is_right:
            raise argparse.ArgumentTypeError(f'must be {what}, not "{text}"')
        return text

    return check


def shell_words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: {text}") from error


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f'must be a whole number from 1, not "{text}"')
    return int(text)


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'must be a whole number, not "{text}"')
    return int(text)


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f'must be a number of seconds, not "{text}"')
    return number


def _hyphened(name: str) -> str:
    return name.replace("_", "-")


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.15g}"


# --- --config-file ----------------------------------------------------------------------------------------------------
# A file in YAML: flags of ringrun without their hyphens, and the sections of the file of horovodrun.
#
#     hosts: h1:2,h2:2
#     env: [GREETING=hello, "WORDS=good day"]
#     autotune: true
#     params:
#       fusion_threshold_mb: 32
#
# Both become flags. The file and the command line go through one parser, in which the command line comes last and wins.


# imported where a file is read, so that others need no PyYAML

# flags that may be given several times, so a list of values is one of them each
_LISTS = ("env", "network-interfaces", "network-interface")
# and the one flag that takes two words
_RANGE = "--blacklist-cooldown-range"


class Words(NamedTuple):
    """Returns an entry of the file as words of a command line, and its place in the file."""

    source: str
    words: list[str]


class _Entry(NamedTuple):
    source: str
    name: str
    value: yaml.Node


def read_config(path: str, switches: Collection[str]) -> list[Words]:
    """The entries of a file as words for the parser. Raises UsageError, which names the file and the line.

    Args:
        path: the file.
        switches: names of the flags that take no value; in the file they are true or false.
    """
    entries = list(_entries(path, _root(path)))
    for number, entry in enumerate(entries):
        if any(entry.name == former.name for former in entries[:number]):
            raise UsageError(f"{entry.source}: {entry.name} is there twice")
    return [Words(entry.source, list(_words(entry, switches))) for entry in entries if not _is_empty(entry.value)]


def _root(path: str) -> yaml.Node | None:
    import yaml

    try:
        return yaml.compose(Path(path).read_text(), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config-file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise UsageError(f"{path}{line}: this is not YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: this is not YAML: {error}") from error


def _entries(path: str, root: yaml.Node | None, section: str = "") -> Iterator[_Entry]:
    """Each name with its value; those in a section behind the section's name and a dot."""
    import yaml

    if root is None:
        return
    source = f"{path}, line {root.start_mark.line + 1}"
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f'{source}: write a name, a colon and a value, as in "num-proc: 4"')
    for key, value in root.value:
        source, name = f"{path}, line {key.start_mark.line + 1}", section + str(key.value)
        if not isinstance(value, yaml.MappingNode):
            yield _Entry(source, name, value)
        elif section:
            raise UsageError(f"{source}: {name} has no section of its own")
        else:
            yield from _entries(path, value, f"{name}.")


def _is_empty(value: yaml.Node) -> bool:
    return str(value.tag) == "tag:yaml.org,2002:null"


def _words(entry: _Entry, switches: Collection[str]) -> Iterator[str]:
    flag = _horovods_flag(entry)
    if flag is not None:
        name, is_switch, off = flag.names[0], flag.takes == 0, "".join(flag.off[:1])
    else:
        name, is_switch = _name(entry, switches)
        off = f"--no-{name.lstrip('-')}"
    texts = _texts(entry)
    if name == _RANGE:
        yield from (name, *texts)
    elif not is_switch:
        yield from (f"{name}={text}" for text in texts)
    elif flag is not None and not off:
        yield name
    else:
        spelling = {"on": name, "off": off}.get(as_switch(texts[0]))
        if spelling is None:
            raise UsageError(f"{entry.source}: {entry.name} takes true or false")
        yield spelling


def _horovods_flag(entry: _Entry) -> horovod_flags.Flag | None:
    """Returns the flag of an entry of horovodrun's file, which has sections and, on top, `controller`."""
    if entry.name == "controller":
        flag = horovod_flags.BY_KEY.get(f"controller: {str(entry.value.value).lower()}")
    else:
        flag = horovod_flags.BY_KEY.get(entry.name)
    if flag is None and ("." in entry.name or entry.name == "controller"):
        raise UsageError(f"{entry.source}: horovodrun's file has no {entry.name}: {entry.value.value}")
    return flag


def _name(entry: _Entry, switches: Collection[str]) -> tuple[str, bool]:
    """The flag that is called so, and whether it is a switch."""
    name = entry.name.lstrip("-").replace("_", "-")
    if name == "config-file":
        raise UsageError(f"{entry.source}: a file cannot name another one")
    switch = name.removeprefix("no-")
    if switch != name and switch in switches:
        raise UsageError(f'{entry.source}: write "{switch}: false"')
    # a single hyphen for -np, -n and -H
    return ("-" if len(name) <= 2 else "--") + name, name in switches


def _texts(entry: _Entry) -> list[str]:
    """The value as it is written, or each of a list."""
    import yaml

    nodes = entry.value.value if isinstance(entry.value, yaml.SequenceNode) else [entry.value]
    if not all(isinstance(node, yaml.ScalarNode) for node in nodes):
        raise UsageError(f"{entry.source}: {entry.name} takes texts or numbers")
    if len(nodes) != 1 and entry.name.replace("_", "-") not in (*_LISTS, _RANGE.lstrip("-")):
        raise UsageError(f"{entry.source}: {entry.name} takes one value")
    return [node.value for node in nodes]
