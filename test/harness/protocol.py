"""The messages between the pytest process and a rank, over one Unix-domain socket per rank.

A path reaches a rank in any network namespace, and neither ringtrain nor MPI has a part in it. A rank says Hello, then
answers each Task with an Answer; None instead of a Task ends it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

Outcome = Literal["passed", "failed", "skipped"]


class Hello(NamedTuple):
    """The first word of a rank."""

    rank: int
    pid: int


class Task(NamedTuple):
    """A test to run: `function` of the module in `path`, which pytest calls `module`.

    The arguments are pickled apart, so that one that cannot be read fails the test alone. `options` are variables of
    the environment that init() reads; `initialise` says whether the rank calls it, or the test.
    """

    module: str
    path: Path
    function: str
    pickled_arguments: bytes
    initialise: bool
    options: tuple[tuple[str, str], ...]


class Answer(NamedTuple):
    """How a test ended on one rank; `details` is a traceback or the reason of a skip."""

    outcome: Outcome
    details: str = ""


def socket_file(folder: Path) -> Path:
    """The socket on which pytest listens; `folder` belongs to one job."""
    return folder / "socket"


def output_file(folder: Path, rank: int) -> Path:
    """Where the standard output and error of a rank go."""
    return folder / f"rank{rank}.out"


def stacks_file(folder: Path, rank: int) -> Path:
    """Where a rank writes the stacks of its threads on SIGUSR2."""
    return folder / f"rank{rank}.stacks"


def launcher_file(folder: Path) -> Path:
    """Where the standard output and error of the launcher go."""
    return folder / "launcher.out"
