"""Which network a job has, and why: as ringrun finds it, and as its ranks do."""

from __future__ import annotations

from typing import NamedTuple


class Choice(NamedTuple):
    """The network of a job, "mpi", "sockets" or "none" (a job of one rank), and the reason, for people."""

    network: str
    reason: str
