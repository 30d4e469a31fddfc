"""What this host has of what must be the same on all hosts. Runs as a process of its own on each of them."""

from __future__ import annotations

import json
import platform
import socket
from typing import NamedTuple

from ringtrain.runner.launchers import mpi_probe
from ringtrain.version import __version__


class HostReport(NamedTuple):
    """Versions as text; `host` is the name that the host has for itself."""

    host: str
    python: str
    ringtrain: str
    mpi: str


def describe_host(initialize: bool = False) -> HostReport:
    """Describe this host; with `initialize`, MPI is initialised on the way. A host may have none."""
    try:
        mpi = mpi_probe.describe(initialize)
        words = f"{mpi['library']} {mpi['version']}"
    except (ImportError, RuntimeError):
        words = "none"
    return HostReport(socket.gethostname(), platform.python_version(), __version__, words)


if __name__ == "__main__":
    print(json.dumps(describe_host()))
