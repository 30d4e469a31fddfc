"""Hosts and sizes of the batch system in whose allocation this process runs, read from its environment alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from ringtrain.job.launched_by import expand_counts, expand_node_list
from ringtrain.runner.allocation.hosts import Host, UsageError, merge


class Allocation(NamedTuple):
    """What a batch system has given to this job."""

    batch_system: str
    hosts: list[Host]


class BatchSystem(Protocol):
    """How one batch system describes an allocation in the environment."""

    def read(self, environ: Mapping[str, str]) -> list[Host] | None:
        """The hosts, or None when this process is in no allocation of it. Raises UsageError where they are garbled."""


class Slurm:
    """salloc and sbatch. A host takes as many ranks as tasks were asked for or, if none were, as it has CPUs."""

    def read(self, environ: Mapping[str, str]) -> list[Host] | None:
        names = environ.get("SLURM_JOB_NODELIST")
        if "SLURM_JOB_ID" not in environ or not names:
            return None
        asked_for_tasks = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
        variable = "SLURM_TASKS_PER_NODE" if asked_for_tasks else "SLURM_JOB_CPUS_PER_NODE"
        hosts, slots = expand_node_list(names), expand_counts(environ.get(variable, ""))
        if len(slots) != len(hosts):
            raise UsageError(f"{variable} does not fit SLURM_JOB_NODELIST={names}; give the hosts with -H")
        return [Host(*item) for item in zip(hosts, slots, strict=True)]


class Pbs:
    """PBS and Torque: a file with a line for each rank."""

    def read(self, environ: Mapping[str, str]) -> list[Host] | None:
        path = environ.get("PBS_NODEFILE")
        if path is None:
            return None
        try:
            names = Path(path).read_text().split()
        except OSError as error:
            raise UsageError(f"PBS_NODEFILE={path} cannot be read: {error.strerror}; give the hosts with -H") from error
        return merge(Host(name, 1) for name in names)


class Lsf:
    """LSF: `h1 4 h2 4`."""

    def read(self, environ: Mapping[str, str]) -> list[Host] | None:
        text = environ.get("LSB_MCPU_HOSTS")
        if text is None:
            return None
        words = text.split()
        names, slots = words[::2], words[1::2]
        if len(names) != len(slots) or not all(number.isdecimal() for number in slots):
            raise UsageError(f'LSB_MCPU_HOSTS="{text}" is no list of hosts and slots; give the hosts with -H')
        return merge(Host(name, int(number)) for name, number in zip(names, slots, strict=True))


_BATCH_SYSTEMS: dict[str, BatchSystem] = {"Slurm": Slurm(), "PBS": Pbs(), "LSF": Lsf()}


def detect(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation in which this process runs, or None. Raises UsageError where it is garbled."""
    for name, batch_system in _BATCH_SYSTEMS.items():
        hosts = batch_system.read(environ)
        if hosts:
            return Allocation(name, hosts)
    return None
