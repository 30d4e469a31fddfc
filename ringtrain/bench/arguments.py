"""The command line: what all measurements share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ringtrain.bench.peers import NAMES

EXAMPLES = """\
examples:
  python -m ringtrain.bench allreduce -np 2
  python -m ringtrain.bench allreduce -np 2 --dtype float16 --min-bytes 32M --max-bytes 32M
  python -m ringtrain.bench step -np 2 --launches 3 --only near --json step.json --plot step.png
  python -m ringtrain.bench step -np 4 --model bert-large --peers mpi,gloo --option fusion_threshold_mb=16
  python -m ringtrain.bench torch -np 2 --models resnet50,transformer --peers gloo
  python -m ringtrain.bench c10d -np 2 --sizes 4,32M --trainings ddp
  python -m ringtrain.bench scaling --plot scaling.png
  python -m ringtrain.bench links -np 2 -H h1,h2 --parameters 124M --every 50
  python -m ringtrain.bench latency -np 2 --rounds 21
  python -m ringtrain.bench kvstore -np 1,2,4 --peers ps-lite --plot kvstore.png
  python -m ringtrain.bench allreduce -np 3 -H h1,h2,h3 --network mpi,sockets --cpu --peers none
  mpirun -np 2 python -m ringtrain.bench step
"""

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def launching_flags() -> argparse.ArgumentParser:
    """Flags of the process that starts the ranks and keeps the result; they are not passed on to the ranks."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add = parser.add_argument_group("launching and results").add_argument
    add(
        "-np",
        dest="num_proc",
        type=_counts,
        metavar="N",
        help="start N ranks; without it, this is one of those of mpirun. Some measurements take several: 1,2,4",
    )
    add("-H", dest="hosts", metavar="h1:2,h2:2", help="hosts and how many ranks each takes, as for ringrun")
    add("--launches", type=int, default=1, metavar="N", help="with -np: start so often, and report all rounds together")
    add("--json", metavar="FILE", help="write all rounds, their medians and ratios")
    add("--plot", metavar="FILE.png", help="draw the table (needs matplotlib)")
    return parser


def measuring_flags(peers: Sequence[str]) -> argparse.ArgumentParser:
    """Flags of the ranks, the same for all measurements but for the peers that there are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add = parser.add_argument_group("measuring").add_argument
    add("--rounds", type=int, default=9, metavar="N", help="default: %(default)s")
    add("--warmup", type=int, default=2, metavar="N", help="runs before the first round (default: %(default)s)")
    add(
        "--peers",
        type=some_of(peers, "peers"),
        default=",".join(peers) or "none",
        metavar="LIST",
        help="%(default)s (those that are installed) or none",
    )
    add(
        "--option", type=_option, action="append", default=[], metavar="NAME=VALUE", help="an option of docs/options.md"
    )
    add(
        "--network",
        type=_networks,
        default=[],
        metavar="LIST",
        help='what carries the messages: mpi, sockets, or "mpi,sockets" to compare them in turn',
    )
    add("--cpu", action="store_true", help="also show the processor time of all ranks together")
    add("--only", choices=("near", "far"), help="begin a round only while the cores of ranks 0 and 1 are so")
    add("--busy-core", type=int, metavar="CPU", help="let a busy process run on this CPU of each host meanwhile")
    add("--patience", type=float, default=10.0, metavar="S", help="longest run of a peer, or wait for --only")
    add("--progress", action="store_true", help="show a bar (needs tqdm) even if standard error is not a terminal")
    add("--quiet", action="store_true", help="print no table")
    return parser


def parse_bytes(text: str) -> int:
    """512, 4K, 64M or 1G; K is 1024."""
    number, unit = (text[:-1], _UNITS[text[-1:].upper()]) if text[-1:].upper() in _UNITS else (text, 1)
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(f'must be a size such as 512, 4K or 64M, not "{text}"')
    return int(number) * unit


def some_of(known: Iterable[str], what: str, may_be_none: bool = True) -> Callable[[str], list[str]]:
    """Returns what parses some of these names, with a comma between them, or "none" of them."""

    def parse(text: str) -> list[str]:
        names = [] if may_be_none and text == "none" else text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            listed = ", ".join([*known, *(["or none"] if may_be_none else [])])
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the {what} are {listed}")
        return names

    return parse


def add_sizes(parser: argparse.ArgumentParser, most: str) -> None:
    """Adds the flags of a range of sizes."""
    add = parser.add_argument
    add("--min-bytes", type=parse_bytes, default="4", metavar="SIZE", help="default: %(default)s")
    add("--max-bytes", type=parse_bytes, default=most, metavar="SIZE", help="default: %(default)s")
    add("--factor", type=int, default=4, help="from one size to the next (default: %(default)s)")


def _counts(text: str) -> list[int]:
    counts = [int(one) if one.isdecimal() else 0 for one in text.split(",")]
    if 0 in counts or len(set(counts)) < len(counts):
        raise argparse.ArgumentTypeError(f'must be a number of ranks, such as 2, not "{text}"')
    return counts


def _networks(text: str) -> list[str]:
    names = text.split(",")
    if len(set(names)) < len(names) or not set(names) <= {"mpi", "sockets"}:
        raise argparse.ArgumentTypeError(f'must be mpi, sockets or both with a comma between them, not "{text}"')
    return names


def _option(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f'must be NAME=VALUE, not "{text}"')
    return name, value


def build_parser(
    measurements: Sequence[Any], module: str = "ringtrain.bench", examples: str = EXAMPLES
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description="Measure ringtrain and its peers in turn, in one run, on the same data.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="measurement", required=True, metavar="MEASUREMENT")
    for measurement in measurements:
        shared = [launching_flags(), measuring_flags(getattr(measurement, "peers", NAMES))]
        own = subparsers.add_parser(measurement.name, help=measurement.help, parents=shared, allow_abbrev=False)
        measurement.add_flags(own)
    return parser
