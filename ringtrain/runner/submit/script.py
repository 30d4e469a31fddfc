"""The batch script of a job: what is asked of the batch system, and ringrun or ringlaunch once more."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Again(NamedTuple):
    """What the script starts: a module of ringtrain, and `words`, its command line but for the command of the ranks.

    `undone` follow these, and the last one of a flag counts: they undo what was for the batch system, or for this call.
    """

    module: str
    words: Sequence[str]
    undone: Sequence[str]


def again_as_ringrun(words: Sequence[str]) -> Again:
    """ringrun, inside an allocation."""
    return Again("ringtrain.run", words, ["--launcher=auto", "--mpi-args=", "--no-dry-run"])


def again_as_ringlaunch(words: Sequence[str]) -> Again:
    """ringlaunch, inside an allocation."""
    return Again("ringtrain.launch", words, ["--launcher=ssh", "--mpi-args=", "--no-dry-run"])


def script(directives: Sequence[str], again: Again, command: Sequence[str]) -> str:
    """A script for a shell.

    Args:
        directives: comments that the batch system reads, such as "#SBATCH --ntasks=4".
        again: what is started in the allocation.
        command: what each rank runs.
    """
    line = [sys.executable, "-m", again.module, *again.words, *again.undone, *command]
    return "\n".join(["#!/bin/bash", *directives, f"exec {shlex.join(line)}", ""])
