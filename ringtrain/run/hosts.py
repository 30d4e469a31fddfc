"""Hosts and their slots, from the command line (`h1:2,h2:2`) or from a hostfile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_HOST = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)(?::(?P<colon>\d+)|\s+slots\s*=\s*(?P<equals>\d+))?")


class UsageError(Exception):
    """The command line asks for something that cannot be; the message is one sentence for the user."""


class Host(NamedTuple):
    """A host name and how many ranks it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def parse_hosts(text: str) -> list[Host]:
    """Read `h1:2,h2:2`; a host without a number has one slot. Raises UsageError."""
    return [_parse_host(item.strip(), f"-H {text}") for item in text.split(",")]


def read_hostfile(path: str) -> list[Host]:
    """Read a file of lines `host`, `host:2` or `host slots=2`; # begins a comment. Raises UsageError."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the hostfile {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    stripped = [(number, line.split("#")[0].strip()) for number, line in enumerate(lines, start=1)]
    hosts = [_parse_host(line, f"{path}, line {number}") for number, line in stripped if line]
    if not hosts:
        raise UsageError(f"the hostfile {path} names no host")
    return hosts


def total_slots(hosts: list[Host]) -> int:
    """How many ranks the hosts take together."""
    return sum(host.slots for host in hosts)


def _parse_host(text: str, source: str) -> Host:
    match = _HOST.fullmatch(text)
    slots = int(match["colon"] or match["equals"] or 1) if match else 0
    if match is None or slots == 0:
        raise UsageError(f'{source}: "{text}" is no host; write host:2 or, in a hostfile, host slots=2')
    return Host(match["name"], slots)
