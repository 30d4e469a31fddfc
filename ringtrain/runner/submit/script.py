"""The batch script of a job: what is asked of the batch system, and ringrun once more."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence


def script(directives: Sequence[str], words: Sequence[str], command: Sequence[str]) -> str:
    """A script for a shell.

    Args:
        directives: comments that the batch system reads, such as "#SBATCH --ntasks=4".
        words: the command line that ringrun was given, but for the command.
        command: what each rank runs.
    """
    # The last one counts: these were for the batch system, or for this call.
    undone = ["--launcher=auto", "--mpi-args=", "--no-dry-run"]
    line = [sys.executable, "-m", "ringtrain.run", *words, *undone, *command]
    return "\n".join(["#!/bin/bash", *directives, f"exec {shlex.join(line)}", ""])


def name_of(command: Sequence[str]) -> str:
    """What the batch system lists the job as: the script of `python train.py`, else the program."""
    scripts = [word for word in command if word.endswith(".py")]
    return (scripts or list(command))[0].rpartition("/")[2]
