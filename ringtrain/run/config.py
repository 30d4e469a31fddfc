"""The file of --config-file: the flags without their hyphens, one in a line.

    # cluster.conf
    hosts h1:4,h2:4
    output-filename logs
    autotune on

Not TOML: Python 3.10 cannot read it, and a line that is a flag needs no second explanation. The file and the
command line go through one parser, in which the command line comes last and wins.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from ringtrain.run.hosts import UsageError


def read_config(path: str, switches: Collection[str]) -> list[tuple[str, str]]:
    """The lines of a file as words for the parser, each behind where it stands. Raises UsageError.

    Args:
        path: the file; # begins a comment, and quotes are those of a shell.
        switches: names of the flags that take no value; in the file they stand alone or before on or off.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config-file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    words = []
    for number, line in enumerate(lines, start=1):
        try:
            parts = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: {error}") from error
        if parts:
            source = f"{path}, line {number}"
            words.append((source, _flag(parts, switches, source)))
    return words


def _flag(parts: list[str], switches: Collection[str], source: str) -> str:
    name = parts[0].lstrip("-").replace("_", "-")
    if name == "config-file":
        raise UsageError(f"{source}: a file cannot name another one")
    if name in switches:
        spelling = {(): f"--{name}", ("on",): f"--{name}", ("off",): f"--no-{name}"}
        if tuple(parts[1:]) not in spelling:
            raise UsageError(f"{source}: {name} takes on or off")
        return spelling[tuple(parts[1:])]
    if (switch := name.removeprefix("no-")) in switches:
        raise UsageError(f'{source}: write "{switch} off"')
    if len(parts) != 2:
        raise UsageError(f'{source}: write a name and a value, as in "num-proc 4"; quote a value that has blanks')
    # a single hyphen for -np, -n and -H
    hyphens = "-" if len(name) <= 2 else "--"
    return f"{hyphens}{name}={parts[1]}"
