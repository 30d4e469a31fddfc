"""What is to be started, said without any launcher's words."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ringtrain.job import launched_by
from ringtrain.runner.allocation.hosts import Host, UsageError
from ringtrain.runner.elastic.terms import Terms
from ringtrain.runner.roles.terms import RoleTerms

# How long ranks may take to start unless the user sets another limit.
START_TIMEOUT_S = 120.0


class Job(NamedTuple):
    """`command` on `num_proc` ranks; no hosts means this host.

    `exported` names variables of `environment` that the ranks get in any case; which others do is in variables.py.
    `network_interfaces` is a list such as "eth0,eth1"; `ssh_port` and `ssh_identity_file` are for reaching other hosts.
    `hosts_are_allotted` says that a batch system named the hosts, not the user. `launcher_arguments` are the user's
    words for the launcher, `binding_arguments` those that are to stand in place of ours about binding; `has_tcp_only`
    keeps the network to TCP. `elastic` is what an elastic job may become, which begins with `num_proc` ranks. `roles`
    is what a job with servers has, where `num_proc` counts all processes.
    """

    command: list[str]
    num_proc: int
    hosts: list[Host]
    environment: dict[str, str]
    exported: tuple[str, ...] = ()
    network_interfaces: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    hosts_are_allotted: bool = False
    launcher_arguments: tuple[str, ...] = ()
    binding_arguments: tuple[str, ...] = ()
    has_tcp_only: bool = False
    elastic: Terms | None = None
    roles: RoleTerms | None = None

    @property
    def ranks_of_hosts(self) -> list[int]:
        """How many ranks each host has where they fill the slots of one host after another."""
        counts: list[int] = []
        for slots in [host.slots for host in self.hosts] or [self.num_proc]:
            counts.append(min(slots, self.num_proc - sum(counts)))
        return [count for count in counts if count > 0]

    @property
    def may_have_several(self) -> bool:
        """Whether there may be more than one rank at the same time."""
        return self.num_proc > 1 or self.elastic is not None


def name_of(command: Sequence[str]) -> str:
    """Returns what a batch system lists the job as: the script of `python train.py`, else the program."""
    scripts = [word for word in command if word.endswith(".py")]
    return (scripts or list(command))[0].rpartition("/")[2]


def require_program(command: list[str], environ: Mapping[str, str]) -> None:
    """Raises UsageError for a script that cannot be executed by itself, with the command that runs it."""
    name = command[0]
    is_script = name.endswith(".py") and os.path.isfile(name)
    if is_script and shutil.which(name, path=environ.get("PATH")) is None:
        raise UsageError(f"{name} is a script and not a program: write python {shlex.join(command)}")


def environment_of_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, with this Python as the `python` of the ranks, and without what makes this process a rank itself."""
    not_for_ranks = {launched_by.OWNER_VARIABLE}
    if launched_by.Ringrun().read(environ) is not None:
        not_for_ranks.update(launched_by.OF_RINGRUN)
    environment = {name: value for name, value in environ.items() if name not in not_for_ranks}
    python_folder = str(Path(sys.executable).parent)
    path = environment.get("PATH", os.defpath)
    # /path/to/venv/bin/ringrun may be typed without the venv being active
    if shutil.which("python", path=path) != os.path.join(python_folder, "python"):
        environment["PATH"] = python_folder + os.pathsep + path
    return environment
