"""The hosts of a job with servers, as MXNet's launch.py reads them: a file with one address in a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ringtrain.runner.allocation.hosts import UsageError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?::(?P<port>\d+))?|[0-9a-fA-F:]+")


class Address(NamedTuple):
    """A host, and where ssh listens there; None is its usual port."""

    host: str
    port: int | None = None

    def __str__(self) -> str:
        return self.host if self.port is None else f"{self.host}:{self.port}"


def read_addresses(path: str) -> list[Address]:
    """Raises UsageError where the file cannot be read or names none."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"-H {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    stripped = [(number, line.split("#")[0].strip()) for number, line in enumerate(lines, start=1)]
    found = [address_of(line, f"{path}, line {number}") for number, line in stripped if line]
    if not found:
        raise UsageError(f"-H {path} names no host")
    return found


def address_of(text: str, source: str) -> Address:
    """`h1`, or `h1:2222` for another port of ssh. Raises UsageError, which names `source`."""
    match = _NAME.fullmatch(text)
    if match is None:
        raise UsageError(f'{source}: "{text}" is no host; write an address, or address:port for another port of ssh')
    if match["port"] is None:
        return Address(text)
    return Address(text.rpartition(":")[0], int(match["port"]))
