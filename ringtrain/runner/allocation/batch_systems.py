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
        lines = _lines_of("PBS_NODEFILE", environ)
        return None if lines is None else merge(Host(name, 1) for name in lines)


class Lsf:
    """LSF: `h1 4 h2 4` or, where that is not set, a file with a line for each rank."""

    def read(self, environ: Mapping[str, str]) -> list[Host] | None:
        text = environ.get("LSB_MCPU_HOSTS")
        if text is None:
            lines = _lines_of("LSB_DJOB_HOSTFILE", environ)
            return None if lines is None else merge(Host(name, 1) for name in lines)
        words = text.split()
        names, slots = words[::2], words[1::2]
        if len(names) != len(slots) or not all(number.isdecimal() for number in slots):
            raise UsageError(f'LSB_MCPU_HOSTS="{text}" is no list of hosts and slots; give the hosts with -H')
        return merge(Host(name, int(number)) for name, number in zip(names, slots, strict=True))


class Sge:
    """SGE and its descendants, in a parallel environment: a file with lines `h1 4 all.q@h1 UNDEFINED`."""

    def read(self, environ: Mapping[str, str]) -> list[Host] | None:
        lines = _lines_of("PE_HOSTFILE", environ)
        if lines is None:
            return None
        fields = [line.split() for line in lines]
        if not all(len(words) >= 2 and words[1].isdecimal() for words in fields):
            raise UsageError(f"PE_HOSTFILE={environ['PE_HOSTFILE']} has no hosts and slots; give the hosts with -H")
        return merge(Host(words[0], int(words[1])) for words in fields)


_BATCH_SYSTEMS: dict[str, BatchSystem] = {"Slurm": Slurm(), "PBS": Pbs(), "LSF": Lsf(), "SGE": Sge()}


def detect(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation in which this process runs, or None. Raises UsageError where it is garbled."""
    for name, batch_system in _BATCH_SYSTEMS.items():
        hosts = batch_system.read(environ)
        if hosts:
            return Allocation(name, hosts)
    return None


def _lines_of(variable: str, environ: Mapping[str, str]) -> list[str] | None:
    """Of the file that the variable names; None where it is not set. Raises UsageError."""
    path = environ.get(variable)
    if path is None:
        return None
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise UsageError(f"{variable}={path} cannot be read: {error.strerror}; give the hosts with -H") from error
    return [line.strip() for line in lines if line.strip()]
