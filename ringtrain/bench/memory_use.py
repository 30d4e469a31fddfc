"""How much memory ringtrain itself takes in this process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

# Files that never had a name, which no MPI has there; or had one, where ranks cannot see each other's processes.
_SEGMENT = re.compile(r" /dev/shm/(#\d+|ringtrain-\w+-\S+) \(deleted\)$")


class OwnMemory(NamedTuple):
    """Bytes. `mapped` is the size of the node's shared segments that this process has mapped; `segments` its part of
    their memory in use, each page divided by how many processes have it; `private` what the process itself has."""

    mapped: int
    segments: int
    private: int

    @classmethod
    def read(cls) -> OwnMemory:
        """What the kernel says now."""
        mapped = segments = 0
        is_segment = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            name, *values = line.split()
            if not name.endswith(":"):
                is_segment = _SEGMENT.search(line) is not None
            elif is_segment and name == "Size:":
                mapped += _bytes(values)
            elif is_segment and name == "Pss:":
                segments += _bytes(values)
        return cls(mapped, segments, _private())


def _private() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, *values = line.split()
        if name == "RssAnon:":
            return _bytes(values)
    raise RuntimeError("/proc/self/status has no RssAnon")


def _bytes(values: list[str]) -> int:
    number, unit = values
    assert unit == "kB"
    return int(number) << 10
