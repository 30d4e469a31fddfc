"""What is to be started, said without any launcher's words."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ringtrain.run.hosts import Host


class Job(NamedTuple):
    """`command` on `num_proc` ranks; no hosts means this host, or what the batch system allotted."""

    command: list[str]
    num_proc: int
    hosts: list[Host]
    environment: dict[str, str]


def environment_of_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, with this Python as the `python` of the ranks."""
    environment = dict(environ)
    python_folder = str(Path(sys.executable).parent)
    path = environment.get("PATH", os.defpath)
    # /path/to/venv/bin/ringrun may be typed without the venv being active
    if shutil.which("python", path=path) != os.path.join(python_folder, "python"):
        environment["PATH"] = python_folder + os.pathsep + path
    return environment
