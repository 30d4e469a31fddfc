"""The command `python -m ringtrain.timeline`: merge the parts of a timeline, and report what it shows."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ringtrain.record.timeline_files import TraceError, merge
from ringtrain.timeline.report.figures import figures_of, judge
from ringtrain.timeline.report.page import page


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 0, or 2 for a file that is not there or no timeline."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "merge":
            ranks = merge(options.file)
            print(f"{options.file} has {ranks} {'rank' if ranks == 1 else 'ranks'}")
        else:
            _report(options.file, options.output, options.link_gbit, options.json)
    except (OSError, TraceError) as error:
        print(f"python -m ringtrain.timeline: {_sentence(error)}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ringtrain.timeline", description="Work on timelines.")
    commands = parser.add_subparsers(dest="command", required=True)
    merging = commands.add_parser("merge", help="bring together the parts of a job that was killed, and of its servers")
    merging.add_argument("file", type=Path)
    reporting = commands.add_parser("report", help="say where the time of a step goes, and write a page about it")
    reporting.add_argument("file", type=Path, help="what timeline_filename or start_timeline named")
    reporting.add_argument("-o", "--output", type=Path, help="the page (default: FILE with .html instead of .json)")
    reporting.add_argument(
        "--link-gbit",
        type=_positive,
        metavar="X",
        help="speed of each host's link in Gbit/s, to compare with; 0.008 times the MB/s of ringrun --check",
    )
    reporting.add_argument(
        "--json", action="store_true", help="print all figures as JSON, and write a page only where -o says"
    )
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f'must be a number above 0, not "{text}"')
    return value


def _report(file: Path, output: Path | None, link_gbit: float | None, prints_json: bool) -> None:
    figures = figures_of(file, link_gbit)
    verdict = judge(figures)
    if prints_json:
        print(json.dumps({"verdict": dataclasses.asdict(verdict), **dataclasses.asdict(figures)}))
    else:
        print(verdict.sentence)
        output = output or file.with_suffix(".html")
    if output is not None:
        output.write_text(page(figures, verdict), encoding="utf-8")
        print(f"the page: {output}", file=sys.stderr if prints_json else sys.stdout)


def _sentence(error: OSError | TraceError) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
