"""The command `ringtrain`, also `python -m ringtrain`: all commands of ringtrain under one name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ringtrain.version import __version__

# name -> the module whose main() it is, and what it does
COMMANDS = {
    "run": ("ringtrain.runner.command", "start a job on this host or on several; the same as ringrun"),
    "launch": (
        "ringtrain.runner.launch_command",
        "start workers and servers as MXNet does; the same as ringlaunch",
    ),
    "doctor": ("ringtrain.doctor", "say what ringtrain finds on this machine, and what is wrong with it"),
    "flight": ("ringtrain.flight", "compare what the ranks wrote down when a job went wrong"),
    "timeline": ("ringtrain.timeline.__main__", "merge the parts of a timeline, or say where the time of a step goes"),
    "bench": ("ringtrain.bench.cli", "measure ringtrain beside its peers"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of the command that the first word names."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else ""
    if name in COMMANDS:
        code: int = importlib.import_module(COMMANDS[name][0]).main(words[1:])
        return code
    if name in ("-v", "--version"):
        print(__version__)
        return 0
    is_asked = name in ("-h", "--help")
    print(_help(), file=sys.stdout if is_asked else sys.stderr)
    return 0 if is_asked else 2


def _help() -> str:
    lines = [f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: ringtrain COMMAND [ARGUMENTS], or ringtrain COMMAND --help", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
